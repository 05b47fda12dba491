"""Puts over a line that breaks: what the store holds decides, not what the client guesses."""

from __future__ import annotations

import hashlib
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from deltastore.errors import ConflictError, Kind, StorageError
from deltastore.storage.retry import RetrySchedule
from deltastore.storage.store import PutMode, PutOutcome
from deltastore.storage.transfer import Uploader
from deltastore.storage.url import open_store
from deltastore.testing.clock import FakeClock
from deltastore.testing.s3_proxy import Before, DropRequest, DropResponse, Reply, S3Proxy

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.storage.s3 import S3Store
    from deltastore.testing.servers import SeaweedServer

MIB = 1 << 20
PART = 5 * MIB
BODY = bytes(range(256)) * (PART // 256) + b"and a second part"
CREATE, OVERWRITE = PutMode.CREATE, PutMode.OVERWRITE
COMPLETE = "uploadId="


def _uploads(server: SeaweedServer, bucket: str) -> list[object]:
    client = server.client()
    try:
        return list(client.list_multipart_uploads(Bucket=bucket).get("Uploads", ()))
    finally:
        client.close()


def _sent(proxy: S3Proxy, method: str, contains: str = "") -> int:
    return sum(s.method == method and contains in s.target for s in proxy.seen)


def test_a_create_whose_answer_was_lost_is_ours(s3_store: S3Store, proxy: S3Proxy) -> None:
    """CASE S1: the put landed, its answer did not: the retry meets 412 and reads back."""
    proxy.add("PUT", "/k", DropResponse())
    assert s3_store.put("k", b"body", mode=CREATE) is PutOutcome.ALREADY_OURS
    assert _sent(proxy, "PUT") == 2
    assert s3_store.get("k") == b"body"


def test_a_create_that_never_arrived_is_written_by_the_retry(
    s3_store: S3Store, proxy: S3Proxy
) -> None:
    """CASE S1: a request that broke on the way is sent again."""
    proxy.add("PUT", "/k", DropRequest(), times=3)
    assert s3_store.put("k", b"body", mode=CREATE) is PutOutcome.WRITTEN


def test_a_rival_between_two_tries_is_a_conflict(
    s3_store: S3Store, proxy: S3Proxy, open_s3: Callable[..., S3Store], s3_server: SeaweedServer
) -> None:
    """CASE S1: our put broke, somebody else wrote meanwhile: a conflict, and their bytes stay."""
    rival = open_s3(endpoint_url=s3_server.endpoint)
    proxy.add("PUT", "/k", DropRequest())
    proxy.add("PUT", "/k", Before(lambda: _put(rival, b"theirs")), nth=2)
    with pytest.raises(ConflictError) as caught:
        s3_store.put("k", b"ours", mode=CREATE)
    assert caught.value.kind is Kind.OBJECT_EXISTS
    assert s3_store.get("k") == b"theirs"


def _put(store: S3Store, body: bytes) -> None:
    store.put("k", body, mode=CREATE)


def test_a_409_is_tried_again(s3_store: S3Store, proxy: S3Proxy) -> None:
    """CASE S1: 409 says that another conditional request is in progress, not that we lost."""
    proxy.add("PUT", "/k", Reply(409, "ConditionalRequestConflict"), times=2)
    assert s3_store.put("k", b"body", mode=CREATE) is PutOutcome.WRITTEN


@pytest.mark.parametrize("size_bytes", [100, len(BODY)])
def test_a_lost_overwrite_is_written_again(
    s3_store: S3Store, proxy: S3Proxy, size_bytes: int
) -> None:
    """An overwrite with a lost answer ends with its bytes in place, small or in parts."""
    proxy.add(
        "POST" if size_bytes > PART else "PUT",
        "/k?" if size_bytes > PART else "/k",
        DropResponse(),
        nth=2 if size_bytes > PART else 1,
    )
    s3_store.put("k", b"old", mode=OVERWRITE)
    s3_store.put("k", BODY[:size_bytes], mode=OVERWRITE)
    assert s3_store.get("k") == BODY[:size_bytes]


def test_a_store_without_conditional_puts_is_named(s3_store: S3Store, proxy: S3Proxy) -> None:
    """A store that answers If-None-Match with 501 gives no_conditional_put, at once."""
    proxy.add("PUT", "/k", Reply(501, "NotImplemented"), times=9)
    with pytest.raises(StorageError) as caught:
        s3_store.put("k", b"body", mode=CREATE)
    assert caught.value.kind is Kind.NO_CONDITIONAL_PUT
    assert _sent(proxy, "PUT") == 1


@pytest.mark.parametrize(
    "action",
    [
        DropResponse(),
        Reply(200, "InternalError", forwarded=True),
        Reply(500, "InternalError", forwarded=True),
        Reply(503, "SlowDown", forwarded=True),
    ],
)
def test_a_complete_that_landed_unheard_is_ours(
    s3_store: S3Store, proxy: S3Proxy, action: DropResponse | Reply
) -> None:
    """CASE S4: lost, 200 with <Error>, 5xx after success: reading decides, nothing is aborted."""
    proxy.add("POST", COMPLETE, action)
    assert s3_store.put("k", BODY, mode=CREATE) is PutOutcome.ALREADY_OURS
    assert s3_store.get("k") == BODY
    assert not any(seen.is_abort for seen in proxy.seen)


@pytest.mark.parametrize(
    "action", [DropRequest(), Reply(200, "InternalError"), Reply(500, "InternalError")]
)
def test_a_complete_that_did_not_land_is_sent_again(
    s3_store: S3Store, proxy: S3Proxy, action: DropRequest | Reply
) -> None:
    """CASE S4: the same failures before the server acted: the second complete writes the object."""
    proxy.add("POST", COMPLETE, action)
    assert s3_store.put("k", BODY, mode=CREATE) is PutOutcome.WRITTEN
    assert s3_store.get("k") == BODY
    assert not any(seen.is_abort for seen in proxy.seen)


def test_no_such_upload_after_a_lost_success_is_ours(s3_store: S3Store, proxy: S3Proxy) -> None:
    """CASE S4: a read that fails too, then NoSuchUpload on the retry: the object decides."""
    proxy.add("POST", COMPLETE, DropResponse())
    proxy.add("HEAD", "/k", DropRequest(), nth=2)  # 1: before the upload, 2: after the complete
    proxy.add("POST", COMPLETE, Reply(404, "NoSuchUpload"), nth=2)
    assert s3_store.put("k", BODY, mode=CREATE) is PutOutcome.ALREADY_OURS


def test_a_complete_that_stays_unclear_is_never_aborted(s3_store: S3Store, proxy: S3Proxy) -> None:
    """CASE S4: when the store never says, the error is retryable and the upload is left alone."""
    proxy.add("POST", COMPLETE, Reply(500, "InternalError"), times=99)
    with pytest.raises(StorageError) as caught:
        s3_store.put("k", BODY, mode=CREATE)
    assert caught.value.kind is Kind.UNAVAILABLE
    assert not any(seen.is_abort for seen in proxy.seen)


def test_a_complete_onto_foreign_bytes_is_a_conflict(
    s3_store: S3Store,
    proxy: S3Proxy,
    open_s3: Callable[..., S3Store],
    s3_server: SeaweedServer,
    s3_bucket: str,
) -> None:
    """A rival that wrote during our upload wins; our parts are removed."""
    rival = open_s3(endpoint_url=s3_server.endpoint)
    proxy.add("POST", COMPLETE, Before(lambda: _put(rival, b"theirs")))
    with pytest.raises(ConflictError):
        s3_store.put("k", BODY, mode=CREATE)
    assert s3_store.get("k") == b"theirs"
    assert _uploads(s3_server, s3_bucket) == []


def test_a_409_at_complete_begins_the_upload_again(s3_store: S3Store, proxy: S3Proxy) -> None:
    """CASE S1: as AWS asks, every part is sent again under a new upload; the old one is gone."""
    proxy.add("POST", COMPLETE, Reply(409, "ConditionalRequestConflict"))
    assert s3_store.put("k", BODY, mode=CREATE) is PutOutcome.WRITTEN
    assert sum(seen.is_part for seen in proxy.seen) == 4
    assert sum(seen.is_abort for seen in proxy.seen) == 1
    assert s3_store.get("k") == BODY


def test_a_409_for_ever_is_an_error(s3_store: S3Store, proxy: S3Proxy) -> None:
    """CASE S1: uploads that always meet 409 end, by name, with nothing left behind."""
    proxy.add("POST", COMPLETE, Reply(409, "ConditionalRequestConflict"), times=99)
    with pytest.raises(StorageError, match="answered 3 uploads with 409") as caught:
        s3_store.put("k", BODY, mode=CREATE)
    assert caught.value.kind is Kind.UNAVAILABLE
    assert sum(seen.is_abort for seen in proxy.seen) == 3


def test_an_upload_that_somebody_removed_says_so(s3_store: S3Store, proxy: S3Proxy) -> None:
    """An upload that a lifecycle rule took away is refused by name, not retried for ever."""
    proxy.add("POST", COMPLETE, Reply(404, "NoSuchUpload"), times=99)
    with pytest.raises(StorageError, match="removed before it was complete") as caught:
        s3_store.put("k", BODY, mode=CREATE)
    assert caught.value.kind is Kind.REFUSED


@pytest.mark.parametrize("part", ["partNumber=1", "partNumber=2"])
def test_a_part_that_fails_for_good_leaves_nothing(
    s3_store: S3Store, proxy: S3Proxy, s3_server: SeaweedServer, s3_bucket: str, part: str
) -> None:
    """CASE S14: the upload is aborted, so that no part is billed."""
    proxy.add("PUT", part, Reply(400, "EntityTooSmall"), times=99)
    with pytest.raises(StorageError) as caught:
        s3_store.put("k", BODY, mode=CREATE)
    assert caught.value.kind is Kind.REFUSED
    assert sum(seen.is_abort for seen in proxy.seen) == 1
    assert _uploads(s3_server, s3_bucket) == []


def test_a_part_without_a_tag_is_refused(s3_store: S3Store, proxy: S3Proxy) -> None:
    """A store that takes a part and names no tag cannot complete: said at once, and aborted."""
    proxy.add("PUT", "partNumber=2", Reply(200), times=99)
    with pytest.raises(StorageError, match="gave no tag") as caught:
        s3_store.put("k", BODY, mode=CREATE)
    assert caught.value.kind is Kind.REFUSED
    assert sum(seen.is_abort for seen in proxy.seen) == 1


def test_an_abort_that_fails_is_noted_on_the_error(s3_store: S3Store, proxy: S3Proxy) -> None:
    """CASE S14: parts that stay behind are named in the error, which stays the first one."""
    proxy.add("PUT", "partNumber=2", Reply(400, "EntityTooSmall"), times=99)
    proxy.add("DELETE", COMPLETE, Reply(403, "AccessDenied"), times=99)
    with pytest.raises(StorageError, match="EntityTooSmall") as caught:
        s3_store.put("k", BODY, mode=CREATE)
    assert any("is left behind" in note for note in caught.value.__notes__)


def test_credentials_that_expire_mid_upload_end_it_cleanly(
    s3_store: S3Store, proxy: S3Proxy
) -> None:
    """CASE S13: an expired session aborts, says so, and resolves every future."""
    proxy.add("PUT", "partNumber=2", Reply(400, "ExpiredToken", "The token expired"), times=99)
    with Uploader(streams=2) as uploader:
        futures = [uploader.submit(s3_store, key, BODY, CREATE) for key in ("k", "other")]
    for future in futures:
        assert future.done()
        failure = future.exception()
        assert isinstance(failure, StorageError)
        assert failure.kind is Kind.CREDENTIALS
        assert "renew it" in str(failure)
    assert sum(seen.is_abort for seen in proxy.seen) == 2


def test_parts_are_equal_and_every_part_is_sent_once(s3_store: S3Store, proxy: S3Proxy) -> None:
    """CASE S5: all parts but the last have one size."""
    s3_store.put("k", BODY[:PART] + BODY, mode=CREATE)
    sizes = [seen.body_bytes for seen in proxy.seen if seen.is_part]
    assert sorted(sizes, reverse=True) == [PART, PART, len(BODY) - PART]


def test_parts_that_break_are_sent_again(s3_store: S3Store, proxy: S3Proxy) -> None:
    """A part whose request or answer is lost is repeated, alone."""
    proxy.add("PUT", "partNumber=1", DropRequest())
    proxy.add("PUT", "partNumber=2", DropResponse())
    assert s3_store.put("k", BODY, mode=CREATE) is PutOutcome.WRITTEN
    assert sum(seen.is_part for seen in proxy.seen) == 4
    assert s3_store.get("k") == BODY


def test_a_tag_is_not_taken_for_a_digest(
    s3_store: S3Store, open_s3: Callable[..., S3Store]
) -> None:
    """CASE S17: the same bytes cut otherwise have another tag, and are still ours."""
    s3_store.put("k", BODY, mode=CREATE)
    assert str(s3_store.head("k").etag).strip('"') != hashlib.md5(BODY).hexdigest()
    whole = open_s3(part_bytes=2 * PART)
    assert whole.put("k", BODY, mode=CREATE) is PutOutcome.ALREADY_OURS
    whole.put("other", BODY, mode=CREATE)
    assert whole.head("other").etag != whole.head("k").etag


def test_an_empty_object_is_one_plain_put(s3_store: S3Store, proxy: S3Proxy) -> None:
    """CASE S7: no multipart upload; that no range can be read of it says that it is empty."""
    s3_store.put("k", b"", mode=CREATE)
    assert s3_store.get("k") == b""
    seen = [(s.method, "?" in s.target) for s in proxy.seen]
    assert seen == [("PUT", False), ("GET", False), ("HEAD", False)]


@pytest.mark.parametrize("size_bytes", [1000, len(BODY)])
def test_no_checksum_that_other_stores_refuse_is_sent(
    s3_store: S3Store, proxy: S3Proxy, size_bytes: int
) -> None:
    """CASE S3: below and above the part size no checksum header or chunked body is sent."""
    s3_store.put("k", BODY[:size_bytes], mode=CREATE)
    s3_store.get("k")
    for seen in proxy.seen:
        names = " ".join(seen.headers)
        assert "x-amz-checksum" not in names
        assert "x-amz-sdk-checksum" not in names
        assert "x-amz-trailer" not in names
        assert "aws-chunked" not in seen.headers.get("content-encoding", "")


def test_slow_down_is_waited_out_with_jitter(
    open_s3: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    """CASE S11: 503s are retried after growing, jittered waits that a Clock takes."""
    clock = FakeClock()
    store = open_s3(clock, retry=RetrySchedule(attempts=6, base_s=1.0, cap_s=8.0))
    proxy.add("PUT", "/k", Reply(503, "SlowDown"), times=5)
    assert store.put("k", b"x", mode=CREATE) is PutOutcome.WRITTEN
    assert len(clock.slept_s) == 5
    assert all(0 <= s <= cap for s, cap in zip(clock.slept_s, (1, 2, 4, 8, 8), strict=True))
    assert len(set(clock.slept_s)) == 5


def test_slow_down_for_ever_is_an_error_with_a_name(s3_store: S3Store, proxy: S3Proxy) -> None:
    """CASE S11: after the schedule the caller hears `throttled`, with the way out."""
    proxy.add("PUT", "/k", Reply(503, "SlowDown"), times=99)
    with pytest.raises(StorageError) as caught:
        s3_store.put("k", b"x", mode=CREATE)
    assert caught.value.kind is Kind.THROTTLED
    assert "streams" in str(caught.value.hint)
    assert _sent(proxy, "PUT") == RetrySchedule().throttled_attempts


def test_a_large_put_copies_no_more_than_its_parts_in_flight(
    open_s3: Callable[..., S3Store], s3_server: SeaweedServer
) -> None:
    """CASE S20: sending 60 MiB takes at most the parts in flight, not the body again."""
    store = open_s3(endpoint_url=s3_server.endpoint)
    body = memoryview(bytearray(60 * MIB))
    store.put("warm", b"x", mode=CREATE)
    tracemalloc.start()
    try:
        store.put("k", body, mode=CREATE)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes <= 2 * PART + 4 * MIB


def test_retries_are_told_with_their_cause(
    s3_server: SeaweedServer, s3_bucket: str, proxy: S3Proxy
) -> None:
    """Whoever asked is told of every request that is made again, and why; successes are silent."""
    told: list[Kind] = []
    store = open_store(
        f"s3://{s3_bucket}",
        endpoint_url=proxy.endpoint,
        access_key=s3_server.access_key,
        secret_key=s3_server.secret_key,
        clock=FakeClock(),
        on_retry=lambda err: told.append(err.kind),
    )
    proxy.add("PUT", "/k", Reply(503, "SlowDown"), times=2)
    store.put("k", b"body", mode=PutMode.CREATE)
    assert store.get("k") == b"body"
    store.close()
    assert told == [Kind.THROTTLED, Kind.THROTTLED]
