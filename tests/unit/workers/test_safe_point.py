"""Forward passes, pauses and activations race each other; weights are never read half-written."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.clock import SystemClock
from deltastore.config import FollowerSettings
from deltastore.coordination.memory import MemoryCoordination
from deltastore.errors import ApplyError, Kind
from deltastore.format.fingerprint import Fingerprint
from deltastore.pipeline.replay import JoinReport
from deltastore.repository.points import ActiveVersion
from deltastore.testing.clock import FakeClock
from tests.unit.workers.kit import hash_of, memory_run
from workers.actor.follow import FollowedWeights
from workers.actor.safe_point import SafePoint

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 10_000
READERS = 4


class Weights:
    """Two cells that a write changes one after the other, and a count of who is inside."""

    def __init__(self) -> None:
        self.cells = [0, 0]
        self.writing = False
        self.torn = 0
        self.read = 0

    def forward(self) -> None:
        """Read both cells, with another thread likely in between."""
        first = self.cells[0]
        _let_others_run()
        self.torn += self.writing or first != self.cells[1]
        self.read += 1

    def activate(self, _update: object = None) -> None:
        """Write both cells, with another thread likely in between."""
        self.writing = True
        self.cells[0] += 1
        _let_others_run()
        self.cells[1] += 1
        self.writing = False


def _let_others_run() -> None:
    threading.Event().wait(0)


def _race(safe_point: SafePoint, weights: Weights, activate: Callable[[], object]) -> None:
    """Activate `ROUNDS` times while threads run forward passes, and pause and resume."""
    over = threading.Event()

    def forwards() -> None:
        while not over.is_set():
            with safe_point.forward():
                weights.forward()

    def pauses() -> int:
        count = 0
        while not over.is_set():
            safe_point.pause()
            _let_others_run()
            safe_point.resume()
            _let_others_run()
            count += 1
        return count

    with ThreadPoolExecutor(READERS + 1) as pool:
        running = [pool.submit(forwards) for _ in range(READERS)]
        paused = pool.submit(pauses)
        try:
            for _ in range(ROUNDS):
                activate()
        finally:
            over.set()
        for future in running:
            future.result(30)
        assert paused.result(30) > 0
    assert weights.torn == 0
    assert weights.read > 0
    assert weights.cells == [ROUNDS, ROUNDS]


def test_no_forward_during_ten_thousand_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASE R18: resume and activate race 10,000 times: no forward pass runs during a write."""
    clock = SystemClock()
    safe_point, live = SafePoint(clock), Weights()
    point = ActiveVersion(0, hash_of(0), Fingerprint(0, 0), 1)
    followed = FollowedWeights(
        memory_run(),
        _Target(),
        point,
        JoinReport("test", 0, 0, 0.0),
        name="a",
        coordination=MemoryCoordination(clock),
        settings=FollowerSettings(),
        most_rebuilds=1,
        clock=clock,
        sink=lambda event: None,
        safe_point=safe_point,
    )
    monkeypatch.setattr(followed, "_follower", _AlwaysStaged())
    monkeypatch.setattr(followed, "_applier", live)
    _race(safe_point, live, followed.activate)


class _AlwaysStaged:
    """A follower that always has the next version ready."""

    def take(self) -> object:
        return object()


class _Target:
    """Weights that nobody asks."""

    layout = memory_run().layout

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(0, 0)


def test_a_pass_in_flight_is_let_finish() -> None:
    """A write waits for the pass in flight, and keeps the next one out until it is done."""
    safe_point = SafePoint(SystemClock())
    inside, finish, order = threading.Event(), threading.Event(), []

    def long_pass() -> None:
        with safe_point.forward():
            inside.set()
            finish.wait(30)
            order.append("pass")

    def write() -> None:
        with safe_point.write():
            order.append("write")

    def next_pass() -> None:
        with safe_point.forward():
            order.append("next")

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(long_pass)
        assert inside.wait(30)
        second = pool.submit(write)
        while not safe_point._wanted:
            _let_others_run()
        third = pool.submit(next_pass)
        _let_others_run()
        assert order == []
        finish.set()
        for future in (first, second, third):
            future.result(30)
    assert order == ["pass", "write", "next"]


def test_a_long_pass_is_asked_to_stop() -> None:
    """A pass that does not finish in time sees that it should stop; the write then happens."""
    safe_point = SafePoint(SystemClock(), finish_within_s=0.01)
    inside = threading.Event()

    def endless_pass() -> None:
        with safe_point.forward():
            inside.set()
            while not safe_point.stop_wanted:
                _let_others_run()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(endless_pass)
        assert inside.wait(30)
        with safe_point.write():
            assert running.done() or running.result(30) is None
    assert not safe_point.stop_wanted


def test_a_pass_that_never_stops_prevents_the_write_within_a_bound() -> None:
    """The write is given up by its limit, changes nothing, and forward passes go on."""
    clock = FakeClock()
    safe_point = SafePoint(clock, finish_within_s=5.0, stop_within_s=5.0)
    wrote = False

    def tick(_timeout: Any = None) -> bool:
        clock.advance_s(1.0)
        return True

    with safe_point.forward():
        safe_point._changed.wait = tick  # type: ignore[method-assign]
        with pytest.raises(ApplyError) as refused, safe_point.write():
            wrote = True
        assert refused.value.kind is Kind.ROLLED_BACK
    assert not wrote
    assert not safe_point.stop_wanted
    with safe_point.forward():
        pass


def test_resume_needs_a_pause() -> None:
    """A resume too many is an error and not a pass during the next pause."""
    safe_point = SafePoint(SystemClock())
    with pytest.raises(ApplyError):
        safe_point.resume()
