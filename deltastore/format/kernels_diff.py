"""A float compare misses +0 -> -0 and marks every NaN: the scan compares patterns, 64 at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from deltastore.format.kernels_base import Array, changed_mask, kernel, trailing_zeros
from deltastore.format.kernels_fingerprint import HIGH_KEYS, LOW_KEYS, mix_high, mix_low

U = np.uint64
CHUNK_ELEMENTS = 32768
"""Elements scanned between two looks at the room left; they are still in cache when mixed."""

_L0, _L1 = U(LOW_KEYS[0]), U(LOW_KEYS[1])
_H0, _H1 = U(HIGH_KEYS[0]), U(HIGH_KEYS[1])


@kernel
def scan_changes(
    old: Array, new: Array, position: Any, first: Any, indices: Array, steps: Array, count: Any
) -> Any:
    """Append index and step of every changed pattern from `position` on.

    Stops at the end, or before a chunk that might not fit into `indices`, which needs one place
    more than there are changes. `first` is the flat index of element 0. Returns (position reached,
    changes so far, low lane, high lane) of this call.
    """
    size = old.size
    room = indices.size
    low = U(0)
    high = U(0)
    flat = U(first)
    old_values = np.empty(min(CHUNK_ELEMENTS, size), old.dtype)
    new_values = np.empty(min(CHUNK_ELEMENTS, size), old.dtype)
    while position < size:
        end = min(position + CHUNK_ELEMENTS, size)
        if room - count <= end - position:
            break
        begin = count
        place = position
        # Unsigned: a place that might wrap around from the end costs a comparison each time.
        at = U(count)
        while place + 64 <= end:
            mask = changed_mask(old, new, place)
            # Two without a branch: at usual densities a third is rare, and a wrong guess of the
            # processor would stall the stream from memory.
            indices[at] = np.uint32(U(place) + trailing_zeros(mask))
            at += U(mask != U(0))
            mask &= mask - U(1)
            indices[at] = np.uint32(U(place) + trailing_zeros(mask))
            at += U(mask != U(0))
            mask &= mask - U(1)
            while mask != U(0):
                indices[at] = np.uint32(U(place) + trailing_zeros(mask))
                at += U(1)
                mask &= mask - U(1)
            place += 64
        while place < end:
            if old[place] != new[place]:
                indices[at] = np.uint32(place)
                at += U(1)
            place += 1
        count = np.int64(at)
        found = indices[begin:count]
        found_steps = steps[begin:count]
        for i in range(found.size):
            old_values[i] = old[U(found[i])]
            new_values[i] = new[U(found[i])]
        for i in range(found.size):
            e = flat + U(found[i])
            o = U(old_values[i])
            n = U(new_values[i])
            p = _L0 + e * _L1
            q = _H0 + e * _H1
            low += mix_low(p, n) - mix_low(p, o)
            high += mix_high(q, n) - mix_high(q, o)
            found_steps[i] = new_values[i] - old_values[i]
        position = end
    return position, count, low, high


@kernel
def scan_runs(
    old: Array,
    new: Array,
    ends: Array,
    firsts: Array,
    indices: Array,
    steps: Array,
    counts: Array,
    changes: Array,
) -> Any:
    """Scan many short runs that lie end to end, each by itself: a call costs more than they do.

    `ends[r]` is where run r ends in `old` and `new`, `firsts[r]` the flat index of its element 0.
    Appends each run's indices (in the run) and steps, for which there is one place more than
    elements; `counts[r]` says how many, `changes[r]` holds the two lanes. Returns the total.
    """
    begin = np.int64(0)
    total = np.int64(0)
    for run in range(ends.size):
        end = ends[run]
        _position, count, low, high = scan_changes(
            old[begin:end], new[begin:end], 0, firsts[run], indices[total:], steps[total:], 0
        )
        counts[run] = count
        changes[run, 0] = low
        changes[run, 1] = high
        total += count
        begin = end
    return total
