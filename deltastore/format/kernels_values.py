"""Steps stored as whole patterns cost ten times their information: these kernels split them.

A step is new minus old, a signed number modulo 2^w. It is stored as a direction bit (1: down), a
"more than one" bit, and, where that is set, the magnitude minus 2. Bits of a block start on a byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deltastore.format.kernels_base import (
    Array,
    beyond_mask,
    falling_mask,
    kernel,
    load_u64,
    put_ones,
    store_u64,
    trailing_zeros,
    zero_mask,
)

U = np.uint64


@kernel
def split_steps(
    steps: Array, ends: Array, directions: Array, mores: Array, magnitudes: Array
) -> Any:
    """Split steps into their streams: (magnitudes written, whether a step was 0).

    `magnitudes` needs one place more than there are steps.
    """
    width = steps.itemsize * 8
    zero = steps.dtype.type(0)
    one = steps.dtype.type(1)
    two = steps.dtype.type(2)
    count: Any = 0
    bad: Any = False
    at = 0
    begin = 0
    for block in range(ends.size):
        end = ends[block]
        group = begin
        while group + 64 <= end:
            direction = falling_mask(steps, group)
            more = beyond_mask(steps, group)
            bad |= zero_mask(steps, group) != U(0)
            store_u64(directions, at, direction)
            store_u64(mores, at, more)
            while more != U(0):
                step = steps[group + np.int64(trailing_zeros(more))]
                down = U(step) >> U(width - 1)
                magnitudes[count] = steps.dtype.type(zero - step) - two if down else step - two
                count += 1
                more &= more - U(1)
            group += 64
            at += 8
        while group < end:
            direction = U(0)
            more = U(0)
            for j in range(min(8, end - group)):
                step = steps[group + j]
                bad |= step == zero
                down = U(step) >> U(width - 1)
                size = steps.dtype.type(zero - step) if down else step
                beyond = U(size != one)
                direction |= down << U(j)
                more |= beyond << U(j)
                magnitudes[count] = size - two
                count += np.int64(beyond)
            directions[at] = np.uint8(direction)
            mores[at] = np.uint8(more)
            at += 1
            group += 8
        begin = end
    return count, bad


@kernel
def count_mores(mores: Array) -> Any:
    """How many bits are set."""
    total: Any = 0
    for i in range(mores.size):
        b = np.int64(mores[i])
        b = b - ((b >> 1) & 0x55)
        b = (b & 0x33) + ((b >> 2) & 0x33)
        total += (b + (b >> 4)) & 0x0F
    return total


@kernel
def join_steps(
    counts: Array, directions: Array, mores: Array, magnitudes: Array, steps: Array
) -> Any:
    """Rebuild steps: (block of the first fault or -1, whether it is in the padding).

    `magnitudes` has one place more than bits set in `mores`. A fault is a magnitude that has a
    shorter or another coding, or a bit set behind the last step of a block.
    """
    top = U(1) << U(steps.itemsize * 8 - 1)
    used: Any = 0
    at = 0
    begin = 0
    for block in range(counts.size):
        end = begin + counts[block]
        bad = U(0)
        group = begin
        while group + 64 <= end:
            direction = load_u64(directions, at)
            more = load_u64(mores, at)
            put_ones(steps, group, direction)
            while more != U(0):
                j = trailing_zeros(more)
                more &= more - U(1)
                down = (direction >> j) & U(1)
                size = U(magnitudes[used]) + U(2)
                used += 1
                # At most 2^(w-1) down, 2^(w-1) - 1 up; a wrap to 0 or 1 is too large as well.
                bad |= U(size > top - U(1) + down)
                bad |= U(size < U(2))
                steps[group + np.int64(j)] = steps.dtype.type((size ^ (U(0) - down)) + down)
            group += 64
            at += 8
        while group < end:
            direction = U(directions[at])
            more = U(mores[at])
            at += 1
            filled = min(8, end - group)
            if filled < 8 and ((direction | more) >> U(filled)):
                return block, True
            for j in range(filled):
                beyond = more & U(1)
                down = direction & U(1)
                more >>= U(1)
                direction >>= U(1)
                size = U(1) + beyond * (U(magnitudes[used]) + U(1))
                used += np.int64(beyond)
                bad |= U(size > top - U(1) + down)
                bad |= U(size <= beyond)
                steps[group + j] = steps.dtype.type((size ^ (U(0) - down)) + down)
            group += 8
        if bad:
            return block, False
        begin = end
    return -1, False


@kernel
def estimated_step_bits(steps: Array) -> Any:
    """About how many bits the value streams of these steps take, from some hundred of them."""
    width = steps.itemsize * 8
    stride = max(steps.size // 256, 1)
    seen: Any = 0
    bits: Any = 0
    for i in range(0, steps.size, stride):
        step = steps[i]
        down = U(step) >> U(width - 1)
        size = U(steps.dtype.type(steps.dtype.type(0) - step) if down else step)
        seen += 1
        bits += 2
        if size > U(1):
            while size != U(0):
                size >>= U(1)
                bits += 1
    return bits * steps.size // max(seen, 1)


@kernel
def estimated_bits_of_each(steps: Array, ends: Array, out: Array) -> Any:
    """`estimated_step_bits` of many short stretches, which end at `ends[i]`, into `out[i]`."""
    begin = np.int64(0)
    for i in range(ends.size):
        out[i] = estimated_step_bits(steps[begin : ends[i]])
        begin = ends[i]
