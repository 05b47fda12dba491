"""Parallel transfers: verified, in order, bounded, and every future resolves."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import (
    ConflictError,
    IntegrityError,
    InvalidInputError,
    Kind,
    NotFoundError,
    StorageError,
)
from deltastore.storage.memory import MemoryStore
from deltastore.storage.store import ByteRange, PutMode, PutOutcome
from deltastore.storage.transfer import FetchItem, Uploader, fetch, fetch_all
from deltastore.storage.wrapper import StoreWrapper
from deltastore.testing.faults import (
    Corrupt,
    CountingStore,
    Fail,
    FaultyStore,
    LoseResponse,
    Op,
    Truncate,
    fail_at,
)

CREATE = PutMode.CREATE
_WAIT_S = 20.0


def _item(key: str, body: bytes) -> FetchItem:
    return FetchItem(key, len(body), hashlib.sha256(body).hexdigest())


class _GateStore(StoreWrapper):
    """Puts and gets wait at a gate; who waits is counted."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.gate = threading.Event()
        self.arrived = threading.Semaphore(0)

    def put(  # type: ignore[override]
        self, key: str, body: bytes, *, mode: PutMode, sha256: str | None = None
    ) -> PutOutcome:
        self.arrived.release()
        assert self.gate.wait(_WAIT_S)
        return self.inner.put(key, body, mode=mode, sha256=sha256)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self.arrived.release()
        assert self.gate.wait(_WAIT_S)
        return self.inner.get(key, byte_range)


@given(bodies=st.lists(st.binary(max_size=200), max_size=20), streams=st.integers(1, 6))
def test_objects_come_verified_and_in_order(bodies: list[bytes], streams: int) -> None:
    """Whatever the number of streams, the bodies come out as they were asked for."""
    store = MemoryStore()
    items = []
    for number, body in enumerate(bodies):
        store.put(f"o/{number}", body, mode=CREATE)
        items.append(_item(f"o/{number}", body))
    fetched = list(fetch_all(store, items, streams=streams))
    assert [f.body for f in fetched] == bodies
    assert [f.item for f in fetched] == items


def test_no_more_than_streams_objects_are_held() -> None:
    """A consumer that does not go on stops the reading after `streams` further objects."""
    counting = CountingStore(MemoryStore())
    items = []
    for number in range(30):
        counting.put(f"o/{number}", b"x" * 100, mode=CREATE)
        items.append(_item(f"o/{number}", b"x" * 100))
    bodies = fetch_all(counting, items, streams=4)
    next(bodies)
    next(bodies)
    bodies.close()  # type: ignore[attr-defined]
    assert counting.traffic.requests[Op.GET] <= 2 + 4


@pytest.mark.parametrize("damage", [Corrupt(3), Truncate(5)])
def test_wrong_bytes_are_read_once_more(damage: Corrupt | Truncate) -> None:
    """One bad read is forgiven."""
    store = FaultyStore(MemoryStore(), [fail_at(Op.GET, 1, damage)])
    store.put("k", b"0123456789", mode=CREATE)
    assert fetch(store, _item("k", b"0123456789")).body == b"0123456789"
    assert len(store.fired) == 1


@pytest.mark.parametrize("held", [b"012345678X", b"01234", b"", b"0123456789 and more, corrupt"])
def test_other_bytes_than_named_are_an_integrity_error(held: bytes) -> None:
    """Changed, shorter and empty objects are named after two reads, and no byte is handed out."""
    store = CountingStore(MemoryStore())
    store.put("k", held, mode=CREATE)
    wanted = _item("k", b"0123456789")
    if held.startswith(b"0123456789"):  # longer: only what was named is read, and it is right
        assert fetch(store, wanted).body == b"0123456789"
        assert store.traffic.received_bytes == 10
        return
    with pytest.raises(IntegrityError) as caught:
        list(fetch_all(store, [wanted]))
    assert caught.value.kind is Kind.DIGEST
    assert caught.value.key == "k"
    assert store.traffic.requests[Op.GET] == 2


def test_an_empty_object_is_not_read() -> None:
    """CASE S7: zero bytes are verified by size; an object that is not empty is none."""
    store = CountingStore(MemoryStore())
    store.put("empty", b"", mode=CREATE)
    store.put("full", b"x", mode=CREATE)
    assert fetch(store, _item("empty", b"")).body == b""
    assert Op.GET not in store.traffic.requests
    with pytest.raises(IntegrityError):
        fetch(store, _item("full", b""))


def test_the_first_failure_in_order_is_raised() -> None:
    """Objects before a missing one are handed out, then it is named."""
    store = MemoryStore()
    store.put("a", b"a", mode=CREATE)
    store.put("c", b"c", mode=CREATE)
    bodies = fetch_all(store, [_item(key, key.encode()) for key in "abc"])
    assert next(bodies).body == b"a"
    with pytest.raises(NotFoundError) as caught:
        next(bodies)
    assert caught.value.key == "b"


@pytest.mark.parametrize(("size_bytes", "sha256"), [(-1, "0" * 64), (1, "0" * 63), (1, "Z" * 64)])
def test_an_item_that_cannot_be_verified_is_refused(size_bytes: int, sha256: str) -> None:
    """Sizes and digests from a manifest are checked before anything is read."""
    with pytest.raises(InvalidInputError):
        FetchItem("k", size_bytes, sha256)


def test_submitted_bodies_are_stored() -> None:
    """Each future says what its put did."""
    store = MemoryStore()
    with Uploader(streams=3) as uploader:
        futures = [uploader.submit(store, f"k{n % 5}", b"x", CREATE) for n in range(10)]
    outcomes = [future.result() for future in futures]
    assert outcomes.count(PutOutcome.WRITTEN) == 5
    assert outcomes.count(PutOutcome.ALREADY_OURS) == 5
    assert uploader.pending_bytes == 0


def test_failures_are_in_the_futures() -> None:
    """CASE S13: a put that fails resolves its future with its error and disturbs no other."""
    store = FaultyStore(
        MemoryStore(),
        [
            fail_at(Op.PUT, 1, Fail(), key_contains="down"),
            fail_at(Op.PUT, 1, LoseResponse(), key_contains="lost"),
        ],
    )
    store.put("taken", b"theirs", mode=CREATE)
    with Uploader(streams=2) as uploader:
        futures = {
            key: uploader.submit(store, key, b"ours", CREATE)
            for key in ("down", "lost", "taken", "fine")
        }
    assert isinstance(futures["down"].exception(), StorageError)
    assert isinstance(futures["lost"].exception(), StorageError)
    assert isinstance(futures["taken"].exception(), ConflictError)
    assert futures["fine"].result() is PutOutcome.WRITTEN
    assert store.get("lost") == b"ours"


def test_bytes_are_told_when_they_arrive() -> None:
    """Every body is told when it is submitted; as done only the one whose put has not failed."""
    store = FaultyStore(MemoryStore(), [fail_at(Op.PUT, 1, Fail(), key_contains="down")])
    told: list[tuple[int, int]] = []
    with Uploader(streams=1, on_bytes=lambda done, more: told.append((done, more))) as uploader:
        uploader.submit(store, "down", b"1234567", CREATE)
        uploader.submit(store, "fine", b"12345", CREATE)
    assert sorted(told) == [(0, 5), (0, 7), (5, 0)]


def test_a_submit_above_the_limit_waits() -> None:
    """Pending bytes never pass the limit; room that becomes free lets the next one in."""
    store = _GateStore()
    with Uploader(streams=2, max_pending_bytes=100) as uploader, ThreadPoolExecutor(1) as other:
        uploader.submit(store, "a", b"x" * 60, CREATE)
        waiting = other.submit(uploader.submit, store, "b", b"x" * 60, CREATE)
        assert store.arrived.acquire(timeout=_WAIT_S)
        assert uploader.pending_bytes == 60
        assert not waiting.done()
        store.gate.set()
        assert waiting.result(_WAIT_S).result(_WAIT_S) is PutOutcome.WRITTEN


def test_a_body_above_the_limit_passes_alone() -> None:
    """A body larger than the limit is sent when nothing else is pending, not never."""
    with Uploader(streams=1, max_pending_bytes=10) as uploader:
        futures = [uploader.submit(MemoryStore(), "k", b"x" * 1000, CREATE) for _ in range(3)]
    assert all(future.result() is PutOutcome.WRITTEN for future in futures)


def test_cancel_resolves_what_has_not_started() -> None:
    """After cancel the puts in flight end, the others are cancelled, a waiting submit is told."""
    store = _GateStore()
    uploader = Uploader(streams=1, max_pending_bytes=100)
    running = uploader.submit(store, "a", b"x" * 50, CREATE)
    queued = uploader.submit(store, "b", b"x" * 50, CREATE)
    assert store.arrived.acquire(timeout=_WAIT_S)
    with ThreadPoolExecutor(1) as other:
        blocked = other.submit(uploader.submit, store, "c", b"x" * 50, CREATE)
        uploader.cancel()
        with pytest.raises(CancelledError):
            blocked.result(_WAIT_S)
    store.gate.set()
    uploader.close()
    assert running.result() is PutOutcome.WRITTEN
    assert queued.cancelled()
    assert uploader.pending_bytes == 0
    with pytest.raises(CancelledError):
        uploader.submit(store, "d", b"", CREATE)


def test_a_block_that_raises_cancels_the_rest() -> None:
    """Leaving the block by an exception sends nothing more, and waits for what is in flight."""
    store = _GateStore()
    futures: list[Future[PutOutcome]] = []

    def send_and_fail() -> None:
        with Uploader(streams=1) as uploader:
            futures.extend(uploader.submit(store, f"k{n}", b"x", CREATE) for n in range(5))
            assert store.arrived.acquire(timeout=_WAIT_S)
            store.gate.set()
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        send_and_fail()
    assert futures[0].result() is PutOutcome.WRITTEN
    assert all(future.done() for future in futures)


@pytest.mark.parametrize("settings", [{"streams": 0}, {"streams": 1000}, {"max_pending_bytes": 0}])
def test_impossible_limits_are_refused(settings: dict[str, int]) -> None:
    """No streams, or no room for a byte, is refused at once."""
    with pytest.raises(InvalidInputError):
        Uploader(**settings)
    if "streams" in settings:
        with pytest.raises(InvalidInputError):
            fetch_all(MemoryStore(), [], **settings)
