"""A sparse block of a dense change can outgrow the tensor: this decides which form is smaller."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deltastore.format.indices import planned_bits
from deltastore.format.kernels_base import frozen
from deltastore.format.kernels_cost import plane_cost
from deltastore.format.kernels_values import estimated_step_bits
from deltastore.format.values import StepValues, to_planes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from deltastore.format.dtypes import Bits
    from deltastore.format.streams import Bytes

SPARSE_FOR_SURE = 4
"""With at most one change in so many elements the sparse form is smaller for every width."""

SMALL_ELEMENTS = 4096
"""Smaller boxes are judged from a sample: there may be 20,000 of them."""


def sparse_for_sure(changes: int, elements: int) -> bool:
    """Whether nobody need look at the values of a box to know that its sparse form is smaller."""
    return changes * SPARSE_FOR_SURE <= elements


def dense_is_smaller(indices: NDArray[np.uint32], steps: Bits, new: Bits) -> bool:
    """Whether the box's new patterns take fewer bits than its changes, as zstd would store both."""
    if sparse_for_sure(indices.size, new.size):
        return False
    if new.size < SMALL_ELEMENTS:
        gap = new.size // indices.size
        sparse = indices.size * (gap.bit_length() + 1) + int(estimated_step_bits(frozen(steps)))
        return new.nbytes * 8 <= sparse
    counts = np.array([indices.size], np.int64)
    streams = StepValues().encode(steps, counts)
    sparse = planned_bits(indices, new.size) + sum(_stored_bits(raw) for _stream, raw in streams)
    dense = sum(_stored_bits(plane) for plane in to_planes(new.reshape(-1)))
    return dense <= sparse


def _stored_bits(raw: Bytes) -> int:
    seen = np.bincount(raw, minlength=256)
    return min(int(plane_cost(frozen(seen), raw.size, raw.size)), 8 * raw.size)
