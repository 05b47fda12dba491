"""The first delta of a fresh machine must not wait for a compiler: warm up at install.

The kernels live in `kernels_*.py`; each is compiled at its first use and cached on disk beside its
source (or in numba's cache folder where that cannot be written).
"""

from __future__ import annotations

import numpy as np

from deltastore.format.block import Block, ValueKind
from deltastore.format.box import Box
from deltastore.format.dtypes import DType
from deltastore.format.fingerprint import ZERO
from deltastore.format.kernels_apply import (
    change_proved,
    change_runs,
    gather,
    gather_change,
    gather_within,
    locate,
    scatter,
    scatter_within,
)
from deltastore.format.kernels_base import Array, frozen
from deltastore.format.kernels_cost import plane_cost
from deltastore.format.kernels_diff import scan_changes, scan_runs
from deltastore.format.kernels_fingerprint import mix_change, mix_places, mix_run
from deltastore.format.kernels_merge import is_increasing, merge_changes
from deltastore.format.kernels_placed import (
    add_steps,
    change_at,
    locate_count,
    locate_fill,
    mix_at,
    put_back,
    swap,
    take_steps,
    walk,
)
from deltastore.format.kernels_values import estimated_bits_of_each, estimated_step_bits
from deltastore.format.layout import Layout, TensorEntry
from deltastore.format.segment import SegmentIdentity, decode_segment, encode_segment

_WARM_DTYPES = (DType.BF16, DType.U8, DType.F32, DType.F64)
_ELEMENTS = 256


def warm_up() -> None:
    """Compile every kernel for every element width: half a minute; a second from the cache."""
    entries = [TensorEntry(d.value, d, (_ELEMENTS // 2, 2)) for d in _WARM_DTYPES]
    layout = Layout.build(entries)
    blocks: list[Block] = []
    at = np.arange(0, 200, 20, dtype=np.uint32)
    for tensor, spec in enumerate(layout.tensors):
        old = np.zeros(_ELEMENTS, spec.dtype.bits_dtype)
        new = old.copy()
        new[at] = np.arange(1, at.size + 1)
        _warm_width(old, new)
        half = Box((0, 0), (_ELEMENTS // 4, 2), flat=False)
        rest = Box((_ELEMENTS // 4, 0), (_ELEMENTS // 4, 2), flat=False)
        blocks.append(Block(tensor, half, ValueKind.STEPS, at[:5], new[at[:5]], ZERO))
        blocks.append(Block(tensor, rest, ValueKind.DENSE, None, new[: rest.elements], ZERO))
    identity = SegmentIdentity(layout.digest, 0, 1)
    decode_segment(layout, encode_segment(layout, identity, blocks))


def _warm_width(old: Array, new: Array) -> None:
    indices = np.empty(_ELEMENTS, np.uint32)
    steps = np.empty(_ELEMENTS, old.dtype)
    scan_changes(frozen(old), frozen(new), 0, 0, indices, steps, 0)
    wide = np.arange(4, dtype=np.int64)
    whole = frozen(np.array([_ELEMENTS - 1], np.int64))
    counts, changes = np.empty(1, np.int64), np.empty((1, 2), np.uint64)
    runs = frozen(old[:-1]), frozen(new[:-1])
    scan_runs(*runs, whole, whole, indices, steps, counts, changes)
    some = wide.astype(np.uint32)
    row = frozen(np.array([2, 2], np.int64))
    locate(frozen(some), frozen(wide[:2]), row, row, np.empty(4, np.int64))
    mix_run(frozen(old), 0)
    estimated_step_bits(frozen(new))
    estimated_bits_of_each(frozen(new[:-1]), whole, counts)
    plane_cost(frozen(np.ones(256, np.int64)), 256, 256)
    mix_places(frozen(wide), frozen(old[:4]))
    mix_change(frozen(wide), 0, frozen(old[:4]), frozen(new[:4]), 4)
    kinds = np.zeros(4, np.uint8)
    values = old[:4].copy()
    for offsets in (frozen(some), frozen(wide)):
        gather(old, offsets, 0, values)
        scatter(old, offsets, 0, frozen(values))
        gather_within(old, offsets, 0, 4, values)
        scatter_within(old, offsets, 0, 4, frozen(values))
        gather_change(old, offsets, 0, 0, frozen(values), False, values.copy(), values.copy())
        change_proved(old, offsets, 0, 0, frozen(values), False, np.uint64(0), np.uint64(0))
        _warm_placed(old, offsets, frozen(values))
    read = frozen(values)
    change_runs(frozen(some), read, read, frozen(wide[-1:]), whole, frozen(kinds[:1]), changes)
    sides = [frozen(column) for column in (wide, values, kinds)]
    merge_changes(*sides, *sides, np.empty(8, np.int64), np.empty(8, old.dtype), np.empty(8, "u1"))
    is_increasing(frozen(wide))


def _warm_placed(weights: Array, offsets: Array, values: Array) -> None:
    """Offsets as uint32 and as int64; a region of one element in a row of four."""
    journal = np.zeros(1, np.int64)
    change_at(weights, offsets, 0, offsets, 0, values, False)
    mix_at(weights, offsets, 0, offsets, 0)
    add_steps(weights, offsets, 0, values, journal)
    take_steps(weights, offsets, 0, values, journal)
    swap(weights, offsets, 0, values, values.copy(), journal)
    put_back(weights, offsets, 0, values, journal)
    row = frozen(np.array([4], np.int64))
    one = frozen(np.array([1], np.int64))
    places, elements = np.empty(4, offsets.dtype), np.empty(4, offsets.dtype)
    walk(0, 0, row, one, one, places, elements)
    indices = frozen(np.arange(4, dtype=np.uint32))
    where = (frozen(np.array([0], np.int64)), row, row, 0, row, one, one)
    locate_count(indices, *where)
    locate_fill(indices, *where, values, places, elements, values.copy())
