"""Whatever fails on whichever rank, all are at the base, bit for bit, or all are poisoned."""

from __future__ import annotations

from typing import Any

import pytest

from deltastore.events import ActivationFailed
from tests.unit.adapters.placed_kit import Engine, point
from tests.unit.pipeline.ranks_kit import (
    BASE,
    CLEAN,
    DOUBT,
    NEW,
    THREE,
    UPDATE,
    assert_at,
    assert_doubted,
    injected,
    kinds,
    parts_of,
    update,
)


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
