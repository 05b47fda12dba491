"""20,000 tensors asked for names, overlaps and dtypes at every step cost as much as their diff.

What a module's tensors are is worked out when they are other tensors than the last time: another
name, place in memory, shape, stride, dtype or device. All that `named_tensors` decides follows from
these. No tensor is held on to between two calls: a trainer may free its weights meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deltastore.adapters.torch_tensors import (
    NamedTensor,
    found_tensors,
    integer_dtype,
    name_tensors,
)
from deltastore.format.coverage import match_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deltastore.adapters.torch_tensors import ModuleLike
    from deltastore.format.dtypes import DType
    from deltastore.format.layout import Layout, TensorEntry


@dataclass(frozen=True, slots=True)
class Place:
    """One storage that serves a tensor of a layout.

    Args:
        position: among the module's tensors.
        names, dtype: as of NamedTensor.
    """

    position: int
    names: tuple[str, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Serving:
    """What serves one tensor of a layout.

    Args:
        places: at least one; more when its names are several storages.
        patterns: integers of this type read it as it lies, where that is all there is to it: one
            contiguous storage of the layout's own dtype, of real numbers, not empty.
        elements: of the tensor.
    """

    places: tuple[Place, ...]
    patterns: torch.dtype | None
    elements: int


@dataclass(frozen=True, slots=True)
class _Remembered:
    names: list[str]
    marks: list[object]
    layout: Layout
    servings: list[Serving]


class Inventory:
    """Which tensors of a module serve a layout. Used by one thread.

    Args:
        module: a module or a state dict.
        entries: what the named tensors are offered as.
    """

    def __init__(
        self,
        module: ModuleLike,
        entries: Callable[[Sequence[NamedTensor]], Sequence[TensorEntry]],
    ) -> None:
        self._module = module
        self._entries = entries
        self._last: _Remembered | None = None

    def serving(self, layout: Layout) -> tuple[list[torch.Tensor], list[Serving]]:
        """The module's tensors, without their graphs, and per tensor of the layout what serves it.

        Raises what `named_tensors` and `match_entries` raise.
        """
        found = found_tensors(self._module)
        names, tensors = list(found), list(found.values())
        last = self._last
        known = last is not None and last.names == names and last.layout == layout
        marks = [_mark(tensor) for tensor in tensors]
        if last is not None and known and None not in marks and last.marks == marks:
            return tensors, last.servings
        servings = self._work_out(layout, found)
        self._last = _Remembered(names, marks, layout, servings) if None not in marks else None
        return tensors, servings

    def _work_out(self, layout: Layout, found: dict[str, torch.Tensor]) -> list[Serving]:
        named = name_tensors(found)
        places = [Place(n.position, n.names, n.dtype) for n in named]
        servings = []
        for spec, positions in zip(
            layout.tensors, match_entries(layout, self._entries(named)), strict=True
        ):
            first = named[positions[0]]
            plain = (
                len(positions) == 1
                and first.dtype is spec.dtype
                and spec.elements > 0
                and not first.tensor.is_complex()
                and first.tensor.is_contiguous()
            )
            patterns = integer_dtype(first.tensor) if plain else None
            serving = Serving(tuple(places[p] for p in positions), patterns, spec.elements)
            servings.append(serving)
        return servings


def _mark(tensor: object) -> object:
    """Equal for a tensor that is what it was; None for one that must be looked at every time."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return None
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    return (
        tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device,
    )  # fmt: skip
