"""A writer that guesses wrong sends half again as much: what each index encoding costs, counted.

Everything is done in integers, so that the choice is the same on every machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deltastore.format.kernels_base import Array, kernel
from deltastore.format.kernels_index import ESCAPE, GAP16, LEB128, MAX_RICE_PARAMETER, RICE

U = np.uint64

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
def choose_encodings(
    ends: Array, costs: Array, least_saved: Any, encodings: Array, parameters: Array
) -> Any:
    """Each block's smallest encoding: bytes of (Rice codes, LEB128, one plane, wide gaps) in all.

    Planes are taken only where they save more than `least_saved` bytes over all blocks.
    """
    saved = np.int64(0)
    for block in range(ends.size):
        rice_bytes = (costs[block, COST_RICE_BITS] + 7) // 8
        plane_bytes = (costs[block, COST_PLANE_BITS] + 7) // 8
        other = min(rice_bytes, costs[block, COST_LEB_BYTES])
        saved += max(other - plane_bytes, 0)
    planes_pay = saved > least_saved
    rice = np.int64(0)
    leb = np.int64(0)
    plane = np.int64(0)
    wide = np.int64(0)
    begin = np.int64(0)
    for block in range(ends.size):
        rice_bytes = (costs[block, COST_RICE_BITS] + 7) // 8
        plane_bytes = (costs[block, COST_PLANE_BITS] + 7) // 8
        leb_bytes = costs[block, COST_LEB_BYTES]
        parameters[block] = 0
        if planes_pay and plane_bytes < min(rice_bytes, leb_bytes):
            encodings[block] = GAP16
            plane += ends[block] - begin
            wide += costs[block, COST_WIDE_BYTES]
        elif leb_bytes < rice_bytes:
            encodings[block] = LEB128
            leb += leb_bytes
        else:
            encodings[block] = RICE
            parameters[block] = costs[block, COST_RICE_PARAMETER]
            rice += rice_bytes
        begin = ends[block]
    return rice, leb, plane, wide
