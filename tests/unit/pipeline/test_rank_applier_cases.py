"""Single cases that once went wrong elsewhere, on an engine of several ranks."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from deltastore.adapters.placed_target import PlacedTarget
from deltastore.adapters.placements import Placement, Region
from deltastore.chain.diff import diff_tensor
from deltastore.errors import ApplyError, Kind
from deltastore.format.dtypes import DType
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.pipeline.group import SoloGroup
from deltastore.pipeline.rank_applier import RankApplier
from deltastore.testing.clock import FakeClock
from tests.unit.adapters.placed_kit import Engine, Plan, point, update_of


def _blocks(base: BitState, new: BitState) -> Any:
    return [
        block
        for tensor, (old, bits) in enumerate(zip(base.arrays, new.arrays, strict=True))
        for block in diff_tensor(base.layout, tensor, old, bits)
    ]


@pytest.mark.parametrize("storage", ["plain", "transposed", "twice", "widened"])
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
def test_every_pattern_becomes_every_kind_of_pattern(dtype: DType, storage: str) -> None:
    """CASE R4, R5: over three ranks all 65,536 patterns take a step, flip their sign (0 and -0
    too), become an infinity and become NaNs of every code, and arrive bit for bit."""
    layout = Layout.build(
        [TensorEntry("rows", dtype, (256, 256)), TensorEntry("columns", dtype, (256, 256))]
    )
    every = np.arange(1 << 16).astype(np.uint16)
    infinity = np.uint16(0x7F80 if dtype is DType.BF16 else 0x7C00)
    states = [
        BitState(layout, [bits.copy(), bits[::-1].copy()])
        for bits in (
            every,
            every + np.uint16(1),
            (every + np.uint16(1)) ^ np.uint16(0x8000),
            np.full(1 << 16, infinity),
            infinity | every,
        )
    ]
    engine = Engine.start(Plan(3, ("rows", "columns"), (storage, storage)), states[0])
    for version, (base, new) in enumerate(pairwise(states)):
        update = update_of(base, new, _blocks(base, new), version, version + 1)
        assert engine.activate(update) == [point(version + 1, new)] * 3
        assert engine.held().equals(new)
    assert engine.run(lambda rank: engine.appliers[rank].check_whole()) == [None] * 3


def test_changes_that_meet_nothing_of_a_held_tensor_are_refused() -> None:
    """CASE R9: if half of a tensor were placed nowhere, a change in that half is an error that
    names the tensor, not a success without a write."""
    layout = Layout.build([TensorEntry("half", DType.BF16, (20,))])
    base = BitState.zeros(layout)
    new = base.copy()
    new.arrays[0][15] = 1
    live = torch.zeros(10, dtype=torch.bfloat16)
    target = PlacedTarget(layout, [Placement(Region(0, 0, (10,), (1,)), live, "w", "m")])
    applier = RankApplier(target, point(0, base), SoloGroup(), name="r", clock=FakeClock())
    with pytest.raises(ApplyError, match="half") as caught:
        applier.activate(applier.prepare(update_of(base, new, _blocks(base, new))))
    assert caught.value.kind is Kind.ROLLED_BACK


def test_two_hundred_updates_leave_memory_as_it_was() -> None:
    """CASE R17: what one update needed is given back: after 100 and after 200 it is the same."""
    layout = Layout.build(
        [TensorEntry("w", DType.BF16, (64, 64)), TensorEntry("b", DType.F32, (9,))]
    )
    state = BitState.zeros(layout)
    engine = Engine.start(Plan(1, ("whole", "whole"), ("transposed", "plain")), state)
    engine.events.clear()
    applier = engine.appliers[0]
    sizes = []
    tracemalloc.start()
    for version in range(200):
        new = state.copy()
        new.arrays[0][version % 7 :: 7] += 1
        new.arrays[1][:] = version
        blocks = _blocks(state, new)
        applier.activate(applier.prepare(update_of(state, new, blocks, version, version + 1)))
        state = new
        engine.events.clear()
        if version in {99, 199}:
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert applier.active.version == 200
    assert sizes[1] - sizes[0] < 16 << 10
