"""What is done for many blocks in one call is what is done for each by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.chain.apply import apply_blocks, block_change, new_bits, prepare_block
from deltastore.chain.apply_many import BATCH_VALUES, SHORT_BLOCK_VALUES, ShortBlocks
from deltastore.chain.diff import diff_run, diff_tensor
from deltastore.chain.diff_many import BATCH_ELEMENTS, SHORT_RUN_ELEMENTS, ShortRuns
from deltastore.chain.places import read_places, write_places
from deltastore.errors import IntegrityError, InvalidInputError
from deltastore.format.block import Block, ValueKind, total_change
from deltastore.format.box import Box
from deltastore.format.dtypes import DType
from deltastore.format.fingerprint import ZERO, Fingerprint
from deltastore.format.indices import PLANE_STREAMS_BYTES, IndexEncoding, plan_indices
from deltastore.format.kernels_base import frozen
from deltastore.format.kernels_cost import (
    COST_LEB_BYTES,
    COST_PLANE_BITS,
    COST_RICE_BITS,
    COST_RICE_PARAMETER,
    COST_WIDE_BYTES,
    choose_encodings,
    index_costs,
)
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.segment import (
    SegmentIdentity,
    encode_segment,
    estimated_bytes,
    estimated_sizes,
)
from deltastore.pipeline.differ import Differ
from deltastore.pipeline.host import HostSource

SIZES = (1, 3, 64, 200, 4096, SHORT_RUN_ELEMENTS, SHORT_RUN_ELEMENTS + 1)
DTYPES = (DType.BF16, DType.F32, DType.U8, DType.C64, DType.I64)


def _states(tensors: list[tuple[DType, int]], seed: int, share: float) -> tuple[BitState, BitState]:
    layout = Layout.build(TensorEntry(f"t{i}", d, (n,)) for i, (d, n) in enumerate(tensors))
    rng = np.random.default_rng(seed)
    base = BitState(
        layout,
        [
            rng.integers(0, 1 << 8, s.elements).astype(s.dtype.bits_dtype) << 1
            for s in layout.tensors
        ],
    )
    new = base.copy()
    for bits in new.arrays:
        moved = rng.random(bits.size) < share
        bits[moved] += rng.integers(1, 99, int(moved.sum())).astype(bits.dtype)
    return base, new


def _rows(blocks: list[Block]) -> list[tuple[object, ...]]:
    return [
        (
            b.tensor, b.box, b.kind, b.fingerprint_change, b.values.dtype, b.values.tobytes(),
            None if b.indices is None else b.indices.tobytes(),
        )
        for b in blocks
    ]  # fmt: skip


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SIZES)), max_size=40),
    st.integers(0, 99),
    st.sampled_from((0.0, 0.01, 0.3, 1.0)),
)
def test_small_tensors_compared_together_give_the_blocks_of_each(tensors, seed, share):
    """CASE R28: any mix of dtypes, sizes and densities; the order is that of the source."""
    base, new = _states(tensors, seed, share)
    one_by_one = [
        block
        for tensor in range(len(base.layout))
        for block in diff_tensor(base.layout, tensor, base.arrays[tensor], new.arrays[tensor])
    ]
    differ = Differ(base.layout, threads=1)
    together = list(differ.blocks(HostSource(new), base, ZERO))
    differ.close()
    assert _rows(together) == _rows(one_by_one)
    assert estimated_sizes(together) == [estimated_bytes(block) for block in together]
    assert total_change(together) == sum((b.fingerprint_change for b in together), ZERO)
    apply_blocks(base, together)
    assert base.equals(new)


def test_a_full_batch_is_compared_and_bits_are_read_when_they_are_offered():
    """A batch holds so much; what becomes of a source's memory after that no longer matters."""
    count = BATCH_ELEMENTS // SHORT_RUN_ELEMENTS
    base, new = _states([(DType.BF16, SHORT_RUN_ELEMENTS)] * (2 * count + 1), 5, 0.01)
    runs = ShortRuns(base.layout)
    found: list[list[Block]] = []
    live = np.empty(SHORT_RUN_ELEMENTS, np.uint16)
    for tensor, old in enumerate(base.arrays):
        live[:] = new.arrays[tensor]
        found.append(runs.add(tensor, Box.run(0, old.size), old, live))
    found.append(runs.take())
    assert [len(blocks) for blocks in found if blocks] == [count, count, 1]
    assert runs.take() == []
    assert total_change(b for blocks in found for b in blocks) == total_change(
        b
        for tensor, old in enumerate(base.arrays)
        for b in diff_tensor(base.layout, tensor, old, new.arrays[tensor])
    )


@pytest.mark.parametrize(
    ("box", "size", "dtype"),
    [
        (Box.run(60, 5), 5, np.uint16),
        (Box.run(-1, 5), 5, np.uint16),
        (Box.run(0, 5), 4, np.uint16),
        (Box.run(0, 5), 5, np.uint32),
        (Box.run(0, 5), 5, np.int16),
    ],
)
def test_a_run_that_does_not_fit_is_refused_as_by_itself(box, size, dtype):
    """Outside its tensor, of another length, of another type: the error of `diff_run`."""
    layout = Layout.build([TensorEntry("w", DType.BF16, (64,))])
    old, new = np.zeros(box.shape[0], np.uint16), np.ones(size, dtype)
    with pytest.raises(InvalidInputError) as alone:
        diff_run(layout, 0, box.start[0], old, new)
    with pytest.raises(InvalidInputError) as together:
        ShortRuns(layout).add(0, box, old, new)
    assert together.value.kind is alone.value.kind


@given(
    st.lists(
        st.lists(
            st.sampled_from((0, 1, 5, 127, 128, 900, 20_000, 70_000)), min_size=1, max_size=90
        ),
        min_size=1,
        max_size=12,
    )
)
def test_encodings_are_chosen_as_the_columns_say(blocks: list[list[int]]):
    """The kernel's choice is that of a plain comparison of what each encoding costs."""
    indices = np.concatenate([np.cumsum(np.array(gaps) + 1) - 1 for gaps in blocks])
    ends = np.cumsum([len(gaps) for gaps in blocks])
    elements = np.full(ends.size, 1 << 22)
    costs = np.zeros((ends.size, 5), np.int64)
    index_costs(frozen(indices.astype(np.uint32)), frozen(ends), frozen(elements), costs)
    rice = (costs[:, COST_RICE_BITS] + 7) // 8
    leb = costs[:, COST_LEB_BYTES]
    planes = (costs[:, COST_PLANE_BITS] + 7) // 8
    expected = np.where(leb < rice, IndexEncoding.LEB128, IndexEncoding.RICE)
    saved = np.maximum(np.minimum(rice, leb) - planes, 0)
    if saved.sum() > PLANE_STREAMS_BYTES:
        expected[saved > 0] = IndexEncoding.GAP16
    plan = plan_indices(indices.astype(np.uint32), ends, elements)
    assert plan.encodings.tolist() == expected.tolist()
    is_rice, is_gap = (expected == e for e in (IndexEncoding.RICE, IndexEncoding.GAP16))
    assert plan.parameters.tolist() == np.where(is_rice, costs[:, COST_RICE_PARAMETER], 0).tolist()
    assert plan.rice_bytes == rice[is_rice].sum()
    assert plan.leb_bytes == leb[expected == IndexEncoding.LEB128].sum()
    assert plan.plane_bytes == np.diff(ends, prepend=0)[is_gap].sum()
    assert plan.wide_bytes == costs[is_gap, COST_WIDE_BYTES].sum()


def test_planes_are_chosen_only_where_they_pay_over_all_blocks():
    """One byte below the price of two more streams nothing changes, one above it does."""
    costs = np.zeros((2, 5), np.int64)
    costs[:, COST_RICE_BITS] = 8 * 100
    costs[:, COST_LEB_BYTES] = 101
    ends = frozen(np.array([10, 20], np.int64))
    for saved, chosen in ((PLANE_STREAMS_BYTES // 2, 3), (PLANE_STREAMS_BYTES // 2 + 1, 2)):
        costs[:, COST_PLANE_BITS] = 8 * (100 - saved)
        encodings, parameters = np.zeros(2, np.int64), np.zeros(2, np.int64)
        choose_encodings(ends, frozen(costs), PLANE_STREAMS_BYTES, encodings, parameters)
        assert encodings.tolist() == [chosen, chosen]


def test_a_block_whose_change_is_not_what_it_declares_is_not_written():
    """Nothing of it, not even the first element; and what it would have done is told apart."""
    base, new = _states([(DType.BF16, 5000)], 3, 0.2)
    (block,) = diff_tensor(base.layout, 0, base.arrays[0], new.arrays[0])
    before = base.copy()
    for lane in range(2):
        change = block.fingerprint_change
        wrong = Fingerprint(change.low ^ (lane == 0), change.high ^ (lane == 1))
        damaged = Block(0, block.box, block.kind, block.indices, block.values, wrong)
        with pytest.raises(IntegrityError):
            apply_blocks(base, [damaged])
        assert base.equals(before)
    assert prepare_block(base.layout, block, base.arrays[0]).change == block.fingerprint_change
    assert apply_blocks(base, [block]) == block.fingerprint_change
    assert base.equals(new)


def _met(blocks: list[Block], state: BitState) -> list[tuple[Block, np.ndarray]]:
    """Each block with the bits at its places."""
    return [(b, prepare_block(state.layout, b, state.arrays[b.tensor]).old) for b in blocks]


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SIZES)), min_size=1, max_size=40),
    st.integers(0, 99),
    st.sampled_from((0.01, 0.3, 1.0)),
)
def test_short_blocks_proved_together_change_what_each_changes(tensors, seed, share):
    """CASE R28: steps, patterns and dense blocks of any mix of types, right ones and wrong ones."""
    base, new = _states(tensors, seed, share)
    differ = Differ(base.layout, threads=1)
    blocks = list(differ.blocks(HostSource(new), base, ZERO))
    differ.close()
    for i, block in enumerate(blocks):
        if i % 3 == 1 and block.kind is ValueKind.STEPS:
            after = prepare_block(base.layout, block, base.arrays[block.tensor]).new
            blocks[i] = Block(
                block.tensor, block.box, ValueKind.BITS, block.indices, after,
                block.fingerprint_change,
            )  # fmt: skip
    live = base.copy()
    for bits in live.arrays[::4]:
        bits += bits.dtype.type(1)
    expected = [
        (block, block_change(base.layout, block, old, new_bits(block, old)))
        for block, old in _met(blocks, live)
    ]
    short = ShortBlocks(base.layout)
    for block, old in _met(blocks, live):
        short.add(block, old)
    short.settle()
    assert short.total == sum((change for _block, change in expected), ZERO)
    wrong = {(b.tensor, b.box): c for b, c in expected if c != b.fingerprint_change}
    assert {(block.tensor, block.box): change for block, change in short.found} == wrong
    assert {tensor for tensor, _box in wrong} <= set(range(0, len(base.layout), 4))


def test_blocks_of_any_box_and_any_length_are_proved():
    """A box of two dimensions and a block too long to wait; a full batch waits no longer."""
    rows = Box((1, 2), (3, 4), flat=False)
    layout = Layout.build(
        [TensorEntry("m", DType.BF16, (8, 8)), TensorEntry("w", DType.BF16, (3 * BATCH_VALUES,))]
    )
    state = BitState.zeros(layout)
    places = np.arange(0, 12, 5, dtype=np.uint32)
    blocks = [Block(0, rows, ValueKind.STEPS, places, places.astype(np.uint16) + 1, ZERO)]
    sizes = [SHORT_BLOCK_VALUES + 1, *[SHORT_BLOCK_VALUES] * (BATCH_VALUES // SHORT_BLOCK_VALUES)]
    start = 0
    for size in sizes:
        values = np.ones(size, np.uint16)
        run = Box.run(start, size)
        blocks.append(Block(1, run, ValueKind.STEPS, np.arange(size, dtype="u4"), values, ZERO))
        start += size
    short = ShortBlocks(layout)
    for block, old in _met(blocks, state):
        short.add(block, old)
    assert len(short.found) == len(blocks)
    changes = [block_change(layout, b, old, new_bits(b, old)) for b, old in _met(blocks, state)]
    assert short.total == sum(changes, ZERO)


def test_old_bits_that_are_not_the_blocks_are_refused():
    """As many bits as values, of their width."""
    layout = Layout.build([TensorEntry("w", DType.BF16, (64,))])
    two = np.array([1, 2], np.uint32)
    block = Block(0, Box.run(0, 64), ValueKind.STEPS, two, np.ones(2, np.uint16), ZERO)
    for old in (np.zeros(1, np.uint16), np.zeros(2, np.uint8)):
        with pytest.raises(InvalidInputError):
            ShortBlocks(layout).add(block, old)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_places_in_a_run_are_read_and_written_and_no_others(dtype):
    """CASE R29: what numpy reads and writes; one place outside, and nothing is touched."""
    bits = np.arange(50).astype(dtype)
    box = Box.run(10, 20)
    at = np.array([0, 19, 7], np.uint32)
    assert read_places(bits, box, at).tolist() == [10, 29, 17]
    assert write_places(bits, box, at, np.array([1, 2, 3], dtype))
    assert bits[[10, 29, 17]].tolist() == [1, 2, 3]
    before, ones = bits.copy(), np.ones(2, dtype)
    for outside, index in (
        (box, 20), (Box.run(-1, 5), 0), (Box.run(45, 6), 0), (Box.run(0, -1), 0),
        (Box((0, 0), (2, 2), flat=False), 0),
    ):  # fmt: skip
        places = np.array([0, index], np.uint32)
        assert read_places(bits, outside, places) is None
        assert not write_places(bits, outside, places, ones)
    assert np.array_equal(bits, before)
    assert read_places(bits, box, at[:0]).size == 0


def test_a_segment_of_many_tensors_is_the_one_of_each():
    """CASE R28: 20,000 tensors end in the same bytes as blocks found tensor by tensor."""
    base, new = _states([(DType.BF16, 64)] * 20_000, 11, 0.02)
    identity = SegmentIdentity(base.layout.digest, 0, 1)
    one_by_one = [
        block
        for tensor in range(len(base.layout))
        for block in diff_tensor(base.layout, tensor, base.arrays[tensor], new.arrays[tensor])
    ]
    differ = Differ(base.layout, threads=1)
    batches = list(differ.batches(HostSource(new), base, ZERO))
    differ.close()
    together = [block for batch in batches for block in batch]
    assert len(batches) <= 20_000 * 64 // BATCH_ELEMENTS + 1
    assert all(block.kind is ValueKind.STEPS for block in together)
    assert encode_segment(base.layout, identity, together) == encode_segment(
        base.layout, identity, one_by_one
    )
