"""The wrappers that tests use: faults happen where they were put; counts and waits are exact."""

from __future__ import annotations

import pytest

from deltastore.errors import NotFoundError, StorageError
from deltastore.storage.memory import MemoryStore
from deltastore.storage.store import ByteRange, PutMode, PutOutcome
from deltastore.testing.clock import FakeClock
from deltastore.testing.faults import (
    BandwidthStore,
    Callback,
    Corrupt,
    CountingStore,
    Fail,
    FaultyStore,
    LatencyStore,
    LoseResponse,
    Op,
    Truncate,
    fail_at,
)

CREATE, OVERWRITE = PutMode.CREATE, PutMode.OVERWRITE


def test_a_fault_happens_at_its_call_only() -> None:
    """The nth matching call fails, and `times` says how many after it."""
    store = FaultyStore(MemoryStore(), [fail_at(Op.PUT, 2, key_contains="v/", times=2)])
    results = []
    for key in ("v/1", "other", "v/2", "v/3", "v/4"):
        try:
            results.append(store.put(key, b"x", mode=CREATE))
        except StorageError:
            results.append(None)
    assert results == [PutOutcome.WRITTEN, PutOutcome.WRITTEN, None, None, PutOutcome.WRITTEN]
    assert len(store.fired) == 2
    assert [info.key for info in store.list("")] == ["other", "v/1", "v/4"]


def test_a_lost_response_has_taken_effect() -> None:
    """LoseResponse raises after the store did it; Fail before."""
    store = FaultyStore(
        MemoryStore(),
        [
            fail_at(Op.PUT, 1, LoseResponse(), key_contains="lost"),
            fail_at(Op.PUT, 1, Fail(), key_contains="failed"),
            fail_at(Op.DELETE, 1, LoseResponse()),
        ],
    )
    for key in ("lost", "failed"):
        with pytest.raises(StorageError):
            store.put(key, b"x", mode=CREATE)
    assert [info.key for info in store.list("")] == ["lost"]
    with pytest.raises(StorageError):
        store.delete(["lost"])
    assert list(store.list("")) == []


def test_bodies_can_be_damaged_both_ways() -> None:
    """Truncate and Corrupt change what a get returns, or what a put stores."""
    store = FaultyStore(
        MemoryStore(), [fail_at(Op.GET, 1, Truncate(2)), fail_at(Op.GET, 2, Corrupt(0))]
    )
    store.put("k", b"abcd", mode=CREATE)
    assert [store.get("k") for _ in range(3)] == [b"ab", b"`bcd", b"abcd"]
    store.add(fail_at(Op.PUT, 1, Truncate(1)))
    store.put("half", b"abcd", mode=CREATE)
    assert store.get("half") == b"a"


def test_callbacks_run_before_or_after() -> None:
    """A rival can write just before our put, and something can happen just after it."""
    inner, seen = MemoryStore(), []
    store = FaultyStore(
        inner,
        [
            fail_at(Op.HEAD, 1, Callback(lambda: seen.append("head"))),
            fail_at(Op.PUT, 1, Callback(lambda: seen.append(inner.get("k")), after=True)),
        ],
    )
    store.put("k", b"x", mode=CREATE)
    store.head("k")
    assert seen == [b"x", "head"]
    store.clear()
    store.add(fail_at(Op.LIST, 1))
    with pytest.raises(StorageError):
        store.list("")


def test_traffic_is_counted() -> None:
    """Requests by kind, and the bytes of bodies that came through."""
    store = CountingStore(MemoryStore())
    store.put("k", b"12345", mode=CREATE)
    store.get("k")
    store.get("k", ByteRange(0, 2))
    store.head("k")
    list(store.list(""))
    store.delete(["k"])
    with pytest.raises(NotFoundError):
        store.get("k")
    traffic = store.traffic
    assert traffic.requests == {Op.PUT: 1, Op.GET: 3, Op.HEAD: 1, Op.LIST: 1, Op.DELETE: 1}
    assert (traffic.sent_bytes, traffic.received_bytes, traffic.total_requests) == (5, 7, 7)


def test_latency_is_waited_on_the_clock() -> None:
    """Each call of each kind takes its time."""
    clock = FakeClock()
    store = LatencyStore(MemoryStore(), request_s=0.05, clock=clock)
    store.put("k", b"x", mode=CREATE)
    store.get("k")
    store.head("k")
    list(store.list(""))
    store.delete(["k"])
    assert clock.slept_s == [0.05] * 5


def test_a_line_has_one_speed_each_way() -> None:
    """Bytes wait for those before them; up and down do not disturb each other."""
    clock = FakeClock()
    start_s = clock.monotonic_s()
    store = BandwidthStore(MemoryStore(), bytes_per_s=100.0, clock=clock)
    store.put("k", b"x" * 200, mode=CREATE)
    store.put("k", b"y" * 100, mode=OVERWRITE)
    assert clock.monotonic_s() - start_s == pytest.approx(3.0)
    store.get("k")
    assert clock.monotonic_s() - start_s == pytest.approx(4.0)
    with pytest.raises(ValueError, match="speed"):
        BandwidthStore(MemoryStore(), bytes_per_s=0, clock=clock)
