"""A gap decoded past its box writes into another weight: every code is checked as it is read.

A gap is index - previous index - 1, the previous of the first being -1, so that indices increase
strictly by construction. Buffers that are read as words are padded by `PADDING_BYTES`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deltastore.format.kernels_base import Array, kernel, load_u64, store_u64, trailing_zeros

U = np.uint64
PADDING_BYTES = 16
ESCAPE = 0xFFFF
MAX_RICE_PARAMETER = 22

NO_INDEX, LEB128, GAP16, RICE = 0, 1, 2, 3
"""Index encodings by number."""

OK, TRUNCATED, TRAILING, RANGE, NOT_MINIMAL, PADDING = 0, 1, 2, 3, 4, 5
"""What a decoding kernel found."""


@kernel
def put_leb128(value: Any, out: Array, at: Any) -> Any:
    """Write one unsigned number in minimal LEB128; returns where the next goes."""
    rest = U(value)
    while rest >= U(128):
        out[at] = np.uint8((rest & U(127)) | U(128))
        rest >>= U(7)
        at += 1
    out[at] = np.uint8(rest)
    return at + 1


@kernel
def get_leb128(data: Array, at: Any, size: Any) -> Any:
    """Read one minimal LEB128 number below 2^63: (value, next place, what was found)."""
    value = U(0)
    shift = 0
    while True:
        if at >= size:
            return np.int64(0), at, TRUNCATED
        byte = U(data[at])
        at += 1
        if shift == 56 and byte >= U(128):
            return np.int64(0), at, NOT_MINIMAL
        value |= (byte & U(127)) << U(shift)
        if byte < U(128):
            if byte == U(0) and shift > 0:
                return np.int64(0), at, NOT_MINIMAL
            return np.int64(value), at, OK
        shift += 7


@kernel
def write_numbers(values: Array, out: Array) -> Any:
    """A column of int64 numbers as LEB128; returns the bytes used (at most 9 each)."""
    at = 0
    for i in range(values.size):
        at = put_leb128(values[i], out, at)
    return at


@kernel
def read_numbers(data: Array, at: Any, out: Array) -> Any:
    """Fill `out` from LEB128 numbers at `at`: (next place, what was found)."""
    for i in range(out.size):
        value, at, found = get_leb128(data, at, data.size)
        if found != OK:
            return at, found
        out[i] = value
    return at, OK


@kernel
def encode_rice(indices: Array, parameter: Any, rice: Array, start: Any) -> Any:
    """Write one block's gaps as Rice codes from byte `start` on; returns where the next byte is."""
    k = U(parameter)
    mask = (U(1) << k) - U(1)
    at = np.int64(start)
    word: Any = U(0)
    filled: Any = U(0)
    previous = np.int64(-1)
    i = U(0)
    count = U(indices.size)
    while i < count:
        gap = U(np.int64(indices[i]) - previous - 1)
        previous = np.int64(indices[i])
        q: Any = gap >> k
        i += U(1)
        if i < count and q + k <= U(27):
            # Two codes at once, where both are short: half as many stores that wait for each other.
            next_gap = U(np.int64(indices[i]) - previous - 1)
            next_q = next_gap >> k
            if next_q + k <= U(27):
                previous = np.int64(indices[i])
                i += U(1)
                size = q + U(1) + k
                code = (((gap & mask) << U(1)) | U(1)) << q
                code |= ((((next_gap & mask) << U(1)) | U(1)) << next_q) << size
                word |= code << filled
                store_u64(rice, at, word)
                filled += size + next_q + U(1) + k
                at += np.int64(filled >> U(3))
                word >>= filled & ~U(7)
                filled &= U(7)
                continue
        if q + k > U(55):
            while q > U(48):
                store_u64(rice, at, word)
                filled += U(48)
                at += np.int64(filled >> U(3))
                word = U(0)
                filled &= U(7)
                q -= U(48)
            # The bits already in the open byte were stored; keep them for the next store.
            store_u64(rice, at, word)
            filled += q
            at += np.int64(filled >> U(3))
            word = U(0) if filled >= U(8) else word
            filled &= U(7)
            q = U(0)
        word |= ((((gap & mask) << U(1)) | U(1)) << q) << filled
        store_u64(rice, at, word)
        filled += q + U(1) + k
        at += np.int64(filled >> U(3))
        word >>= filled & ~U(7)
        filled &= U(7)
    return at + np.int64(filled != U(0))


@kernel
def encode_indices(
    indices: Array,
    ends: Array,
    encodings: Array,
    parameters: Array,
    rice: Array,
    leb: Array,
    low: Array,
    high: Array,
    wide: Array,
) -> Any:
    """Write every block's gaps to the stream of its encoding; returns the bytes used of each.

    `rice` needs PADDING_BYTES beyond its content. Rice codes of a block start on a byte.
    """
    rice_at = np.int64(0)
    leb_at = np.int64(0)
    plane_at = np.int64(0)
    wide_at = np.int64(0)
    begin = 0
    for block in range(ends.size):
        end = ends[block]
        previous = np.int64(-1)
        if encodings[block] == RICE:
            rice_at = encode_rice(indices[begin:end], parameters[block], rice, rice_at)
        elif encodings[block] == LEB128:
            for i in range(begin, end):
                leb_at = put_leb128(np.int64(indices[i]) - previous - 1, leb, leb_at)
                previous = np.int64(indices[i])
        elif encodings[block] == GAP16:
            for i in range(begin, end):
                gap: Any = np.int64(indices[i]) - previous - 1
                previous = np.int64(indices[i])
                if gap >= ESCAPE:
                    wide_at = put_leb128(gap - ESCAPE, wide, wide_at)
                    gap = ESCAPE
                low[plane_at] = np.uint8(gap & 255)
                high[plane_at] = np.uint8(gap >> 8)
                plane_at += 1
        begin = end
    return rice_at, leb_at, plane_at, wide_at


@kernel
def decode_indices(
    counts: Array,
    elements: Array,
    encodings: Array,
    parameters: Array,
    rice: Array,
    rice_bytes: Any,
    leb: Array,
    low: Array,
    high: Array,
    wide: Array,
    out: Array,
) -> Any:
    """Fill `out` with every block's indices: (block, what was found) of the first fault, or OK.

    All streams must be used up exactly. `rice` is padded by PADDING_BYTES of zero.
    """
    rice_bit = np.int64(0)
    rice_end = np.int64(rice_bytes) * 8
    leb_at = np.int64(0)
    plane_at = np.int64(0)
    wide_at = np.int64(0)
    begin = 0
    for block in range(counts.size):
        end = begin + counts[block]
        limit = elements[block]
        previous = np.int64(-1)
        if encodings[block] == RICE:
            k = np.int64(parameters[block])
            mask = (U(1) << U(k)) - U(1)
            for i in range(begin, end):
                word = load_u64(rice, rice_bit >> 3) >> U(rice_bit & 7)
                q = np.int64(trailing_zeros(word))
                if q + k > 55:
                    q = np.int64(0)
                    while True:
                        word = load_u64(rice, rice_bit >> 3) >> U(rice_bit & 7)
                        if word & ((U(1) << U(48)) - U(1)):
                            break
                        q += 48
                        rice_bit += 48
                        if rice_bit >= rice_end:
                            return block, TRUNCATED
                    ones = np.int64(trailing_zeros(word))
                    q += ones
                    rice_bit += ones + 1
                    if rice_bit > rice_end:
                        return block, TRUNCATED
                    word = load_u64(rice, rice_bit >> 3) >> U(rice_bit & 7)
                    rice_bit += k
                else:
                    word >>= U(q + 1)
                    rice_bit += q + 1 + k
                if rice_bit > rice_end:
                    return block, TRUNCATED
                previous += ((q << k) | np.int64(word & mask)) + 1
                if previous >= limit:
                    return block, RANGE
                out[i] = np.uint32(previous)
            loose = rice_bit & 7
            if loose:
                if rice[rice_bit >> 3] >> loose:
                    return block, PADDING
                rice_bit += 8 - loose
        elif encodings[block] == LEB128:
            for i in range(begin, end):
                gap, leb_at, found = get_leb128(leb, leb_at, leb.size)
                if found != OK:
                    return block, found
                if gap >= limit - previous - 1:
                    return block, RANGE
                previous += gap + 1
                out[i] = np.uint32(previous)
        elif encodings[block] == GAP16:
            for i in range(begin, end):
                gap = np.int64(low[plane_at]) | (np.int64(high[plane_at]) << 8)
                plane_at += 1
                if gap == ESCAPE:
                    more, wide_at, found = get_leb128(wide, wide_at, wide.size)
                    if found != OK:
                        return block, found
                    if more >= limit:
                        return block, RANGE
                    gap += more
                previous += gap + 1
                if previous >= limit:
                    return block, RANGE
                out[i] = np.uint32(previous)
        begin = end
    if rice_bit != rice_end or leb_at != leb.size or wide_at != wide.size:
        return counts.size, TRAILING
    return counts.size, OK
