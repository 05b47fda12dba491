"""Writing first and checking later leaves mixed weights: gather, mix and scatter are apart.

The indices of a block are row-major in its box. `locate` turns those of a box that is not a flat
run into offsets in the tensor; flat runs are read in place, with a base.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deltastore.format.kernels_base import Array, helper, kernel
from deltastore.format.kernels_fingerprint import HIGH_KEYS, LOW_KEYS, mix_change, mix_high, mix_low

U = np.uint64
TILE = 2048
"""Changes handled between gather and mix: their bits stay in the nearest cache."""

_L0, _L1 = U(LOW_KEYS[0]), U(LOW_KEYS[1])
_H0, _H1 = U(HIGH_KEYS[0]), U(HIGH_KEYS[1])


@helper
def _all_below(offsets: Array, limit: Any) -> Any:
    top = U(0)
    for i in range(offsets.size):
        top = max(top, U(offsets[i]))
    return offsets.size == 0 or top < U(limit)


@kernel
def gather(weights: Array, offsets: Array, base: Any, out: Array) -> Any:
    """out[i] = weights[base + offsets[i]]."""
    first = U(base)
    for i in range(offsets.size):
        out[i] = weights[first + U(offsets[i])]


@kernel
def scatter(weights: Array, offsets: Array, base: Any, values: Array) -> Any:
    """weights[base + offsets[i]] = values[i]."""
    first = U(base)
    for i in range(offsets.size):
        weights[first + U(offsets[i])] = values[i]


@kernel
def gather_within(weights: Array, offsets: Array, base: Any, limit: Any, out: Array) -> Any:
    """`gather`, if every offset is below `limit`; else nothing is read. Says which."""
    if not _all_below(offsets, limit):
        return False
    gather(weights, offsets, base, out)
    return True


@kernel
def scatter_within(weights: Array, offsets: Array, base: Any, limit: Any, values: Array) -> Any:
    """`scatter`, if every offset is below `limit`; else nothing is written. Says which."""
    if not _all_below(offsets, limit):
        return False
    scatter(weights, offsets, base, values)
    return True


@kernel
def gather_change(
    weights: Array,
    offsets: Array,
    base: Any,
    first: Any,
    values: Array,
    absolute: Any,
    old: Array,
    new: Array,
) -> Any:
    """Read the old bits, work out the new ones, and sum the fingerprint change; writes no weight.

    `values` are steps, or new patterns where `absolute`. `first` is the flat index of weights[0].
    """
    low = U(0)
    high = U(0)
    start = U(base)
    flat = U(first) + start
    for begin in range(0, offsets.size, TILE):
        end = min(begin + TILE, offsets.size)
        for i in range(begin, end):
            old[i] = weights[start + U(offsets[i])]
        if absolute:
            for i in range(begin, end):
                new[i] = values[i]
        else:
            for i in range(begin, end):
                new[i] = old[i] + values[i]
        for i in range(begin, end):
            e = flat + U(offsets[i])
            o = U(old[i])
            n = U(new[i])
            p = _L0 + e * _L1
            q = _H0 + e * _H1
            low += mix_low(p, n) - mix_low(p, o)
            high += mix_high(q, n) - mix_high(q, o)
    return low, high


@kernel
def change_proved(
    weights: Array,
    offsets: Array,
    base: Any,
    first: Any,
    values: Array,
    absolute: Any,
    low: Any,
    high: Any,
) -> Any:
    """`gather_change`, then `scatter` if the change found is (low, high); returns it."""
    old = np.empty(offsets.size, weights.dtype)
    new = np.empty(offsets.size, weights.dtype)
    found_low, found_high = gather_change(weights, offsets, base, first, values, absolute, old, new)
    if found_low == low and found_high == high:
        scatter(weights, offsets, base, new)
    return found_low, found_high


@kernel
def change_runs(
    offsets: Array,
    old: Array,
    values: Array,
    ends: Array,
    firsts: Array,
    absolute: Array,
    changes: Array,
) -> Any:
    """The fingerprint change of many short blocks that lie end to end, each by itself.

    `ends[r]` is where block r ends, `firsts[r]` the flat index that its offsets count from;
    `values` are steps, or new patterns where `absolute[r]`; `changes[r]` takes the two lanes.
    """
    new = np.empty(values.size, values.dtype)
    begin = 0
    for run in range(ends.size):
        end = ends[run]
        for i in range(begin, end):
            new[i] = values[i]
        if not absolute[run]:
            for i in range(begin, end):
                new[i] += old[i]
        part = slice(begin, end)
        low, high = mix_change(offsets[part], firsts[run], old[part], new[part], end - begin)
        changes[run, 0] = low
        changes[run, 1] = high
        begin = end


@kernel
def locate(indices: Array, start: Array, shape: Array, full: Array, out: Array) -> Any:
    """Offsets in a tensor of shape `full` of the row-major indices of a box."""
    rank = shape.size
    for i in range(indices.size):
        rest = np.int64(indices[i])
        offset = np.int64(0)
        stride = np.int64(1)
        for d in range(rank - 1, -1, -1):
            above = rest // shape[d]
            offset += (rest - above * shape[d] + start[d]) * stride
            stride *= full[d]
            rest = above
        out[i] = offset
