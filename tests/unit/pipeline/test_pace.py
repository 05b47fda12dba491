"""When the next look at a bucket is due: soon after a version, seldom when it is down."""

from __future__ import annotations

import pytest

from deltastore.config import FollowerSettings
from deltastore.pipeline.pace import RETRY_CAP_S, Pace
from deltastore.pipeline.stager import Stager
from deltastore.pipeline.stager_rank import StagedFeed
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion
from deltastore.repository.run import open_run
from deltastore.testing.faults import CountingStore, FaultyStore, Op, fail_at
from tests.unit.pipeline.harness import RUN, World

SETTINGS = FollowerSettings(poll_min_s=1.0, poll_hinted_s=10.0)


def pace(*, hinted: bool = False, seed: int = 0) -> Pace:
    """A pace that begins at 100 s."""
    return Pace(SETTINGS, hinted=hinted, now_s=100.0, seed=seed)


def test_failures_double_the_wait_up_to_a_cap() -> None:
    """1, 2, 4, ... 30 s, each lengthened by at most half; one success begins anew."""
    made = pace()
    backoff, now_s, waits = made.backoff(), 100.0, []
    for _ in range(8):
        waits.append(made.failed_s(backoff, now_s))
        now_s += waits[-1]
    for wait_s, least_s in zip(waits, [1, 2, 4, 8, 16, RETRY_CAP_S, RETRY_CAP_S], strict=False):
        assert least_s <= wait_s <= 1.5 * least_s
    backoff.succeeded()
    assert 1.0 <= made.failed_s(backoff, now_s) <= 1.5


def test_no_two_look_at_the_same_times() -> None:
    """Two of a fleet that found nothing, or failed, at the same time come back at others; so does
    one of them twice."""
    one, other = pace(seed=1), pace(seed=2)
    assert one.idle_s(100.0) != other.idle_s(100.0)
    assert one.failed_s(one.backoff(), 0.0) != other.failed_s(other.backoff(), 0.0)
    assert one.idle_s(100.0) != one.idle_s(100.0)


def test_looks_follow_the_interval_between_versions() -> None:
    """With a version every 40 s a look every 5; sooner never than `poll_min_s`, and seldom while
    nothing comes, but never less than `poll_hinted_s`."""
    made = pace()
    assert made.idle_s(100.0) == pytest.approx(1.0, rel=0.25)
    for number in range(12):
        made.arrived(100.0 + 40.0 * number)
    last_s = 100.0 + 40.0 * 11
    assert made.idle_s(last_s) == pytest.approx(5.0, rel=0.26)
    assert made.idle_s(last_s + 64.0) == pytest.approx(8.0, rel=0.26)
    assert made.idle_s(last_s + 4000.0) == pytest.approx(10.0, rel=0.25)


def test_who_is_told_looks_seldom() -> None:
    """With hints a look is only a safety net, whatever arrives."""
    made = pace(hinted=True)
    for now_s in (101.0, 102.0, 103.0):
        made.arrived(now_s)
        assert made.idle_s(now_s) == pytest.approx(10.0, rel=0.25)


def test_a_bucket_that_is_down_is_left_alone(tmp_path) -> None:
    """Over 200 s a stager asks a store that does not answer a dozen times, not two hundred; when it
    answers again the rank gets its version."""
    world = World(tmp_path / "w")
    publisher = world.publisher()
    world.step(publisher, 1)
    publisher.close()
    asked = CountingStore(world.home_store)
    store = FaultyStore(asked)
    stager = Stager(
        open_run(store, RUN), tmp_path / "spool", name="h", clock=world.clock, settings=SETTINGS
    )
    active = ActiveVersion.of(load_manifest(world.run, 0))
    feed = StagedFeed(tmp_path / "spool", world.layout, active, rank="r", clock=world.clock)
    store.add(fail_at(Op.GET, 1, times=10_000))
    for _ in range(200):
        stager.turn()
        world.clock.advance_s(1.0)
    assert 5 <= len(store.fired) <= 15
    store.clear()
    for _ in range(50):
        stager.turn()
        world.clock.advance_s(1.0)
    feed.poll()
    staged = feed.staged()
    assert staged is not None
    assert staged.target.version == 2
    stager.close()
