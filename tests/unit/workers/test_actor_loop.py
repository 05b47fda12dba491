"""What others see of an actor that drains, is in doubt, or cannot report: states and jobs."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.coordination.backend import ActorState
from deltastore.coordination.memory import MemoryCoordination
from deltastore.errors import CoordinationError, Kind
from deltastore.format.fingerprint import ZERO
from deltastore.testing.clock import FakeClock
from tests.unit.workers.kit import memory_run
from tests.unit.workers.test_actor_parts import ACTIVE, SETTINGS, Bench, StubEngine
from workers.actor.loop import Actor
from workers.actor.safe_point import SafePoint
from workers.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class LoopClock(FakeClock):
    """Only the actor's own thread moves it: a heartbeat that waits would run it away."""

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """As FakeClock's on the main thread; until the event, for a moment, on others."""
        if threading.current_thread() is threading.main_thread():
            return super().wait(event, timeout_s)
        return event.wait(0.01)


class Weights:
    """Weights at version 1 that are proved, or in doubt until they are rebuilt."""

    active = ACTIVE
    staged_version: int | None = None
    staleness = 0
    trouble = ""

    def __init__(self) -> None:
        self.poisoned = False
        self.rebuilding: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Nothing to stage."""

    def stop(self) -> None:
        """Nothing to stop."""

    def catch_up(self) -> None:
        """At HEAD already."""

    def activate(self) -> bool:
        """Nothing is staged."""
        return False

    def re_anchor(self) -> None:
        """Rebuilt."""
        self.rebuilding()
        self.poisoned = False

    def lost_its_history(self) -> bool:
        """Never."""
        return False

    def fingerprint(self) -> Any:
        """Of no weights."""
        return ZERO


class Stage:
    """An actor on memory backends, with two jobs put up."""

    def __init__(self, folder: Path, **settings: float) -> None:
        self.bench = Bench()
        self.clock = LoopClock()
        self.memory = MemoryCoordination(self.clock)
        self.bench.clock, self.bench.memory = self.clock, self.memory
        self.bench.run = memory_run()
        self.weights = Weights()
        self.seen: list[list[ActorState]] = []
        self.engine = StubEngine()
        one_job = replace(SETTINGS, leases_at_once=1, **settings)
        self.actor = Actor(
            self.bench.run,
            self.engine,
            self.weights,
            via="nothing",
            safe_point=SafePoint(self.clock),
            coordination=self.memory,
            settings=one_job,
            threads=1,
            folder=RunFolder(folder),
            clock=self.clock,
            sink=lambda event: None,
        )
        self.bench.offer("j1", "j2")

    def look(self) -> None:
        """Note what members say, after a heartbeat."""
        self.actor._presence.beat()
        self.seen.append([member.state for member in self.memory.members()])

    def during(self, steps: Callable[[int], None]) -> None:
        """Have `steps` called in every decoding step, numbered through."""
        count = iter(range(1, 1000))
        self.engine._during = lambda: steps(next(count))


def test_an_actor_told_to_stop_finishes_what_it_generates(tmp_path: Path) -> None:
    """Told in the middle of a generation that ends in time: it says that it drains, settles that
    job, leaves the other one to others, and is no member any more."""
    stage = Stage(tmp_path)

    def step(number: int) -> None:
        if number == 1:
            stage.actor.request_stop()
            stage.look()

    stage.during(step)
    assert stage.actor.run().version == 1
    counts = stage.memory.job_counts()
    assert stage.seen == [[ActorState.DRAINING]]
    assert (counts.settled, counts.open, counts.leased) == (1, 1, 0)
    assert stage.memory.members() == []


def test_an_actor_told_to_stop_hands_back_what_takes_too_long(tmp_path: Path) -> None:
    """Told in the middle of a generation that outlasts `drain_max_s`: the job goes back at once,
    nothing is stored, and the actor has left."""
    stage = Stage(tmp_path, drain_max_s=5.0)

    def step(number: int) -> None:
        if number == 1:
            stage.actor.request_stop()
            stage.clock.advance_s(6.0)

    stage.during(step)
    stage.actor.run()
    counts = stage.memory.job_counts()
    assert (counts.settled, counts.open, counts.leased) == (0, 2, 0)
    assert list(stage.bench.run.store.list("r/rollouts/")) == []
    assert stage.memory.members() == []


def test_an_actor_in_doubt_says_so_until_it_is_rebuilt(tmp_path: Path) -> None:
    """While its weights are rebuilt nobody deals to it; afterwards it works."""
    stage = Stage(tmp_path)
    stage.weights.poisoned = True
    stage.weights.rebuilding = stage.look

    def step(number: int) -> None:
        if number == 1:
            stage.look()
            stage.actor.request_stop()

    stage.during(step)
    stage.actor.run()
    assert stage.seen == [[ActorState.POISONED], [ActorState.ACTIVE]]
    assert stage.memory.job_counts().settled == 1


def test_an_actor_whose_heartbeat_is_refused_ends(tmp_path: Path) -> None:
    """A refusal in the heartbeat's thread ends the actor with its reason: to all others it would be
    lost while it works on."""
    stage = Stage(tmp_path)
    beaten = threading.Event()
    beat = stage.memory.heartbeat

    def refused(*arguments: Any, **named: Any) -> bool:
        if threading.current_thread() is threading.main_thread():
            return beat(*arguments, **named)
        beaten.set()
        raise CoordinationError("maxmemory-policy is allkeys-lru", kind=Kind.REDIS_POLICY)

    stage.memory.heartbeat = refused  # type: ignore[method-assign]
    stage.during(lambda number: assert_set(beaten))
    with pytest.raises(CoordinationError, match="allkeys-lru"):
        stage.actor.run()


def assert_set(event: threading.Event) -> None:
    """Wait for what must come."""
    assert event.wait(30)
