"""All ranks of an engine are at one version after anything that can happen, or refuse to serve."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deltastore.adapters.placed_target import PlacedTarget
from deltastore.chain.diff import diff_box, diff_tensor
from deltastore.errors import ApplyError, IntegrityError, Kind
from deltastore.events import ActivationFailed, VersionActivated
from deltastore.format.block import Block, ValueKind
from deltastore.format.box import Box
from deltastore.format.dtypes import DType
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.pipeline.group import SoloGroup
from deltastore.pipeline.rank_applier import RankApplier, whole_fingerprint
from deltastore.pipeline.staged import StagedUpdate
from deltastore.testing.clock import FakeClock
from tests.unit.adapters.placed_kit import Engine, Plan, point, update_of

ENTRIES = (
    TensorEntry("rows", DType.BF16, (12, 8)),
    TensorEntry("columns", DType.BF16, (6, 12)),
    TensorEntry("same", DType.F32, (10,)),
    TensorEntry("router", DType.BF16, (9,)),
    TensorEntry("apart", DType.BF16, (20,)),
)
LAYOUT = Layout.build(ENTRIES)
SPLITS = ("rows", "columns", "whole", "whole", "one")
STORAGES = ("plain", "transposed", "twice", "widened", "plain")
THREE = Plan(3, SPLITS, STORAGES)
CLEAN = {Kind.ROLLED_BACK}
DOUBT = {Kind.POISONED}


def random_state(seed: int = 0) -> BitState:
    """Any patterns, NaNs among them."""
    rng = np.random.default_rng(seed)
    return BitState(
        LAYOUT,
        [
            np.frombuffer(rng.bytes(spec.size_bytes), spec.dtype.bits_dtype).copy()
            for spec in LAYOUT.tensors
        ],
    )


def after(base: BitState, seed: int = 1) -> BitState:
    """Some elements of every tensor a step further; `apart` wholly new."""
    rng = np.random.default_rng(seed)
    new = base.copy()
    for bits in new.arrays:
        bits[rng.permutation(bits.size)[: bits.size // 3]] += 1
    new.arrays[-1][:] = rng.integers(0, 1 << 16, new.arrays[-1].size)
    return new


def update(base: BitState, new: BitState, first: int = 0, last: int = 1) -> StagedUpdate:
    """Steps; of `same` absolute patterns, of `apart` all of them."""
    blocks: list[Block] = []
    for tensor, (old, bits) in enumerate(zip(base.arrays, new.arrays, strict=True)):
        for block in diff_tensor(LAYOUT, tensor, old, bits):
            if LAYOUT.tensors[tensor].name == "same" and block.indices is not None:
                values = bits[block.indices]
                change = block.fingerprint_change
                block = Block(tensor, block.box, ValueKind.BITS, block.indices, values, change)
            blocks.append(block)
    return update_of(base, new, blocks, first, last)


BASE = random_state()
NEW = after(BASE)
UPDATE = update(BASE, NEW)


def kinds(outcomes: list[Any]) -> set[Any]:
    """The kinds of the errors; of what is none, itself."""
    return {getattr(one, "kind", one) for one in outcomes}


def injected(engine: Engine, rank: int, name: str, at: int, err: BaseException) -> list[int]:
    """Have a method of a rank's target raise at its `at`-th call; after the work if `at` < 0."""
    target = engine.targets[rank]
    original = getattr(target, name)
    calls = [0]

    def failing(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise err
        found = original(*args, **options)
        if calls[0] == -at:
            raise err
        return found

    setattr(target, name, failing)
    return calls


def parts_of(engine: Engine, rank: int) -> int:
    """How many parts the update has on a rank."""
    return len(engine.appliers[rank].prepare(UPDATE).parts)


def assert_at(engine: Engine, state: BitState, version: int) -> None:
    """Every rank says that version, holds that state, and is sound."""
    assert engine.held().equals(state)
    assert [applier.active for applier in engine.appliers] == [point(version, state)] * len(
        engine.appliers
    )
    assert not any(applier.poisoned for applier in engine.appliers)


def assert_doubted(engine: Engine) -> None:
    """Every rank is poisoned, still says the old version, and refuses what comes next."""
    assert all(applier.poisoned for applier in engine.appliers)
    assert all(applier.active == point(0, BASE) for applier in engine.appliers)
    assert kinds(engine.activate(UPDATE)) == DOUBT


def test_all_ranks_change_together() -> None:
    """Fused, split, replicated, doubled, widened and lonely tensors are at the target, proved."""
    engine = Engine.start(THREE, BASE)
    assert engine.activate(UPDATE) == [point(1, NEW)] * 3
    assert_at(engine, NEW, 1)
    assert engine.run(lambda rank: engine.appliers[rank].check_whole()) == [None] * 3
    done = [event for event in engine.events if isinstance(event, VersionActivated)]
    assert sorted(event.actor for event in done) == ["rank0", "rank1", "rank2"]
    assert {event.nnz for event in done} == {UPDATE.nnz}


@pytest.mark.parametrize("after_work", [False, True])
@pytest.mark.parametrize("rank", range(3))
def test_a_write_that_fails_at_any_part_is_undone_everywhere(rank: int, after_work: bool) -> None:
    """CASE R2, R20: raising at tensor k, for every k, on any rank: all are at the base, bit for
    bit, and name no other version; then the same update is activated."""
    engine = Engine.start(THREE, BASE)
    count = parts_of(engine, rank)
    assert count >= 4
    for k in range(1, count + 1):
        injected(engine, rank, "write", -k if after_work else k, OSError(f"part {k}"))
        outcomes = engine.activate(UPDATE)
        del engine.targets[rank].write
        assert kinds(outcomes) == CLEAN
        assert all(f"part {k}" in str(one) for one in outcomes)
        assert_at(engine, BASE, 0)
    failed = [event for event in engine.events if isinstance(event, ActivationFailed)]
    assert len(failed) == 3 * count
    assert engine.activate(UPDATE) == [point(1, NEW)] * 3
    assert_at(engine, NEW, 1)


def test_the_version_marker_moves_last() -> None:
    """CASE R2: while anything is being written, every rank says the old version."""
    engine = Engine.start(THREE, BASE)
    seen: list[int] = []
    for rank, target in enumerate(engine.targets):
        original = target.write

        def noting(part: Any, *, keep: bool, original: Any = original, rank: int = rank) -> None:
            original(part, keep=keep)
            seen.append(engine.appliers[rank].active.version)

        target.write = noting  # type: ignore[method-assign]
    engine.activate(UPDATE)
    assert set(seen) == {0}
    assert_at(engine, NEW, 1)


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_that_throws_in_the_first_pass_still_votes(rank: int) -> None:
    """Nobody writes, nobody waits for it, and everybody says what it said."""
    engine = Engine.start(THREE, BASE)
    injected(engine, rank, "tally", 1, MemoryError("no room"))
    calls = [injected(engine, one, "write", 0, OSError()) for one in range(3)]
    outcomes = engine.activate(UPDATE)
    assert kinds(outcomes) == CLEAN
    assert all(f"rank {rank}: MemoryError: no room" in str(one) for one in outcomes)
    assert [one[0] for one in calls] == [0, 0, 0]
    assert_at(engine, BASE, 0)


def test_ctrl_c_in_the_first_pass_is_raised_after_the_vote() -> None:
    """A rank that is interrupted lets the others know, and is interrupted."""
    engine = Engine.start(THREE, BASE)
    injected(engine, 1, "tally", 1, KeyboardInterrupt())
    first, second, third = engine.activate(UPDATE)
    assert isinstance(second, KeyboardInterrupt)
    assert kinds([first, third]) == CLEAN
    assert_at(engine, BASE, 0)


def test_ctrl_c_in_the_second_pass_is_raised_after_the_undo() -> None:
    """A rank that is interrupted while it writes undoes that, as all do, and is interrupted."""
    engine = Engine.start(THREE, BASE)
    injected(engine, 1, "write", -2, KeyboardInterrupt())
    first, second, third = engine.activate(UPDATE)
    assert isinstance(second, KeyboardInterrupt)
    assert kinds([first, third]) == CLEAN
    assert_at(engine, BASE, 0)


@pytest.mark.parametrize("tensor", range(5))
def test_weights_that_are_not_the_base_are_refused_by_name(tensor: int) -> None:
    """CASE R2: wrong bits under changes, in one place of any kind of tensor: nothing written."""
    engine = Engine.start(THREE, BASE)
    everywhere = (one for placements in engine.placements for one in placements)
    _flip_all(next(one for one in everywhere if one.region.tensor == tensor))
    outcomes = engine.activate(UPDATE)
    assert kinds(outcomes) == CLEAN
    assert all(LAYOUT.tensors[tensor].name in str(one) for one in outcomes)
    assert all("nothing was written" in str(one) for one in outcomes)


def _flip_all(placement: Any) -> None:
    """Change the sign of every element of one live view."""
    placement.live.neg_()


def test_copies_that_differ_are_refused() -> None:
    """A replicated tensor that drifted on one rank only is found, although the others are right."""
    engine = Engine.start(THREE, BASE)
    _flip_all(next(p for p in engine.placements[2] if p.region.tensor == 2))
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


class Dying:
    """A group in which this rank dies at its n-th exchange, before or after the others have it."""

    def __init__(self, inner: Any, at: int, *, late: bool) -> None:
        self.inner, self.left, self.late = inner, at, late
        self.rank, self.size = inner.rank, inner.size

    def exchange(self, message: bytes) -> list[bytes]:
        """Everyone's message, or death."""
        self.left -= 1
        if self.left == 0 and self.late:
            self.inner.exchange(message)
        if self.left <= 0:
            self.inner.leave()
            raise SystemExit
        return self.inner.exchange(message)

    def renew(self) -> None:
        """The dead stay away."""
        raise SystemExit


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("vote", [1, 2])
def test_a_rank_that_dies_between_the_votes_poisons_the_others(vote: int, late: bool) -> None:
    """CASE R2: whoever waits for a dead rank is poisoned. If it died after vote 2 the others have
    all they need: they are at the target, and are poisoned at the next vote."""
    engine = Engine.start(THREE, BASE)
    victim = engine.appliers[1]
    victim._voter._group = Dying(engine.groups[1], vote, late=late)
    outcomes = engine.activate(UPDATE)
    living = [outcomes[0], outcomes[2]]
    if vote == 2 and late:
        assert living == [point(1, NEW)] * 2
        living = [one for r, one in enumerate(engine.activate(UPDATE)) if r != 1]
    assert kinds(living) == DOUBT
    assert all(engine.appliers[rank].poisoned for rank in (0, 2))


@pytest.mark.parametrize("rank", range(3))
def test_a_rollback_that_fails_on_one_rank_poisons_all(rank: int) -> None:
    """CASE R2: what cannot be undone somewhere is doubted everywhere."""
    engine = Engine.start(THREE, BASE)
    injected(engine, (rank + 1) % 3, "write", 2, OSError("write"))
    injected(engine, rank, "undo", 1, OSError("undo"))
    outcomes = engine.activate(UPDATE)
    assert kinds(outcomes) == DOUBT
    assert_doubted(engine)


def test_an_undo_that_proves_nothing_poisons_all() -> None:
    """If the whole fingerprint afterwards is not the base's, an undo without errors is no undo."""
    engine = Engine.start(THREE, BASE)
    injected(engine, 0, "write", -1, OSError("write"))
    engine.targets[2].undo = lambda part: None  # type: ignore[method-assign,assignment]
    assert kinds(engine.activate(UPDATE)) == DOUBT
    assert_doubted(engine)


def test_without_room_for_old_bits_only_steps_can_be_undone() -> None:
    """`undo_max_bytes` decides: with too little of it, a failure poisons; steps need none."""
    engine = Engine.start(THREE, BASE, undo_max_bytes=8)
    injected(engine, 0, "write", 2, OSError("write"))
    outcomes = engine.activate(UPDATE)
    assert kinds(outcomes) == DOUBT
    assert any("undo_max_bytes" in str(one) for one in outcomes)
    steps = BASE.copy()
    steps.arrays[0][::7] += 1
    engine = Engine.start(THREE, BASE, undo_max_bytes=0)
    injected(engine, 0, "write", -1, OSError("write"))
    assert kinds(engine.activate(update(BASE, steps))) == CLEAN
    assert_at(engine, BASE, 0)


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


def test_a_state_that_is_not_proved_leaves_all_poisoned() -> None:
    """A whole state that cannot be written on one rank, or reads back otherwise, heals nobody."""
    engine = Engine.start(THREE, BASE)
    injected(engine, 2, "write_state", 1, OSError("disk"))
    outcomes = engine.run(lambda rank: engine.appliers[rank].write_state(NEW, point(1, NEW)))
    assert kinds(outcomes) == DOUBT
    assert_doubted(engine)
    outcomes = engine.run(lambda rank: engine.appliers[rank].write_state(BASE, point(1, NEW)))
    assert kinds(outcomes) == DOUBT
    assert_doubted(engine)


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
    _flip_all(next(p for p in engine.placements[0] if p.region.tensor == 1))
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
