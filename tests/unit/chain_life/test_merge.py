"""Merging flows: its memory is that of a few segments, whatever the model and the chain."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from deltastore.chain.diff import diff_tensor
from deltastore.errors import FormatError, IntegrityError, Kind
from deltastore.format.dtypes import DType
from deltastore.format.layout import Layout, TensorEntry
from deltastore.format.outline import FIRST_READ_BYTES, read_outline
from deltastore.format.segment import DecodeLimits, SegmentIdentity, decode_segment, encode_segment
from deltastore.maintenance.merge import merged_blocks
from deltastore.repository.way import find_way, survey
from deltastore.storage.store import PutMode
from deltastore.testing.faults import CountingStore, Op
from tests.unit.chain_life.kit import Chain

ELEMENTS = 1 << 15
INPUTS = 4


def wide_chain(folder, tensors):
    """Deltas that change a third of every tensor, one segment per tensor."""
    entries = tuple(TensorEntry(f"t{i:03}", DType.BF16, (ELEMENTS,)) for i in range(tensors))
    chain = Chain(folder, entries=entries)
    for _ in range(INPUTS):
        before = chain.state.copy()
        segments = []
        for tensor, bits in enumerate(chain.state.arrays):
            places = chain.rng.random(bits.size) < 0.33
            bits[places] += 1
            segments.append(list(diff_tensor(chain.layout, tensor, before.arrays[tensor], bits)))
        chain.commit(segments)
    return chain


def peak_bytes(chain):
    """Most memory that a merge of the whole chain held, its result thrown away."""
    found = survey(chain.run, INPUTS, lowest=0)
    way = found.choose(chain.run, base=0, version=INPUTS, starts=False)
    gc.collect()
    tracemalloc.start()
    try:
        blocks = sum(len(cell) for cell in merged_blocks(chain.run, way.steps, streams=1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert blocks == len(chain.layout)
    return peak


def test_memory_does_not_grow_with_the_model(tmp_path):
    """LAW 6: a model of eight times the size is merged in the same memory."""
    small = peak_bytes(wide_chain(tmp_path / "small", 4))
    large = peak_bytes(wide_chain(tmp_path / "large", 32))
    assert large < 1.3 * small
    # Encoded: streams + 1 segments. Decoded: one per input, 6 bytes per change; composing holds
    # places, values and kinds of both sides and of the result (11 bytes each) beside them.
    change_bytes = ELEMENTS
    decoded = INPUTS * 6 * change_bytes
    assert large < 3 * (decoded + 4 * 11 * change_bytes)


def test_segments_in_any_order_are_read_once(tmp_path):
    """Ranks that each sent segments of their own, in no order, are merged with one read of each."""
    chain = Chain(tmp_path, parts=4)
    chain.extend(4)
    store = CountingStore(chain.store)
    run = chain.open(store)
    way = find_way(chain.run, 4, held=chain.held(0).point)
    before = store.traffic.requests.get(Op.GET, 0)
    list(merged_blocks(run, way.steps, streams=2))
    segments = [ref for step in way.steps for ref in step.target.core.segments]
    filled = [ref for ref in segments if ref.nnz]  # one without a block is not read again
    assert store.traffic.requests[Op.GET] - before == len(segments) + len(filled)


def test_segment_that_changes_between_the_reads_is_refused(chain):
    """Bytes other than the manifest's are never merged, whatever the outline said."""
    chain.extend(3)
    way = find_way(chain.run, 3, held=chain.held(0).point)
    (key,) = chain.list_keys("/deltas/0000000002/")
    body = bytearray(chain.store.get(key))
    body[-1] ^= 1
    chain.store.put(key, bytes(body), mode=PutMode.OVERWRITE)
    with pytest.raises(IntegrityError) as err:
        list(merged_blocks(chain.run, way.steps, streams=2))
    assert err.value.kind is Kind.DIGEST


def test_whole_state_is_no_part_of_a_composite(chain):
    """A step without a base is refused by name."""
    with pytest.raises(IntegrityError) as err:
        list(merged_blocks(chain.run, find_way(chain.run, 0).steps, streams=2))
    assert err.value.kind is Kind.BROKEN_CHAIN


def many_blocks(count):
    """A layout and a segment of that many blocks of a tensor each."""
    entries = [TensorEntry(f"t{i}", DType.BF16, (64,)) for i in range(count)]
    layout = Layout.build(entries)
    zeros, ones = np.zeros(64, np.uint16), np.arange(64, dtype=np.uint16) % 2
    blocks = [b for i in range(count) for b in diff_tensor(layout, i, zeros, ones.copy())]
    return layout, encode_segment(layout, SegmentIdentity(layout.digest, 0, 1), blocks)


@pytest.mark.parametrize("count", [0, 1, 20_000])
def test_outline_is_the_segment_without_its_streams(count):
    """The outline names the same tensors and boxes as the decoded segment, read by range."""
    layout, body = many_blocks(count)
    reads = []

    def read(begin, end):
        reads.append((begin, end))
        return body[begin:end]

    outline = read_outline(layout, read, len(body))
    blocks = decode_segment(layout, body).blocks
    assert outline.tensors == [b.tensor for b in blocks]
    assert outline.boxes == [b.box for b in blocks]
    assert reads[0] == (0, min(FIRST_READ_BYTES, len(body)))
    assert len(reads) <= 2


@pytest.mark.parametrize("damage", ["empty", "magic", "cut", "count", "limit"])
def test_damaged_outline_is_a_format_error(damage):
    """An outline of garbage, or beyond its limits, is refused before anything is allocated."""
    layout, body = many_blocks(30)
    changed = bytearray(body)
    limits = DecodeLimits()
    size = len(body)
    if damage == "empty":
        changed, size = bytearray(), 0
    elif damage == "magic":
        changed[0] ^= 1
    elif damage == "cut":
        size = 100
    elif damage == "count":
        changed[64:68] = b"\xff\xff\xff\xff"
    else:
        limits = DecodeLimits(max_table_bytes=10)
    with pytest.raises(FormatError):
        read_outline(layout, lambda b, e: bytes(changed[b:e]), size, limits=limits)
