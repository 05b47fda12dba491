"""Lines that are slow, stand still, or break at any byte: whole bytes in the end, or a name."""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING

import pytest

from deltastore.errors import IntegrityError, Kind, NotFoundError, StorageError
from deltastore.storage.retry import RetrySchedule
from deltastore.storage.s3_body import BodyTooSlowError, TimedBody
from deltastore.storage.store import ByteRange, PutMode, PutOutcome
from deltastore.storage.transfer import FetchItem, fetch, fetch_all
from deltastore.testing.clock import FakeClock
from deltastore.testing.s3_proxy import (
    CutBody,
    CutRequest,
    DropResponse,
    FlipBit,
    ReadSlowly,
    Reply,
    S3Proxy,
    Stall,
    Twice,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.storage.s3 import S3Store
    from deltastore.testing.s3_proxy import ProxyAction
    from deltastore.testing.servers import SeaweedServer

PART = 5 << 20
BODY = bytes(range(256)) * (PART // 256) + b"and a second part"
SMALL = bytes(range(256)) * 800
CREATE, OVERWRITE = PutMode.CREATE, PutMode.OVERWRITE


def _item(key: str, body: bytes) -> FetchItem:
    return FetchItem(key, len(body), hashlib.sha256(body).hexdigest())


@pytest.mark.parametrize("at_byte", [0, 1, 65_536, 200_000, len(SMALL) - 1])
@pytest.mark.parametrize("reset", [False, True])
def test_a_read_that_breaks_at_byte_k_is_whole(
    s3_store: S3Store, proxy: S3Proxy, at_byte: int, reset: bool
) -> None:
    """Ended or reset after byte k of the answer: the rest is read, and every bit is right."""
    s3_store.put("k", SMALL, mode=CREATE)
    proxy.add("GET", "/k", CutBody(at_byte, reset=reset))
    assert s3_store.get("k") == SMALL
    assert s3_store.get("k", ByteRange(100, 150_000)) == SMALL[100:150_000]


@pytest.mark.parametrize("at_byte", [0, 1, 65_536, len(SMALL) - 1])
def test_a_put_that_is_reset_at_byte_k_is_sent_again(
    s3_store: S3Store, proxy: S3Proxy, at_byte: int
) -> None:
    """Reset after byte k of the request: the object is not there, then it is, whole."""
    proxy.add("PUT", "/k", CutRequest(at_byte))
    assert s3_store.put("k", SMALL, mode=CREATE) is PutOutcome.WRITTEN
    assert s3_store.get("k") == SMALL


@pytest.mark.parametrize("at_byte", [0, 1 << 20, PART - 1])
def test_a_part_that_is_reset_at_byte_k_is_sent_again(
    s3_store: S3Store, proxy: S3Proxy, at_byte: int
) -> None:
    """Reset after byte k of a part: that part alone goes again."""
    proxy.add("PUT", "partNumber=1", CutRequest(at_byte))
    assert s3_store.put("k", BODY, mode=CREATE) is PutOutcome.WRITTEN
    assert s3_store.get("k") == BODY
    assert sum(seen.is_part for seen in proxy.seen) == 3


@pytest.mark.parametrize(
    ("method", "contains", "nth"),
    [
        ("PUT", "/k", 1),
        ("POST", "/k?uploads", 1),
        ("PUT", "partNumber=1", 1),
        ("PUT", "partNumber=2", 1),
        ("POST", "uploadId=", 1),
        ("DELETE", "uploadId=", 1),
        ("POST", "delete", 1),
    ],
)
def test_every_write_survives_the_loss_of_its_answer(
    s3_store: S3Store, proxy: S3Proxy, method: str, contains: str, nth: int
) -> None:
    """CASE S1, S4: whichever write is carried out unheard, the next look shows one whole object."""
    proxy.add(method, contains, DropResponse(), nth=nth)
    body = SMALL if contains == "/k" else BODY
    assert s3_store.put("k", body, mode=CREATE) in set(PutOutcome)
    assert s3_store.get("k") == body
    if method == "DELETE":  # an upload that is given up: its abort is heard of only the second time
        proxy.add("PUT", "partNumber=1", Reply(400, "EntityTooSmall"))
        with pytest.raises(StorageError):
            s3_store.put("other", BODY, mode=CREATE)
        assert list(s3_store.incomplete_uploads("other")) == []
    s3_store.delete(["k"])
    with pytest.raises(NotFoundError):
        s3_store.head("k")


def test_a_complete_that_arrives_twice_is_one_object(s3_store: S3Store, proxy: S3Proxy) -> None:
    """CASE S4: a request repeated on the way: the second answer is heard, the object is ours."""
    proxy.add("POST", "uploadId=", Twice())
    assert s3_store.put("k", BODY, mode=CREATE) in set(PutOutcome)
    assert s3_store.get("k") == BODY
    assert list(s3_store.incomplete_uploads("")) == []


def test_a_create_that_arrives_twice_is_ours(s3_store: S3Store, proxy: S3Proxy) -> None:
    """CASE S1: the second copy of our own put meets 412: read back, it is ours."""
    proxy.add("PUT", "/k", Twice())
    assert s3_store.put("k", SMALL, mode=CREATE) is PutOutcome.ALREADY_OURS


@pytest.mark.parametrize("keep_bytes", [0, 100_000])
def test_a_read_that_stands_still_goes_on(
    open_s3: Callable[..., S3Store], proxy: S3Proxy, keep_bytes: int
) -> None:
    """An answer that stops is given up after `read_timeout_s`, and resumed where it stopped."""
    store = open_s3(read_timeout_s=0.3)
    store.put("k", SMALL, mode=CREATE)
    proxy.add("GET", "/k", Stall(keep_bytes))
    assert store.get("k") == SMALL
    assert len([seen for seen in proxy.seen if seen.method == "GET"]) == 2


def test_a_read_that_stands_still_for_ever_has_a_name(
    open_s3: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    """Nothing comes, time after time: the schedule ends, and the error says `timeout`."""
    store = open_s3(read_timeout_s=0.2, retry=RetrySchedule(attempts=3, base_s=0.0))
    store.put("k", SMALL, mode=CREATE)
    proxy.add("GET", "/k", Stall(0), times=99)
    with pytest.raises(StorageError) as caught:
        store.get("k")
    assert caught.value.kind is Kind.TIMEOUT


def test_a_slow_link_is_no_failure(open_s3: Callable[..., S3Store], proxy: S3Proxy) -> None:
    """CASE S12: a body that takes longer than the connect timeout passes, at the first try."""
    store = open_s3(connect_timeout_s=0.5, read_timeout_s=5.0, part_bytes=3 * PART)
    body = SMALL * 60
    proxy.add("PUT", "/k", ReadSlowly(8_000_000))
    assert store.put("k", body, mode=CREATE) is PutOutcome.WRITTEN
    assert len([seen for seen in proxy.seen if seen.method == "PUT"]) == 1
    assert store.get("k") == body


def test_a_part_that_would_outlive_its_signature_has_a_name(
    open_s3: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    """CASE S12: what is slower than the deadline ends as `timeout`, with what to change."""
    ticking = _TickingClock(seconds_per_look=10.0)
    store = open_s3(ticking, part_deadline_s=300.0, retry=RetrySchedule(attempts=2, base_s=0.0))
    with pytest.raises(StorageError, match="longer than 300 s") as caught:
        store.put("k", SMALL * 25, mode=CREATE)
    assert caught.value.kind is Kind.TIMEOUT
    assert "part_bytes" in str(caught.value.hint)
    assert list(store.incomplete_uploads("")) == []


class _TickingClock(FakeClock):
    """Time passes with every look at the clock: a slow link without waiting for one."""

    def __init__(self, seconds_per_look: float) -> None:
        super().__init__()
        self._seconds_per_look = seconds_per_look

    def monotonic_s(self) -> float:
        self.advance_s(self._seconds_per_look)
        return super().monotonic_s()


def test_a_timed_body_reads_like_a_file() -> None:
    """What the client does with it (sign, rewind, send) gives the same bytes each time."""
    clock = FakeClock()
    body = TimedBody(memoryview(SMALL), clock=clock, deadline_s=10.0)
    assert len(body) == len(SMALL)
    assert b"".join(iter(lambda: body.read(16_384), b"")) == SMALL
    assert (bytes(body.read(10)), body.tell()) == (b"", len(SMALL))
    assert body.seek(-5, 2) == len(SMALL) - 5
    assert body.read() == SMALL[-5:]
    assert body.seek(0) == 0
    assert bytes(body.read(3)) + bytes(body.read(None)) == SMALL
    body.seek(10)
    assert body.seek(5, 1) == 15
    clock.advance_s(10.1)
    with pytest.raises(BodyTooSlowError, match="15 of"):
        body.read(1)


def test_a_404_for_an_object_that_is_there_is_asked_again(
    s3_store: S3Store, proxy: S3Proxy
) -> None:
    """An object that a manifest names is looked for twice before it is called missing."""
    s3_store.put("k", SMALL, mode=CREATE)
    proxy.add("GET", "/k", Reply(404, "NoSuchKey"))
    assert fetch(s3_store, _item("k", SMALL)).body == SMALL
    proxy.add("GET", "/k", Reply(404, "NoSuchKey"), times=2)
    with pytest.raises(NotFoundError) as caught:
        fetch(s3_store, _item("k", SMALL))
    assert caught.value.kind is Kind.OBJECT_MISSING


def test_a_404_in_the_middle_of_a_read_back_is_asked_again(
    s3_store: S3Store, proxy: S3Proxy
) -> None:
    """CASE S1: 412, then 404 for the same key: neither conflict nor success until it is seen."""
    s3_store.put("k", SMALL, mode=CREATE)
    proxy.add("HEAD", "/k", Reply(404))
    assert s3_store.put("k", SMALL, mode=CREATE) is PutOutcome.ALREADY_OURS


@pytest.mark.parametrize("damage", [FlipBit(0), FlipBit(len(SMALL) - 1), CutBody(1000)])
def test_damaged_bodies_are_read_again(
    s3_store: S3Store, proxy: S3Proxy, damage: ProxyAction
) -> None:
    """CASE S17: our own SHA-256 finds a flipped bit; the second read is right."""
    s3_store.put("k", SMALL, mode=CREATE)
    proxy.add("GET", "/k", damage)
    assert fetch(s3_store, _item("k", SMALL)).body == SMALL


def test_a_body_that_stays_damaged_is_never_handed_out(s3_store: S3Store, proxy: S3Proxy) -> None:
    """Of many objects the damaged one is named, and those before it come whole and in order."""
    bodies = [bytes([n]) * 50_000 for n in range(6)]
    for number, body in enumerate(bodies):
        s3_store.put(f"o/{number}", body, mode=CREATE)
    proxy.add("GET", "/o/3", FlipBit(10), times=9)
    items = [_item(f"o/{number}", body) for number, body in enumerate(bodies)]
    got = []
    with pytest.raises(IntegrityError) as caught:
        got.extend(fetched.body for fetched in fetch_all(s3_store, items, streams=3))
    assert caught.value.key == "o/3"
    assert got == bodies[:3]


def test_the_loser_of_two_lines_reads_the_winner(
    open_s3: Callable[..., S3Store], proxy: S3Proxy, s3_server: SeaweedServer
) -> None:
    """CASE C7: two writers, both answers lost: one wins, the other hears of a conflict."""
    proxy.add("PUT", "/k", DropResponse(), times=2)
    stores = [open_s3(), open_s3()]
    outcomes: dict[int, object] = {}

    def write(number: int) -> None:
        try:
            outcomes[number] = stores[number].put("k", b"%d" % number * 100, mode=CREATE)
        except Exception as err:  # noqa: BLE001 - the test looks at what it is
            outcomes[number] = err

    threads = [threading.Thread(target=write, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = open_s3(endpoint_url=s3_server.endpoint).get("k")
    winner = int(held[:1])
    assert outcomes[winner] is PutOutcome.ALREADY_OURS
    assert getattr(outcomes[1 - winner], "kind", None) is Kind.OBJECT_EXISTS
