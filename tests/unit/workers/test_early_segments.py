"""Segments are told as home gets them and read ahead; whatever is told wrong costs nothing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from deltastore.coordination.backend import MAX_SEGMENT_HINTS, SegmentHint
from deltastore.coordination.memory import MemoryCoordination
from deltastore.errors import CoordinationError, FormatError, Kind
from deltastore.format.keys import RunKeys
from deltastore.format.manifest import SegmentRef
from deltastore.pipeline.stager import Stager
from deltastore.pipeline.stager_rank import StagedFeed
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion
from deltastore.repository.run import open_run
from deltastore.storage.memory import MemoryStore
from deltastore.testing.clock import FakeClock
from deltastore.testing.faults import Callback, FaultyStore, Op, fail_at
from tests.unit.pipeline.harness import RUN, World
from workers.early_segments import SegmentListener, SegmentTeller

if TYPE_CHECKING:
    from pathlib import Path

SHA = "ab" * 32


def _no_wait(known: int, timeout_s: float) -> int | None:
    return None


def _ref(number: int) -> SegmentRef:
    return SegmentRef(f"{RUN}/deltas/0000000002/{number:05d}-{SHA}.seg", 10, SHA, 1)


class Troubled(MemoryCoordination):
    """A coordination that does not answer, or answers garbage, as long as it is told to."""

    def __init__(self) -> None:
        super().__init__(FakeClock())
        self.error: Exception | None = None
        self.go = threading.Event()
        self.go.set()

    def announce_segment(self, hint: SegmentHint) -> None:
        """Fail, if told to; wait, if told to."""
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        super().announce_segment(hint)

    def announced_segments(self) -> list[SegmentHint]:
        """Fail, if told to."""
        if self.error is not None:
            raise self.error
        return super().announced_segments()


def _outage() -> CoordinationError:
    return CoordinationError("away", kind=Kind.REDIS_UNAVAILABLE)


def test_segments_are_read_before_their_version_exists(tmp_path: Path) -> None:
    """From a publisher to a host's stager through coordination: the bodies are there before the
    manifest is, and staging it reads none of them again."""
    home = FaultyStore(MemoryStore())
    world = World(tmp_path / "w", home_store=home)
    coordination = MemoryCoordination(world.clock)
    teller = SegmentTeller(coordination)
    reads = FaultyStore(world.home_store)
    run = open_run(reads, RUN)
    listener = SegmentListener(coordination, run.keys, _no_wait)
    stager = Stager(run, tmp_path / "spool", name="h", clock=world.clock, hint_source=listener.wait)
    listener.announce = stager.announce
    publisher = world.publisher(announce=teller.tell)
    active = ActiveVersion.of(load_manifest(world.run, 1))
    feed = StagedFeed(tmp_path / "spool", world.layout, active, rank="r", clock=world.clock)
    stager.turn()
    told: list[list[SegmentHint]] = []
    ahead: list[int] = []

    def before_the_manifest() -> None:
        teller.close()  # what was to be told has been told
        told.append(coordination.announced_segments())
        listener.wait(1, 0.0)
        stager._cache._pool.shutdown(wait=True)
        ahead.append(stager._cache.held_bytes)

    home.add(fail_at(Op.PUT, 1, Callback(before_the_manifest), key_contains="/versions/"))
    manifest = world.step(publisher, 1)
    publisher.close()
    assert ahead == [manifest.core.delta_bytes]
    assert [h.sha256 for h in told[0] if h.version == 2] == [
        ref.sha256 for ref in manifest.core.segments
    ]
    reads.add(fail_at(Op.GET, 1, key_contains=".seg", times=99))
    for _ in range(6):
        world.clock.advance_s(20.0)
        stager.turn()
    feed.poll()
    update = feed.take()
    assert update is not None
    assert update.target.version == 2
    assert not [fault for fault in reads.fired if fault.key_contains == ".seg"]
    stager.close()


@pytest.mark.parametrize("error", [_outage(), FormatError("garbage", kind=Kind.PAYLOAD)])
def test_a_listener_that_hears_nothing_still_waits_for_versions(error: Exception) -> None:
    """Redis away, or garbage where announcements belong: versions are waited for as ever."""
    coordination = Troubled()
    coordination.announce_segment(SegmentHint(2, 0, SHA, 10))
    keys = RunKeys(RUN)
    listener = SegmentListener(coordination, keys, lambda known, timeout_s: known + 1)
    heard: list[str] = []
    listener.announce = lambda key, size_bytes: bool(heard.append(key))
    coordination.error = error
    assert listener.wait(1, 0.0) == 2
    assert heard == []
    coordination.error = None
    assert listener.wait(1, 0.0) == 2
    assert listener.wait(1, 0.0) == 2
    assert heard == [keys.segment(2, 0, SHA)]
    coordination.announce_segment(SegmentHint(1, 0, SHA, 10))
    listener.wait(1, 0.0)
    assert len(heard) == 1


def test_a_teller_never_holds_up_an_upload() -> None:
    """However slow or away Redis is: more than fits is not told, and closing ends."""
    coordination = Troubled()
    coordination.go.clear()
    teller = SegmentTeller(coordination)
    for number in range(MAX_SEGMENT_HINTS + 5):
        teller.tell(2, _ref(number))
    assert teller.untold >= 4
    coordination.error = _outage()
    coordination.go.set()
    teller.close()
    assert teller.untold >= MAX_SEGMENT_HINTS


def test_a_refused_teller_gives_up() -> None:
    """Redis that refuses (an ACL without the right) is asked once, and publishing goes on."""
    coordination = Troubled()
    coordination.error = CoordinationError("no right", kind=Kind.REDIS_SCRIPT)
    teller = SegmentTeller(coordination)
    for number in range(3):
        teller.tell(2, _ref(number))
    teller.close()
    assert teller.untold == 1


def test_a_segment_that_was_changed_on_its_way_is_not_used(tmp_path: Path) -> None:
    """An announcement of other bytes under a true number leads to nothing."""
    world = World(tmp_path)
    stager = Stager(open_run(world.home_store, RUN), tmp_path / "s", name="h", clock=world.clock)
    coordination = MemoryCoordination(world.clock)
    listener = SegmentListener(coordination, world.run.keys, _no_wait)
    listener.announce = stager.announce
    coordination.announce_segment(SegmentHint(1, 0, SHA, 1 << 20))
    stager._cache.passed(0)
    listener.wait(0, 0.0)
    stager._cache._pool.shutdown(wait=True)
    assert stager._cache.held_bytes == 0
    assert stager._cache.refused >= 1
    stager.close()
