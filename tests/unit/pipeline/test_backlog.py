"""What waits for a region is bounded in memory and on disk, and costs the trainer no time."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from deltastore.errors import Kind
from deltastore.pipeline.backlog import MAX_VERSIONS, Backlog

KIB = 1024


@pytest.fixture
def trouble():
    """What the backlog complained of."""
    return []


@pytest.fixture
def backlog(tmp_path, trouble):
    """At most 8 KiB in memory and 16 KiB on disk."""
    made = Backlog(
        "r",
        memory_max_bytes=8 * KIB,
        disk_max_bytes=16 * KIB,
        folder=tmp_path,
        trouble=trouble.append,
    )
    yield made
    made.close()


def _wait_for(condition):
    done = threading.Event()
    for _ in range(2000):
        if condition():
            return
        done.wait(0.005)
    pytest.fail("it did not come to be")


def test_bodies_come_out_in_order_whole(backlog):
    """Bodies are taken in the order they came, byte for byte, from memory and from disk."""
    bodies = {f"k{i}": os.urandom(KIB) for i in range(20)}
    for i, (key, body) in enumerate(bodies.items()):
        _wait_for(lambda: backlog.memory_bytes <= 4 * KIB)
        assert backlog.add(i // 4, key, body)
    assert backlog.disk_bytes >= 12 * KIB
    for key, body in bodies.items():
        item = backlog.take()
        assert (item.key, backlog.read(item)) == (key, body)
        backlog.finish(item)
    assert (backlog.memory_bytes, backlog.disk_bytes) == (0, 0)


def test_what_does_not_fit_is_refused(backlog):
    """Beyond memory and disk a body is refused, and the limits are never passed."""
    kept = 0
    for i in range(60):
        kept += backlog.add(1, f"k{i}", bytes(KIB))
        assert backlog.memory_bytes <= 8 * KIB
        assert backlog.disk_bytes <= 16 * KIB
    _wait_for(lambda: backlog.disk_bytes >= 4 * KIB)
    assert 8 <= kept < 60
    assert not backlog.add(1, "large", bytes(9 * KIB))


def test_given_back_keeps_its_place(backlog):
    """A body that could not be sent is the next to be taken again."""
    backlog.add(1, "a", b"a")
    backlog.add(1, "b", b"b")
    item = backlog.take()
    backlog.give_back(item)
    assert backlog.take().key == "a"


def test_no_file_is_left_behind(backlog, tmp_path):
    """Bodies on disk have no name there: a killed process leaves nothing."""
    for i in range(8):
        backlog.add(1, f"k{i}", bytes(KIB))
    _wait_for(lambda: backlog.disk_bytes > 0)
    assert list(tmp_path.iterdir()) == []


def test_dropped_version_while_it_is_read(backlog):
    """A version dropped while one of its bodies is in hand reads as nothing, not as noise."""
    backlog.add(1, "a", b"a")
    item = backlog.take()
    backlog.drop(1)
    assert backlog.read(item) is None
    backlog.finish(item)
    assert not backlog.holds(1)
    assert backlog.memory_bytes == 0


def test_disk_full(backlog, trouble, monkeypatch):
    """A full disk is said once; what is in memory is kept and still sent."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("deltastore.pipeline.backlog.os.pwrite", full)
    for i in range(8):
        backlog.add(1, f"k{i}", bytes([i]) * KIB)
    _wait_for(lambda: trouble)
    assert [err.kind for err in trouble] == [Kind.DISK_FULL]
    for i in range(8):
        item = backlog.take()
        assert backlog.read(item) == bytes([i]) * KIB
        backlog.finish(item)


def test_versions_are_bounded(backlog):
    """No more versions wait than files may be open."""
    kept = [backlog.add(v, f"k{v}", b"") for v in range(MAX_VERSIONS + 3)]
    assert sum(kept) == MAX_VERSIONS


def test_closed_backlog_wakes_who_waits(backlog):
    """Whoever waits for a body, or for a version to be sent, returns when the backlog is closed."""
    taken = []
    waiting = threading.Thread(target=lambda: taken.append(backlog.take()))
    waiting.start()
    backlog.close()
    waiting.join(10)
    assert taken == [None]
    assert backlog.wait_sent(1, 0)
    assert not backlog.add(1, "late", b"x")
