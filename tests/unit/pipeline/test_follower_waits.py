"""A look costs a request: there are fewer while nothing comes, and fewer still while it fails."""

from __future__ import annotations

import pytest

from deltastore.pipeline.follower import Follower
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion
from deltastore.storage.memory import MemoryStore
from deltastore.testing.clock import FakeClock
from deltastore.testing.faults import FaultyStore, Op, fail_at
from tests.unit.pipeline.harness import World


class EndingClock(FakeClock):
    """A clock that ends whoever waits on it at the `last` wait; `at` maps waits to what happens."""

    def __init__(self, last, at=None):
        super().__init__()
        self.last, self.at = last, at or {}

    def wait(self, event, timeout_s):
        """Wait, then see whether that was the last time."""
        super().wait(event, timeout_s)
        self.at.get(len(self.slept_s), lambda: None)()
        if len(self.slept_s) == self.last:
            event.set()
        return event.is_set()


@pytest.fixture
def store():
    """The home bucket, on which faults can happen."""
    return FaultyStore(MemoryStore())


@pytest.fixture
def world(tmp_path, store):
    """A run at version 0."""
    return World(tmp_path / "w", home_store=store)


@pytest.fixture
def point(world):
    """Its version 0."""
    return ActiveVersion.of(load_manifest(world.run, 0))


def _waits(world, point, clock, **options):
    """What a follower that finds no version waited, look after look."""
    follower = Follower(world.run, point, name="a", clock=clock, **options)
    follower.start()
    follower._thread.join(60)
    assert len(clock.slept_s) == clock.last
    return clock.slept_s


def _down(store):
    store.add(fail_at(Op.GET, 1, times=1000))


def test_a_fleet_that_waits_spreads_and_slows_down(world, point):
    """While nothing comes looks are rarer, up to the safety net's, and no two followers' alike."""
    mine = _waits(world, point, EndingClock(40), seed=1)
    waited_s = 0.0
    for wait_s in mine:
        base_s = min(10.0, max(1.0, waited_s / 8))
        assert 0.75 * base_s <= wait_s <= 1.25 * base_s
        waited_s += wait_s
    assert min(mine[-5:]) >= 7.5
    assert not set(mine) & set(_waits(world, point, EndingClock(40), seed=2))
    assert not set(mine) & set(_waits(world, point, EndingClock(40)))
    assert not set(mine) & set(
        _waits(world, point, EndingClock(40))
    )  # of one seed for all it were equal


def test_a_follower_backs_off_while_its_store_is_down(world, point, store):
    """The wait doubles after each failed look, has a limit and jitter, and ends with trouble."""
    clock = EndingClock(10, {8: store.clear})
    _down(store)
    waits = _waits(world, point, clock, seed=1)
    for wait_s, base_s in zip(waits[:8], (1, 2, 4, 8, 16, 30, 30, 30), strict=True):
        assert base_s <= wait_s <= 1.5 * base_s
    assert len({wait_s / base_s for wait_s, base_s in zip(waits, (1, 2, 4, 8), strict=False)}) == 4
    assert waits[8] <= 12.5


def test_a_failure_after_success_waits_as_the_first(world, point, store):
    """Whoever has succeeded since begins again at the shortest wait."""
    clock = EndingClock(7, {4: store.clear, 5: lambda: _down(store)})
    _down(store)
    waits = _waits(world, point, clock, seed=1)
    assert waits[3] >= 8
    assert 1 <= waits[5] <= 1.5


def test_hints_do_not_bring_a_follower_back_to_a_store_that_is_down(world, point, store):
    """A newer version that is advertised all the time shortens no wait after a failure."""
    clock = EndingClock(6)
    _down(store)
    waits = _waits(world, point, clock, seed=1, hint_source=lambda known, _timeout_s: known + 1)
    for wait_s, base_s in zip(waits, (1, 2, 4, 8, 16, 30), strict=True):
        assert wait_s >= base_s
