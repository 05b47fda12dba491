"""All ranks of an engine are at one version, after all votes that can be cast, or refuse."""

from __future__ import annotations

from typing import Any

import pytest

from deltastore.adapters.placed_target import PlacedTarget
from deltastore.chain.diff import diff_box
from deltastore.errors import ApplyError, IntegrityError, Kind
from deltastore.events import VersionActivated
from deltastore.format.block import Block
from deltastore.format.box import Box
from deltastore.format.dtypes import DType
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.pipeline.group import SoloGroup
from deltastore.pipeline.rank_applier import RankApplier, whole_fingerprint
from deltastore.pipeline.staged import StagedUpdate
from deltastore.testing.clock import FakeClock
from tests.unit.adapters.placed_kit import Engine, Plan, point, update_of
from tests.unit.pipeline.ranks_kit import (
    BASE,
    CLEAN,
    DOUBT,
    LAYOUT,
    NEW,
    SPLITS,
    STORAGES,
    THREE,
    UPDATE,
    after,
    assert_at,
    assert_doubted,
    flip_all,
    injected,
    kinds,
    update,
)


def test_all_ranks_change_together() -> None:
    """Fused, split, replicated, doubled, widened and lonely tensors are at the target, proved."""
    engine = Engine.start(THREE, BASE)
    assert engine.activate(UPDATE) == [point(1, NEW)] * 3
    assert_at(engine, NEW, 1)
    assert engine.run(lambda rank: engine.appliers[rank].check_whole()) == [None] * 3
    done = [event for event in engine.events if isinstance(event, VersionActivated)]
    assert sorted(event.actor for event in done) == ["rank0", "rank1", "rank2"]
    assert {event.nnz for event in done} == {UPDATE.nnz}


@pytest.mark.parametrize("tensor", range(5))
def test_weights_that_are_not_the_base_are_refused_by_name(tensor: int) -> None:
    """CASE R2: wrong bits under changes, in one place of any kind of tensor: nothing written."""
    engine = Engine.start(THREE, BASE)
    everywhere = (one for placements in engine.placements for one in placements)
    flip_all(next(one for one in everywhere if one.region.tensor == tensor))
    outcomes = engine.activate(UPDATE)
    assert kinds(outcomes) == CLEAN
    assert all(LAYOUT.tensors[tensor].name in str(one) for one in outcomes)
    assert all("nothing was written" in str(one) for one in outcomes)


def test_copies_that_differ_are_refused() -> None:
    """A replicated tensor that drifted on one rank only is found, although the others are right."""
    engine = Engine.start(THREE, BASE)
    flip_all(next(p for p in engine.placements[2] if p.region.tensor == 2))
    outcomes = engine.activate(UPDATE)
    assert kinds(outcomes) == CLEAN
    assert all("copies" in str(one) and "same" in str(one) for one in outcomes)


def test_composites_are_right_in_sum_over_the_ranks() -> None:
    """Blocks whose own changes are wrong but add up per tensor pass; one that is off does not."""
    engine = Engine.start(THREE, BASE)
    spec = LAYOUT.tensors[0]
    halves = [Box((0, 0), (6, 8), flat=False), Box((6, 0), (6, 8), flat=False)]
    new = BASE.copy()
    new.arrays[0][::5] += 3
    blocks = []
    for box in halves:
        places = box.offsets_of(None, spec.element_shape)
        block = diff_box(LAYOUT, 0, box, BASE.arrays[0][places], new.arrays[0][places])
        assert block is not None
        blocks.append(block)
    one, two = blocks
    shift = point(0, NEW).fingerprint
    moved = [
        Block(0, b.box, b.kind, b.indices, b.values, change)
        for b, change in (
            (one, one.fingerprint_change + shift),
            (two, two.fingerprint_change - shift),
        )
    ]
    assert engine.activate(update_of(BASE, new, moved)) == [point(1, new)] * 3
    assert_at(engine, new, 1)


def test_applying_again_is_harmless() -> None:
    """CASE R2: an update that is active already, or was prepared twice, changes nothing more."""
    engine = Engine.start(THREE, BASE)
    prepared = [applier.prepare(UPDATE) for applier in engine.appliers]
    again = [applier.prepare(UPDATE) for applier in engine.appliers]
    engine.run(lambda rank: engine.appliers[rank].activate(prepared[rank]))
    for one in (prepared, again):
        outcomes = engine.run(lambda rank, one=one: engine.appliers[rank].activate(one[rank]))  # type: ignore[misc]
        assert kinds(outcomes) == CLEAN
        assert_at(engine, NEW, 1)


def test_what_was_prepared_once_can_be_activated_again_from_its_base() -> None:
    """After a re-anchor to its base a prepared update is written whole once more; between the two
    it keeps no old bits."""
    engine = Engine.start(THREE, BASE)
    prepared = [applier.prepare(UPDATE) for applier in engine.appliers]

    def activate(rank: int) -> Any:
        return engine.appliers[rank].activate(prepared[rank])

    for _ in range(2):
        assert engine.run(activate) == [point(1, NEW)] * 3
        assert_at(engine, NEW, 1)
        assert not any(part.journal.kept for one in prepared for part in one.parts)
        engine.run(lambda rank: engine.appliers[rank].write_state(BASE, point(0, BASE)))


def test_a_poisoned_rank_poisons_the_others_and_a_whole_state_heals_all() -> None:
    """Who is in doubt says so at the next vote; after `write_state` all are at a proved version."""
    engine = Engine.start(THREE, BASE)
    engine.appliers[1]._voter.poison = "somebody pulled the plug"
    outcomes = engine.activate(UPDATE)
    assert kinds(outcomes) == DOUBT
    assert all("somebody pulled the plug" in str(one) for one in outcomes)
    assert_doubted(engine)
    assert engine.held().equals(BASE)
    healed = engine.run(lambda rank: engine.appliers[rank].write_state(NEW, point(1, NEW)))
    assert healed == [None] * 3
    assert_at(engine, NEW, 1)
    newest = after(NEW, 5)
    assert engine.activate(update(NEW, newest, 1, 2)) == [point(2, newest)] * 3
    assert_at(engine, newest, 2)


def test_a_state_of_another_layout_is_refused_and_changes_nothing() -> None:
    """CASE R22: one rank that was given another model's state stops all, unharmed."""
    engine = Engine.start(THREE, BASE)
    other = BitState.zeros(Layout.build([TensorEntry("x", DType.U8, (3,))]))
    given = [NEW, other, NEW]
    outcomes = engine.run(
        lambda rank: engine.appliers[rank].write_state(given[rank], point(1, NEW))
    )
    assert kinds(outcomes) == CLEAN
    assert_at(engine, BASE, 0)


def test_ranks_with_different_updates_write_nothing() -> None:
    """If one rank was told another version, the vote says so and all stay."""
    engine = Engine.start(THREE, BASE)
    other = after(BASE, 9)
    given = [UPDATE, update(BASE, other), UPDATE]

    def work(rank: int) -> Any:
        return engine.appliers[rank].activate(engine.appliers[rank].prepare(given[rank]))

    assert kinds(engine.run(work)) == CLEAN
    assert_at(engine, BASE, 0)


def test_ranks_out_of_step_are_poisoned() -> None:
    """Ranks that vote on different things cannot know what the others do."""
    engine = Engine.start(THREE, BASE)

    def work(rank: int) -> Any:
        applier = engine.appliers[rank]
        return applier.check_whole() if rank == 1 else applier.activate(applier.prepare(UPDATE))

    assert kinds(engine.run(work)) == DOUBT
    assert engine.held().equals(BASE)


def test_a_rank_that_cannot_prepare_declines_for_all() -> None:
    """A rank without the update votes too: the others stay, and say why."""
    engine = Engine.start(THREE, BASE)

    def work(rank: int) -> Any:
        applier = engine.appliers[rank]
        if rank == 2:
            applier.decline(IntegrityError("the spool file is torn", kind=Kind.DIGEST))
        return applier.activate(applier.prepare(UPDATE))

    outcomes = engine.run(work)
    assert kinds(outcomes) == CLEAN
    assert all("the spool file is torn" in str(one) for one in outcomes)
    assert all("torn" in applier.trouble for applier in engine.appliers)
    assert_at(engine, BASE, 0)


def test_an_update_that_does_not_add_up_is_not_prepared() -> None:
    """Blocks that lead somewhere else than their target are refused before anybody stops."""
    engine = Engine.start(Plan(1, SPLITS, STORAGES), BASE)
    bad = StagedUpdate(point(0, BASE), point(1, NEW), UPDATE.blocks[:-1], 0)
    with pytest.raises(ApplyError) as caught:
        engine.appliers[0].prepare(bad)
    assert caught.value.kind is Kind.ROLLED_BACK


def test_a_full_version_is_written_whole() -> None:
    """A staged state goes through the same votes, and a failure in it poisons."""
    engine = Engine.start(THREE, BASE)
    full = StagedUpdate(point(0, BASE), point(1, NEW), [], 0, 1, NEW)
    assert engine.activate(full) == [point(1, NEW)] * 3
    assert_at(engine, NEW, 1)
    engine = Engine.start(THREE, BASE)
    injected(engine, 1, "write_state", 1, OSError("half"))
    assert kinds(engine.activate(full)) == DOUBT
    assert_doubted(engine)


def test_a_whole_check_is_due_every_so_often_and_poisons() -> None:
    """A weight that no update touches and something else wrote is found by the check, by all."""
    engine = Engine.start(THREE, BASE, full_check_every_versions=2)
    states = [BASE]
    for version in range(2):
        new = states[-1].copy()
        new.arrays[0][version::11] += 1
        states.append(new)
    engine.activate(update(states[0], states[1], 0, 1))
    flip_all(next(p for p in engine.placements[0] if p.region.tensor == 1))
    outcomes = engine.activate(update(states[1], states[2], 1, 2))
    assert all(isinstance(one, IntegrityError) for one in outcomes)
    assert kinds(outcomes) == {Kind.FINGERPRINT}
    assert all(applier.poisoned for applier in engine.appliers)


def test_tensors_that_nobody_holds_move_as_declared() -> None:
    """A tensor that every rank says is unused is counted as declared, check after check."""
    plan = Plan(2, ("one", "whole", "whole", "whole", "rows"), ("plain",) * 5)
    reads: list[int] = []

    class Without(PlacedTarget):
        """A target that has thrown one tensor away."""

        def __init__(self, layout: Any, placements: Any, **options: Any) -> None:
            kept = [one for one in placements if one.region.tensor != 0]
            options["unused"] = [*options["unused"], 0]
            read = options["unused_fingerprint"]

            def noted(tensor: int) -> Any:
                reads.append(tensor)
                return read(tensor)

            options["unused_fingerprint"] = noted
            super().__init__(layout, kept, **options)

    engine = Engine.start(plan, BASE, make=Without)
    assert engine.activate(UPDATE) == [point(1, NEW)] * 2
    assert engine.run(lambda rank: engine.appliers[rank].check_whole()) == [None] * 2
    assert reads == [0, 0], "read once on each rank, when the engine started"
    engine.run(lambda rank: engine.appliers[rank].write_state(BASE, point(0, BASE)))
    assert engine.run(lambda rank: engine.appliers[rank].check_whole()) == [None] * 2


def test_a_tensor_that_nobody_knows_is_an_error() -> None:
    """Without a checkpoint to read it from, a tensor that no rank holds has no fingerprint."""
    layout = Layout.build([TensorEntry("mtp", DType.BF16, (4,))])
    target = PlacedTarget(layout, [], unused=[0])
    with pytest.raises(ValueError, match="mtp"):
        whole_fingerprint(target, SoloGroup())


def test_one_rank_needs_no_group() -> None:
    """A solo engine takes the same way."""
    plan = Plan(1, SPLITS, STORAGES)
    engine = Engine.start(plan, BASE)
    solo = RankApplier(
        engine.targets[0], point(0, BASE), SoloGroup(), name="solo", clock=FakeClock()
    )
    assert solo.activate(solo.prepare(UPDATE)) == point(1, NEW)
    solo.check_whole()
    assert engine.held().equals(NEW)
