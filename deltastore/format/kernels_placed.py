"""A change whose place in live memory is worked out during the pause makes the pause: it is before.

A *region* is a strided part of a tensor (offset, sizes, strides, falling, each at least the extent
of all that follow it), and its elements lie in live memory with strides of their own. `locate_*`
turn a block's indices into offsets in live memory, beforehand; the others read and write there.

Callers check shapes before they call: kernels do no bounds checks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deltastore.format.kernels_apply import TILE
from deltastore.format.kernels_base import Array, helper, kernel
from deltastore.format.kernels_fingerprint import HIGH_KEYS, LOW_KEYS, mix_high, mix_low

U = np.uint64
_L0, _L1 = U(LOW_KEYS[0]), U(LOW_KEYS[1])
_H0, _H1 = U(HIGH_KEYS[0]), U(HIGH_KEYS[1])
OUTSIDE = -1


@helper
def _tensor_offset(index: Any, start: Array, shape: Array, full: Array) -> Any:
    """Offset in a tensor of shape `full` of a box's index; a run has one dimension in all three."""
    rest = np.int64(index)
    offset = np.int64(0)
    stride = np.int64(1)
    for d in range(shape.size - 1, -1, -1):
        above = rest // shape[d]
        offset += (rest - above * shape[d] + start[d]) * stride
        stride *= full[d]
        rest = above
    return offset


@helper
def _live_offset(rest: Any, sizes: Array, strides: Array, live: Array) -> Any:
    """Where the element `rest` behind the region's first one lies in live memory, or OUTSIDE."""
    offset = np.int64(0)
    for d in range(sizes.size):
        if rest < 0:
            return np.int64(OUTSIDE)
        coordinate = rest // strides[d]
        if coordinate >= sizes[d]:
            return np.int64(OUTSIDE)
        rest -= coordinate * strides[d]
        offset += coordinate * live[d]
    if rest != 0:
        return np.int64(OUTSIDE)
    return offset


@kernel
def locate_count(
    indices: Array,
    start: Array,
    shape: Array,
    full: Array,
    first: Any,
    sizes: Array,
    strides: Array,
    live: Array,
) -> Any:
    """How many of a box's indices lie in the region whose first element is `first`."""
    count = 0
    for i in range(indices.size):
        rest = _tensor_offset(indices[i], start, shape, full) - first
        if _live_offset(rest, sizes, strides, live) != OUTSIDE:
            count += 1
    return count


@kernel
def locate_fill(
    indices: Array,
    start: Array,
    shape: Array,
    full: Array,
    first: Any,
    sizes: Array,
    strides: Array,
    live: Array,
    values: Array,
    offsets: Array,
    elements: Array,
    chosen: Array,
) -> Any:
    """Of each index that lies in the region: its live offset, its element, and its value."""
    count = 0
    for i in range(indices.size):
        element = _tensor_offset(indices[i], start, shape, full)
        offset = _live_offset(element - first, sizes, strides, live)
        if offset != OUTSIDE:
            offsets[count] = offset
            elements[count] = element
            chosen[count] = values[i]
            count += 1
    return count


@kernel
def walk(
    begin: Any, first: Any, sizes: Array, strides: Array, live: Array, offsets: Array, elements: Any
) -> Any:
    """Live offsets and elements of the region's own elements from the `begin`-th, in its order."""
    rank = sizes.size
    at = np.zeros(rank, np.int64)
    rest = np.int64(begin)
    offset = np.int64(0)
    element = np.int64(first)
    for d in range(rank - 1, -1, -1):
        above = rest // sizes[d]
        at[d] = rest - above * sizes[d]
        offset += at[d] * live[d]
        element += at[d] * strides[d]
        rest = above
    for i in range(offsets.size):
        offsets[i] = offset
        elements[i] = element
        for d in range(rank - 1, -1, -1):
            at[d] += 1
            offset += live[d]
            element += strides[d]
            if at[d] < sizes[d]:
                break
            offset -= sizes[d] * live[d]
            element -= sizes[d] * strides[d]
            at[d] = 0


@kernel
def change_at(
    weights: Array,
    offsets: Array,
    base: Any,
    elements: Array,
    first: Any,
    values: Array,
    absolute: Any,
) -> Any:
    """Fingerprint change of new values at weights[base + offsets[i]]; writes nothing.

    `values` are steps, or new patterns where `absolute`. The flat element of change i is
    first + elements[i].
    """
    low = U(0)
    high = U(0)
    start = U(base)
    flat = U(first)
    room = min(TILE, offsets.size)
    old = np.empty(room, weights.dtype)
    new = np.empty(room, weights.dtype)
    for begin in range(0, offsets.size, TILE):
        count = min(TILE, offsets.size - begin)
        for i in range(count):
            old[i] = weights[start + U(offsets[begin + i])]
        if absolute:
            for i in range(count):
                new[i] = values[begin + i]
        else:
            for i in range(count):
                new[i] = old[i] + values[begin + i]
        for i in range(count):
            e = flat + U(elements[begin + i])
            o = U(old[i])
            n = U(new[i])
            p = _L0 + e * _L1
            q = _H0 + e * _H1
            low += mix_low(p, n) - mix_low(p, o)
            high += mix_high(q, n) - mix_high(q, o)
    return low, high


@kernel
def mix_at(weights: Array, offsets: Array, base: Any, elements: Array, first: Any) -> Any:
    """Fingerprint of weights[base + offsets[i]] as the elements first + elements[i]."""
    low = U(0)
    high = U(0)
    start = U(base)
    flat = U(first)
    for i in range(offsets.size):
        e = flat + U(elements[i])
        b = U(weights[start + U(offsets[i])])
        low += mix_low(_L0 + e * _L1, b)
        high += mix_high(_H0 + e * _H1, b)
    return low, high


@kernel
def add_steps(weights: Array, offsets: Array, base: Any, steps: Array, journal: Array) -> Any:
    """weights[base + offsets[i]] += steps[i], then journal[0] += 1: no exception comes between."""
    start = U(base)
    for i in range(offsets.size):
        weights[start + U(offsets[i])] += steps[i]
    journal[0] += 1


@kernel
def take_steps(weights: Array, offsets: Array, base: Any, steps: Array, journal: Array) -> Any:
    """What undoes `add_steps`."""
    start = U(base)
    for i in range(offsets.size):
        weights[start + U(offsets[i])] -= steps[i]
    journal[0] -= 1


@kernel
def swap(
    weights: Array, offsets: Array, base: Any, values: Array, old: Array, journal: Array
) -> Any:
    """Put `values` in, keep what was there in `old` (which may be empty), then journal[0] += 1."""
    start = U(base)
    if old.size:
        for i in range(offsets.size):
            old[i] = weights[start + U(offsets[i])]
    for i in range(offsets.size):
        weights[start + U(offsets[i])] = values[i]
    journal[0] += 1


@kernel
def put_back(weights: Array, offsets: Array, base: Any, old: Array, journal: Array) -> Any:
    """What undoes `swap`."""
    start = U(base)
    for i in range(offsets.size):
        weights[start + U(offsets[i])] = old[i]
    journal[0] -= 1
