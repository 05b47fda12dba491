"""What is done for many blocks in one call is what is done for each by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.chain.apply import apply_blocks, prepare_block
from deltastore.chain.diff import diff_run, diff_tensor
from deltastore.chain.diff_many import BATCH_ELEMENTS, SHORT_RUN_ELEMENTS, ShortRuns
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
