"""A full disk under the event log costs events, never the work they report on."""

from __future__ import annotations

import errno
import os

import pytest

from deltastore.errors import Kind
from deltastore.events import EventsLost, RegionFailed
from deltastore.observability.jsonl import JsonlSink, read_events
from deltastore.testing.clock import FakeClock

EVENT = RegionFailed("far", 3, "unavailable", "down")


class Disk:
    """Stands before os.write: takes `room` bytes more, then is full."""

    def __init__(self, monkeypatch):
        self.room = 1 << 30
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor, data):
        """Write as much as there is room for; ENOSPC when there is none."""
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = self._write(descriptor, bytes(data)[: self.room])
        self.room -= count
        return count


@pytest.mark.parametrize("room", [0, 1, 40, 60])
def test_full_disk_is_counted_and_told_later(tmp_path, monkeypatch, room):
    """However the disk filled up, the log stays readable and says how many events it lacks."""
    disk = Disk(monkeypatch)
    with JsonlSink(tmp_path / "e.jsonl", FakeClock()) as sink:
        sink(EVENT)
        disk.room = room
        for _ in range(3):
            sink(EVENT)
        lost = sink.lost
        assert lost == (3 if room == 0 else 2)  # a line that was begun is finished later
        assert sink.error is not None
        assert sink.error.kind is Kind.DISK_FULL
        assert [e.event for e in read_events(tmp_path / "e.jsonl")] == [EVENT]
        disk.room = 1 << 30
        sink(EVENT)
        assert (sink.lost, sink.error) == (0, None)
    begun = [] if room == 0 else [EVENT]
    assert [e.event for e in read_events(tmp_path / "e.jsonl")] == [
        EVENT,
        *begun,
        EventsLost(lost),
        EVENT,
    ]
