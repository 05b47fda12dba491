"""A float compare misses +0 -> -0 and marks every NaN: the scan compares patterns, 64 at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from deltastore.format.kernels_base import Array, changed_mask, kernel, trailing_zeros
from deltastore.format.kernels_fingerprint import HIGH_KEYS, LOW_KEYS, mix_high, mix_low

U = np.uint64
CHUNK_ELEMENTS = 8192
"""Elements scanned between two looks at the room left; their changes stay in the nearest cache."""

_L0, _L1 = U(LOW_KEYS[0]), U(LOW_KEYS[1])
_H0, _H1 = U(HIGH_KEYS[0]), U(HIGH_KEYS[1])


@kernel
def scan_changes(
    old: Array, new: Array, position: Any, first: Any, indices: Array, steps: Array, count: Any
) -> Any:
    """Append index and step of every changed pattern from `position` on.

    Stops at the end, or before a chunk that might not fit into `indices`. `first` is the flat index
    of element 0. Returns (position reached, changes so far, low lane, high lane) of this call.
    """
    size = old.size
    room = indices.size
    low = U(0)
    high = U(0)
    flat = U(first)
    old_values = np.empty(CHUNK_ELEMENTS, old.dtype)
    new_values = np.empty(CHUNK_ELEMENTS, old.dtype)
    while position < size:
        end = min(position + CHUNK_ELEMENTS, size)
        if room - count < end - position:
            break
        found = 0
        place = position
        while place + 64 <= end:
            mask = changed_mask(old, new, place)
            while mask != U(0):
                at = place + np.int64(trailing_zeros(mask))
                mask &= mask - U(1)
                indices[count + found] = np.uint32(at)
                old_values[found] = old[at]
                new_values[found] = new[at]
                found += 1
            place += 64
        while place < end:
            if old[place] != new[place]:
                indices[count + found] = np.uint32(place)
                old_values[found] = old[place]
                new_values[found] = new[place]
                found += 1
            place += 1
        for i in range(found):
            e = flat + U(indices[count + i])
            o = U(old_values[i])
            n = U(new_values[i])
            p = _L0 + e * _L1
            q = _H0 + e * _H1
            low += mix_low(p, n) - mix_low(p, o)
            high += mix_high(q, n) - mix_high(q, o)
            steps[count + i] = new_values[i] - old_values[i]
        count += found
        position = end
    return position, count, low, high
