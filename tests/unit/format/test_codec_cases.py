"""Faults met in the wild that the codec must not repeat: densities, empty and huge tensors."""

from __future__ import annotations

import numpy as np
import pytest

from deltastore.chain.apply import apply_blocks
from deltastore.chain.compose import compose
from deltastore.chain.diff import dense_block, diff_box, diff_run, diff_tensor, split_box
from deltastore.chain.diff_many import ShortRuns
from deltastore.errors import IntegrityError, InvalidInputError, Kind
from deltastore.format.block import Block, ValueKind
from deltastore.format.box import MAX_BOX_ELEMENTS, Box
from deltastore.format.disjoint import check_disjoint
from deltastore.format.dtypes import DType
from deltastore.format.fingerprint import ZERO
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.segment import (
    DecodeLimits,
    SegmentIdentity,
    decode_segment,
    encode_segment,
    estimated_bytes,
    segment_encodings,
)
from deltastore.testing.strategies import DENSITIES, change_bits, random_bits
from tests.unit.format.calls import counted

MOST_CALLS = 30
"""Of Python and of C, to write one small tensor, and to read it. There were 22 and 24."""


def one_tensor(dtype: DType, *shape: int) -> tuple[Layout, SegmentIdentity]:
    """A layout of one tensor, and the identity of its first delta."""
    layout = Layout.build([TensorEntry("t", dtype, shape)])
    return layout, SegmentIdentity(layout.digest, 0, 1)


def test_an_empty_version_is_a_valid_segment():
    """CASE R12: nothing changed makes no block, and a segment without blocks is legal."""
    layout, identity = one_tensor(DType.BF16, 100)
    bits = random_bits(100, np.dtype("<u2"), 0)
    assert list(diff_tensor(layout, 0, bits, bits.copy())) == []
    data = encode_segment(layout, identity, [])
    assert len(data) == 96
    decoded = decode_segment(layout, data, expect=identity)
    assert decoded.blocks == []
    assert apply_blocks(BitState(layout, [bits]), decoded.blocks) == ZERO
    assert segment_encodings(data) == frozenset()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]):
    """CASE N7: 0-d tensors change like others, empty ones never do."""
    layout, identity = one_tensor(DType.F32, *shape)
    count = layout.elements
    old, new = np.zeros(count, np.uint32), np.full(count, 0x80000000, np.uint32)
    blocks = list(diff_tensor(layout, 0, old, new))
    assert len(blocks) == count
    state = BitState(layout, [old])
    apply_blocks(state, decode_segment(layout, encode_segment(layout, identity, blocks)).blocks)
    np.testing.assert_array_equal(state.arrays[0], new)
    if shape == ():
        scalar = Box((), (), flat=False)
        block = diff_box(layout, 0, scalar, np.zeros((), np.uint32), np.ones((), np.uint32))
        assert block is not None
        (read,) = decode_segment(layout, encode_segment(layout, identity, [block])).blocks
        assert read.box == scalar


def test_composing_two_kinds_in_boxes_off_the_grid_keeps_boxes_apart():
    """Where one box gets changes of two kinds, no block reaches into its neighbour's box."""
    half = MAX_BOX_ELEMENTS // 2
    layout, _ = one_tensor(DType.BF16, 4 * half)

    def block(start: int, size: int, kind: ValueKind, places: list[int], value: int) -> Block:
        at, values = np.array(places, np.uint32), np.full(len(places), value, np.uint16)
        return Block(0, Box.run(start, size), kind, at, values, ZERO)

    low, high = (0, half), (half, 2 * half)
    first = [
        block(*low, ValueKind.STEPS, [5], 1),
        block(*high, ValueKind.STEPS, [1, half + 7], 2),
    ]
    second = [
        block(*low, ValueKind.STEPS, [6], 3),
        block(*high, ValueKind.BITS, [half + 9], 4),
    ]
    composed = compose(layout, first, second)
    check_disjoint(layout, [(one.tensor, one.box) for one in composed])
    written = {one.box.start[0] + int(i): int(v) for one in composed for i, v in _pairs(one)}
    assert written == {5: 1, 6: 3, half + 1: 2, 2 * half + 7: 2, 2 * half + 9: 4}


def _pairs(block: Block):
    assert block.indices is not None
    return zip(block.indices, block.values, strict=True)


def test_a_tensor_beyond_two_to_the_31():
    """CASE N1: changes at 2^31 - 1, 2^31 and the last of 2^31 + 8 elements arrive."""
    count = (1 << 31) + 8
    layout, identity = one_tensor(DType.U8, count)
    base, new = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
    places = [(1 << 31) - 1, 1 << 31, count - 1]
    new[places] = [1, 2, 255]
    blocks = []
    for start in ((1 << 31) - (1 << 22), 1 << 31):
        end = min(start + (1 << 22), count)
        block = diff_run(layout, 0, start, base[start:end], new[start:end])
        blocks += [block] if block else []
    data = encode_segment(layout, identity, blocks)
    state = BitState(layout, [base])
    apply_blocks(state, decode_segment(layout, data).blocks)
    assert base[places].tolist() == [1, 2, 255]
    assert int(np.count_nonzero(base[-(1 << 23) :])) == 3


@pytest.mark.slow
def test_a_whole_scan_beyond_two_to_the_31():
    """CASE N1: scanning all of 2^31 + 8 elements finds the three changes, by flat runs."""
    count = (1 << 31) + 8
    layout, _identity = one_tensor(DType.BF16, count)
    base, new = np.zeros(count, np.uint16), np.zeros(count, np.uint16)
    places = [(1 << 31) - 1, 1 << 31, count - 1]
    new[places] = 0x8000
    blocks = list(diff_tensor(layout, 0, base, new))
    found = [block.box.start[0] + int(block.indices[0]) for block in blocks if block.nnz == 1]
    found += [b.box.start[0] + int(i) for b in blocks if b.nnz > 1 for i in b.indices]
    assert sorted(found) == places


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.U8, DType.F32, DType.F64])
@pytest.mark.parametrize("style", ["one", "any", "clustered"])
def test_no_density_costs_more_than_the_raw_tensor(density: float, dtype: DType, style: str):
    """Whatever changes, a segment is at most 1 % above the raw tensor, headers apart."""
    layout, identity = one_tensor(dtype, 100_000)
    base = random_bits(100_000, dtype.bits_dtype, 5)
    new = base.copy()
    change_bits(new, density, style, 6)
    blocks = list(diff_tensor(layout, 0, base, new))
    data = encode_segment(layout, identity, blocks)
    assert len(data) <= 1.01 * base.nbytes + 256
    state = BitState(layout, [base.copy()])
    apply_blocks(state, decode_segment(layout, data).blocks)
    np.testing.assert_array_equal(state.arrays[0], new)
    assert len(data) <= 1.1 * sum(map(estimated_bytes, blocks)) + 256


def test_random_new_patterns_are_sent_dense():
    """Where all bits are new a block is dense, where all elements move by one it is not."""
    layout, _identity = one_tensor(DType.BF16, 50_000)
    base = random_bits(50_000, np.dtype("<u2"), 1)
    (fresh,) = diff_tensor(layout, 0, base, random_bits(50_000, np.dtype("<u2"), 2))
    assert fresh.kind is ValueKind.DENSE
    (moved,) = diff_tensor(layout, 0, base, base + np.uint16(1))
    assert moved.kind is ValueKind.STEPS


def _calls_of_a_version(tensors: int) -> tuple[int, int]:
    """Of writing and of reading a version that changes so many small tensors, all of each."""
    layout = Layout.build(TensorEntry(f"t{i}", DType.BF16, (64,)) for i in range(tensors))
    base = BitState.zeros(layout)
    new = BitState(layout, [bits + np.uint16(1) for bits in base.arrays])
    runs = ShortRuns(layout)
    blocks = []
    with counted() as writing:
        for tensor, bits in enumerate(base.arrays):
            blocks += runs.add(tensor, Box.run(0, 64), bits, new.arrays[tensor])
        blocks += runs.take()
        data = encode_segment(layout, SegmentIdentity(layout.digest, 0, 1), blocks)
    with counted() as reading:
        apply_blocks(base, decode_segment(layout, data).blocks)
    assert base.equals(new)
    return writing.count, reading.count


def test_a_small_tensor_more_is_few_calls():
    """CASE R28: what one of 20,000 tensors costs is calls, and they are counted, to write and to
    read; twice as many make twice as many (bench-codec and bench-pipeline have the seconds).
    """
    _calls_of_a_version(2)  # what is compiled or loaded once is no cost of a tensor
    few, more, most = (np.array(_calls_of_a_version(n)) for n in (500, 1000, 2000))
    assert ((most - more) / 1000 <= MOST_CALLS).all()
    assert (most - more <= 2.1 * (more - few)).all()


def test_sources_need_not_be_contiguous():
    """A transposed or strided source gives the block of its elements, in row-major order."""
    layout, _identity = one_tensor(DType.BF16, 40, 30)
    old = random_bits(1200, np.dtype("<u2"), 3).reshape(30, 40).T
    new = old.copy()
    new[::7, ::3] ^= 1
    whole = Box((0, 0), (40, 30), flat=False)
    block = diff_box(layout, 0, whole, old, new)
    assert block is not None
    np.testing.assert_array_equal(block.indices, np.flatnonzero(new.reshape(-1) != old.reshape(-1)))


def test_a_large_box_is_refused_with_the_way_out():
    """A box above 2^22 elements is refused; its pieces by split_box pass."""
    layout, _identity = one_tensor(DType.U8, 3, 1 << 21)
    box = Box((0, 0), (3, 1 << 21), flat=False)
    bits = np.zeros(box.shape, np.uint8)
    with pytest.raises(InvalidInputError) as caught:
        diff_box(layout, 0, box, bits, bits)
    assert caught.value.kind is Kind.LIMIT
    assert "split_box" in str(caught.value)
    assert [piece.shape for piece in split_box(box)] == [(2, 1 << 21), (1, 1 << 21)]


def block_at(start: int, size: int, *, tensor: int = 0, values: int = 1) -> Block:
    """A sparse block of one-steps at the front of a run."""
    indices = np.arange(values, dtype=np.uint32)
    ones = np.ones(values, np.uint16)
    return Block(tensor, Box.run(start, size), ValueKind.STEPS, indices, ones, ZERO)


@pytest.mark.parametrize(
    ("blocks", "kind"),
    [
        ([block_at(0, 101)], Kind.BOX),
        ([block_at(0, 10, tensor=1)], Kind.FIELD),
        ([block_at(0, 10), block_at(9, 10)], Kind.BOX),
        ([block_at(0, 10), block_at(0, 10)], Kind.BOX),
        ([block_at(0, 10, values=0)], Kind.FIELD),
        ([block_at(0, 3, values=4)], Kind.FIELD),
    ],
)
def test_a_writer_refuses_blocks_no_reader_would_take(blocks: list[Block], kind: Kind):
    """Boxes that leave the tensor or overlap, and empty blocks, never become bytes."""
    layout, identity = one_tensor(DType.BF16, 100)
    with pytest.raises(InvalidInputError) as caught:
        encode_segment(layout, identity, blocks)
    assert caught.value.kind is kind


def test_a_segment_of_another_layout_is_not_written():
    """The identity must name the layout the blocks are encoded for."""
    layout, _identity = one_tensor(DType.BF16, 100)
    with pytest.raises(IntegrityError):
        encode_segment(layout, SegmentIdentity("0" * 64, 0, 1), [])
    with pytest.raises(InvalidInputError):
        encode_segment(layout, SegmentIdentity(layout.digest, 1, 1), [])


def test_a_reader_with_less_memory_says_so():
    """A configured limit below the segment's content is a FormatError(limit)."""
    layout, identity = one_tensor(DType.BF16, 1000)
    bits = random_bits(1000, np.dtype("<u2"), 1)
    block = dense_block(layout, 0, Box.run(0, 1000), bits, bits)
    data = encode_segment(layout, identity, [block])
    with pytest.raises(Exception, match="at most 1999") as caught:
        decode_segment(layout, data, limits=DecodeLimits(max_decoded_bytes=1999))
    assert caught.value.kind is Kind.LIMIT
    decode_segment(layout, data, limits=DecodeLimits(max_decoded_bytes=2000))
