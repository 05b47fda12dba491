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

COST_RICE_PARAMETER, COST_RICE_BITS, COST_LEB_BYTES, COST_PLANE_BITS, COST_WIDE_BYTES = range(5)
COST_COLUMNS = 5

PLANE_SAMPLES = 1024
"""Gaps looked at to guess how well their planes compress."""

MIN_PLANE_CHANGES = 64
"""Below so many changes planes are taken to be incompressible: their statistics say nothing."""


@kernel
def log2_fixed(value: Any) -> Any:
    """log2(value) in 1/256, rounded down, for value >= 1: integers only, the same everywhere."""
    x = U(value)
    whole = 0
    while (x >> U(whole + 1)) != U(0):
        whole += 1
    m = (x << U(31 - whole)) if whole <= 31 else (x >> U(whole - 31))
    result = whole
    for _ in range(8):
        m = (m * m) >> U(31)
        result <<= 1
        if m >= (U(1) << U(32)):
            m >>= U(1)
            result |= 1
    return result


@kernel
def plane_cost(seen: Array, sampled: Any, total: Any) -> Any:
    """About how many bits zstd needs for `total` bytes, from the histogram of those `sampled`.

    Its Huffman codes take at least one bit a byte and a table; a plane that is nearly constant is
    coded by matches instead, about 28 bits for each byte that differs.
    """
    log_sampled = log2_fixed(sampled)
    coded = 8 * sampled
    tables = 0
    common = 0
    for symbol in range(256):
        c = seen[symbol]
        if c:
            # A sample looks more orderly than what it is drawn from, by 0.72 bits for each symbol.
            coded += c * max(log_sampled - log2_fixed(c), 256) + 184
            tables += 4
            common = max(common, c)
    matched = (sampled - common) * 28
    return min((coded >> 8) * total // sampled + tables, matched * total // sampled)


@kernel
def count_gaps(indices: Array, begin: Any, end: Any, least: Any) -> Any:
    """How many gaps of a block are at least so large."""
    count = np.int64(np.int64(indices[begin]) >= least)
    before = indices[begin : end - 1]
    after = indices[begin + 1 : end]
    for i in range(after.size):
        count += np.int64(np.int64(after[i]) - np.int64(before[i]) > least)
    return count


@kernel
def sampled_planes(
    before: Array, after: Array, stride: Any, low_seen: Array, high_seen: Array
) -> Any:
    """About how many bits the two planes of these gaps take, from every `stride`-th of them."""
    low_seen[:] = 0
    high_seen[:] = 0
    sampled = 0
    for i in range(0, after.size, stride):
        g = np.int64(after[i]) - np.int64(before[i]) - 1
        if g > ESCAPE:
            g = np.int64(ESCAPE)
        low_seen[g & 255] += 1
        high_seen[g >> 8] += 1
        sampled += 1
    total = after.size + 1
    return plane_cost(low_seen, sampled, total) + plane_cost(high_seen, sampled, total)


@kernel
def index_costs(indices: Array, ends: Array, elements: Array, costs: Array) -> Any:
    """Per block: the best Rice parameter, and what each encoding would cost.

    `ends[b]` is where block b's indices end. Returns the first block whose indices are not strictly
    increasing inside its box, or -1.
    """
    low_seen = np.zeros(256, np.int64)
    high_seen = np.zeros(256, np.int64)
    begin = 0
    for block in range(ends.size):
        end = ends[block]
        n = end - begin
        if n == 0 or np.int64(indices[end - 1]) >= elements[block]:
            return block
        spread = np.int64(indices[end - 1]) + 1 - n
        if spread < 0:
            return block
        # Best near log2(mean gap x ln 2); gaps that cluster want less.
        k0 = 0
        while k0 < MAX_RICE_PARAMETER - 1 and (n << (k0 + 1)) * 23 <= spread * 16:
            k0 += 1
        k0 = max(k0 - 2, 0)
        s0 = U(indices[begin]) >> U(k0)
        s1 = U(indices[begin]) >> U(k0 + 1)
        s2 = U(indices[begin]) >> U(k0 + 2)
        s3 = U(indices[begin]) >> U(k0 + 3)
        falling: Any = 0
        largest = np.int64(indices[begin])
        # Slices, not indices[i - 1]: a place that might wrap around keeps the loop scalar.
        before = indices[begin : end - 1]
        after = indices[begin + 1 : end]
        for i in range(after.size):
            g = np.int64(after[i]) - np.int64(before[i]) - 1
            falling |= g
            largest = max(largest, g)
            u = U(g)
            s0 += u >> U(k0)
            s1 += u >> U(k0 + 1)
            s2 += u >> U(k0 + 2)
            s3 += u >> U(k0 + 3)
        falling = falling < 0
        if falling:
            return block
        k = k0
        best = np.int64(s0) + n * (1 + k0)
        bits = np.int64(s1) + n * (2 + k0)
        if bits < best:
            k, best = k0 + 1, bits
        bits = np.int64(s2) + n * (3 + k0)
        if bits < best:
            k, best = k0 + 2, bits
        bits = np.int64(s3) + n * (4 + k0)
        if bits < best:
            k, best = k0 + 3, bits
        costs[block, COST_RICE_PARAMETER] = min(k, MAX_RICE_PARAMETER)
        costs[block, COST_RICE_BITS] = best
        lebs: Any = n
        if largest >= 1 << 7:
            lebs += count_gaps(indices, begin, end, 1 << 7)
        if largest >= 1 << 14:
            lebs += count_gaps(indices, begin, end, 1 << 14)
        if largest >= 1 << 21:
            lebs += count_gaps(indices, begin, end, 1 << 21)
        costs[block, COST_LEB_BYTES] = lebs
        wide: Any = 0
        if largest >= ESCAPE:
            wide += count_gaps(indices, begin, end, ESCAPE)
            wide += count_gaps(indices, begin, end, ESCAPE + (1 << 7))
            wide += count_gaps(indices, begin, end, ESCAPE + (1 << 14))
            wide += count_gaps(indices, begin, end, ESCAPE + (1 << 21))
        costs[block, COST_WIDE_BYTES] = wide
        planes: Any = 16 * n
        if n >= MIN_PLANE_CHANGES:
            stride = n // PLANE_SAMPLES + 1
            planes = sampled_planes(before, after, stride, low_seen, high_seen)
            if stride > 1 and planes < best:
                planes = sampled_planes(before, after, 1, low_seen, high_seen)
        costs[block, COST_PLANE_BITS] = planes + wide * 8
        begin = end
    return -1


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
            k = U(parameters[block])
            mask = (U(1) << k) - U(1)
            word: Any = U(0)
            filled: Any = U(0)
            for i in range(begin, end):
                gap: Any = U(np.int64(indices[i]) - previous - 1)
                previous = np.int64(indices[i])
                q: Any = gap >> k
                if q + k > U(55):
                    while q > U(48):
                        store_u64(rice, rice_at, word)
                        filled += U(48)
                        rice_at += np.int64(filled >> U(3))
                        word = U(0)
                        filled &= U(7)
                        q -= U(48)
                    # The bits already in the open byte were stored; keep them for the next store.
                    store_u64(rice, rice_at, word)
                    filled += q
                    rice_at += np.int64(filled >> U(3))
                    word = U(0) if filled >= U(8) else word
                    filled &= U(7)
                    q = U(0)
                word |= ((((gap & mask) << U(1)) | U(1)) << q) << filled
                store_u64(rice, rice_at, word)
                filled += q + U(1) + k
                rice_at += np.int64(filled >> U(3))
                word >>= filled & ~U(7)
                filled &= U(7)
            if filled:
                rice_at += 1
        elif encodings[block] == LEB128:
            for i in range(begin, end):
                leb_at = put_leb128(np.int64(indices[i]) - previous - 1, leb, leb_at)
                previous = np.int64(indices[i])
        elif encodings[block] == GAP16:
            for i in range(begin, end):
                gap = np.int64(indices[i]) - previous - 1
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
