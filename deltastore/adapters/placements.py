"""A fuse map written by hand rots with the next model: a placement is what the loader itself did.

A *placement* says that a strided part of one checkpoint tensor is, element for element, a strided
view of live memory. Fused projections, tensor-parallel slices, expert stacks, tied heads and
transposes are all placements; what is not is *dense-only*.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from deltastore.adapters.region_overlap import Strided


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A strided part of one checkpoint tensor, in row-major elements of that tensor.

    Element (i_0, i_1, …) of the region is element `offset + sum(i_k * strides[k])` of the tensor.
    Dimensions are in order of falling strides, those of size 1 are left out, and every stride is
    at least the extent of all that follow it: so coordinates are found by division, and no element
    occurs twice.

    Args:
        tensor: position in the layout.
    """

    tensor: int
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements the region has."""
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Where a region of a checkpoint tensor lives in this process.

    Args:
        region: of the checkpoint tensor.
        live: a view of live memory with exactly `region.sizes` as its shape, any strides; never
            rebound. Of the layout's dtype, or wider by an exact widening.
        parameter: runtime name of the parameter or buffer it is a view of.
        module: runtime name of the module that holds it.
        widened: whether `live` holds the exact widening (bf16 or fp16 in fp32) of the patterns.
    """

    region: Region
    live: torch.Tensor
    parameter: str
    module: str
    widened: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Reach:
    """A place in a module's memory that its loader writes.

    Args:
        tensors: layout positions of all it depends on; none for a constant.
        place: the bytes, counted from the start of the storage that the parameters are in; None
            if they overlap.
        parameters: runtime names of the parameters or buffers it lies in (several if tied).
        modules: runtime names of the modules that hold those.
        padding: whether it is a constant.
    """

    tensors: tuple[int, ...]
    place: Strided | None
    parameters: tuple[str, ...]
    modules: tuple[str, ...]
    padding: bool
