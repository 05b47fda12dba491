"""A read or a write beyond its box meets another weight: places are checked where they are used.

Of a flat box whose tensor lies in host memory, in one call of a kernel: of 20,000 small tensors the
checks, made one by one, took longer than the bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deltastore.format.kernels_apply import gather_within, scatter_within
from deltastore.format.kernels_base import frozen

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from deltastore.format.box import Box
    from deltastore.format.dtypes import Bits


def read_places(bits: Bits, box: Box, indices: NDArray[np.uint32]) -> Bits | None:
    """What a tensor holds at those indices of a flat box; None if one of them is outside."""
    if not _inside(bits, box):
        return None
    found: Bits = np.empty(indices.size, bits.dtype)
    within = gather_within(bits, frozen(indices), box.start[0], box.shape[0], found)
    return found if within else None


def write_places(bits: Bits, box: Box, indices: NDArray[np.uint32], values: Bits) -> bool:
    """Write one value of the tensor's width per index; nothing, and False, if one is outside."""
    if not _inside(bits, box):
        return False
    return bool(scatter_within(bits, frozen(indices), box.start[0], box.shape[0], frozen(values)))


def _inside(bits: Bits, box: Box) -> bool:
    if not (box.flat and len(box.start) == len(box.shape) == 1):
        return False
    start, count = box.start[0], box.shape[0]
    return start >= 0 and 0 <= count <= bits.size - start
