"""Reads over a line that breaks, many threads, a fork, a dead server: whole bytes or a name."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from deltastore.clock import SystemClock
from deltastore.errors import DeltastoreError, InvalidInputError, Kind, NotFoundError, StorageError
from deltastore.storage.retry import RetrySchedule
from deltastore.storage.store import ByteRange, PutMode
from deltastore.testing.s3_proxy import Before, CutBody, DropRequest, DropResponse, Reply
from deltastore.testing.servers import SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deltastore.storage.s3 import S3Store
    from deltastore.testing.s3_proxy import S3Proxy

PART = 5 << 20
BODY = bytes(range(256)) * (PART // 256) + b"and a second part"
CREATE, OVERWRITE = PutMode.CREATE, PutMode.OVERWRITE


def test_a_broken_read_goes_on_where_it_broke(s3_store: S3Store, proxy: S3Proxy) -> None:
    """A body that breaks off is resumed from its last byte, on the same object, not read again."""
    body = bytes(range(256)) * 8000
    s3_store.put("k", body, mode=CREATE)
    proxy.add("GET", "/k", CutBody(1_500_000))
    assert s3_store.get("k") == body
    first, second = (seen.headers for seen in proxy.seen if seen.method == "GET")
    assert first["range"] == f"bytes=0-{PART - 1}"
    start = int(second["range"].removeprefix("bytes=").split("-")[0])
    assert 1 << 20 <= start <= 1_500_000
    assert "if-match" in second


def test_a_read_that_gets_on_outlives_its_schedule(
    open_s3: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    """Breaks that each let some bytes through do not count as failures in a row."""
    store = open_s3(retry=RetrySchedule(attempts=2, base_s=0.0))
    body = bytes(range(256)) * 24_000  # six MiB: in two parts
    store.put("k", body, mode=CREATE)
    proxy.add("GET", "/k", CutBody(1 << 20), times=4)
    assert store.get("k") == body


def test_a_read_that_gets_nowhere_ends(s3_store: S3Store, proxy: S3Proxy) -> None:
    """A body of which nothing ever comes is given up after the schedule, by name."""
    s3_store.put("k", b"x" * 1000, mode=CREATE)
    proxy.add("GET", "/k", CutBody(0), times=99)
    with pytest.raises(StorageError) as caught:
        s3_store.get("k")
    assert caught.value.kind is Kind.UNAVAILABLE
    # The first response, then as many as the schedule allows.
    assert len([s for s in proxy.seen if s.method == "GET"]) == RetrySchedule().attempts


def test_parts_of_a_large_read_break_alone(s3_store: S3Store, proxy: S3Proxy) -> None:
    """Each range of a large object is retried by itself."""
    s3_store.put("k", BODY, mode=CREATE)
    proxy.add("GET", "/k", CutBody(3 << 20))
    proxy.add("GET", "/k", DropRequest(), nth=2)
    proxy.add("GET", "/k", DropResponse(), nth=3)
    assert s3_store.get("k") == BODY


def test_an_object_replaced_while_it_is_read_is_never_mixed(
    s3_store: S3Store, proxy: S3Proxy, open_s3: Callable[..., S3Store], s3_server: SeaweedServer
) -> None:
    """A read that finds another object half way starts again and returns only the new bytes."""
    rival = open_s3(endpoint_url=s3_server.endpoint)
    other = BODY[::-1]
    s3_store.put("k", BODY, mode=OVERWRITE)
    proxy.add("GET", "/k", CutBody(1000))
    proxy.add("GET", "/k", Before(lambda: _overwrite(rival, other)), nth=2)
    assert s3_store.get("k") == other


def _overwrite(store: S3Store, body: bytes) -> None:
    store.put("k", body, mode=OVERWRITE)


def test_an_object_replaced_all_the_time_ends_the_read(s3_store: S3Store, proxy: S3Proxy) -> None:
    """A read that keeps finding another object is an error, not a loop."""
    s3_store.put("k", BODY, mode=OVERWRITE)
    for nth in (1, 3, 5):
        proxy.add("GET", "/k", CutBody(0), nth=nth)
    proxy.add("GET", "/k", Reply(412, "PreconditionFailed"), times=99, nth=2)
    with pytest.raises(StorageError) as caught:
        s3_store.get("k")
    assert caught.value.kind in {Kind.UNAVAILABLE, Kind.REFUSED}


def test_a_store_that_ignores_ranges_is_named(s3_store: S3Store, proxy: S3Proxy) -> None:
    """An answer without a Content-Range to a ranged read is refused, not taken for the range."""
    s3_store.put("k", b"0123456789", mode=CREATE)
    proxy.add("GET", "/k", Reply(200), times=99)
    with pytest.raises(StorageError, match="does not serve ranges") as caught:
        s3_store.get("k", ByteRange(2, 4))
    assert caught.value.kind is Kind.REFUSED


def test_no_more_connections_than_allowed(
    open_s3: Callable[..., S3Store], proxy: S3Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """CASE S10: forty threads share four connections; urllib3 throws none away, nor warns."""
    store = open_s3(max_connections=4)
    store.put("k", b"x" * 10_000, mode=CREATE)
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(40) as pool:
        bodies = list(pool.map(lambda _: store.get("k"), range(80)))
    assert all(body == b"x" * 10_000 for body in bodies)
    assert proxy.most_in_flight <= 4
    assert not [record for record in caplog.records if "urllib3" in record.name]


def test_a_version_from_another_process_is_seen(
    s3_store: S3Store, open_s3: Callable[..., S3Store]
) -> None:
    """CASE S8: neither a listing nor an absence is cached between two clients."""
    other = open_s3()
    with pytest.raises(NotFoundError):
        s3_store.get("v/0000000001")
    assert list(s3_store.list("v/")) == []
    other.put("v/0000000001", b"x", mode=CREATE)
    assert s3_store.get("v/0000000001") == b"x"
    assert [info.key for info in s3_store.list("v/")] == ["v/0000000001"]


def test_a_missing_bucket_has_a_name(open_s3: Callable[..., S3Store]) -> None:
    """Every call on a bucket that is not there says so, with its name and the way out."""
    store = open_s3(bucket="no-such-bucket")
    for call in ("put", "get", "list", "delete"):
        with pytest.raises(NotFoundError, match="no-such-bucket") as caught:
            _do(store, call)
        assert caught.value.kind is Kind.BUCKET_MISSING
        assert caught.value.hint


@pytest.mark.parametrize("wrong", ["access_key", "secret_key"])
def test_wrong_credentials_have_a_name(open_s3: Callable[..., S3Store], wrong: str) -> None:
    """CASE S13: a wrong key or secret is refused at once, and neither is in the message."""
    store = open_s3(**{wrong: "not-the-right-one"})
    for call in ("put", "get", "head", "list", "delete"):
        with pytest.raises(StorageError) as caught:
            _do(store, call)
        assert caught.value.kind is Kind.CREDENTIALS
        assert caught.value.hint
        assert "not-the-right-one" not in str(caught.value)
        assert "deltastore-test-secret" not in f"{caught.value} {store!r} {store._settings!r}"


def _do(store: S3Store, call: str) -> None:
    if call == "put":
        store.put("k", b"x", mode=CREATE)
    elif call == "list":
        list(store.list(""))
    elif call == "delete":
        store.delete(["k"])
    else:
        getattr(store, call)("k")


def test_what_the_store_says_gets_a_kind_and_a_hint(s3_store: S3Store, proxy: S3Proxy) -> None:
    """CASE S12: a skewed clock and every other refusal is a named error with the way out."""
    for reply, kind, hint in (
        (Reply(403, "RequestTimeTooSkewed"), Kind.CLOCK_SKEW, "NTP"),
        (Reply(403, "AccessDenied"), Kind.CREDENTIALS, "ListBucket"),
        (Reply(400, "ExpiredToken"), Kind.CREDENTIALS, "renew"),
        (Reply(301, "PermanentRedirect"), Kind.SETTING, "region"),
        (Reply(400, "AuthorizationHeaderMalformed"), Kind.SETTING, "region"),
        (Reply(429, "TooManyRequests"), Kind.THROTTLED, "streams"),
        (Reply(400, "RequestTimeout"), Kind.TIMEOUT, ""),
        (Reply(500, "InternalError"), Kind.UNAVAILABLE, ""),
        (Reply(400, "InvalidRequest"), Kind.REFUSED, "PROVIDERS"),
    ):
        proxy.forget()
        proxy.add("GET", "/k", reply, times=99)
        with pytest.raises(DeltastoreError) as caught:
            s3_store.get("k")
        assert (caught.value.kind, caught.value.key) == (kind, "k")
        assert hint in str(caught.value.hint or "")


def test_a_listing_without_end_is_refused(s3_store: S3Store, proxy: S3Proxy) -> None:
    """A store that answers a listing with nonsense is an error, not a loop."""
    proxy.add("GET", "list-type=2", Reply(500, "InternalError"), times=99)
    with pytest.raises(StorageError):
        list(s3_store.list(""))


def test_a_store_without_batch_deletion_still_deletes(s3_store: S3Store, proxy: S3Proxy) -> None:
    """Where DeleteObjects is refused, objects are deleted one by one."""
    for key in ("a", "b"):
        s3_store.put(key, b"x", mode=CREATE)
    proxy.add("POST", "delete", Reply(501, "NotImplemented"))
    s3_store.delete(["a", "b", "absent"])
    assert list(s3_store.list("")) == []


def test_a_server_that_died_is_unavailable_until_it_is_back(
    open_s3: Callable[..., S3Store], tmp_path: Path
) -> None:
    """A killed server gives a named error that says where; once back, the same store works on."""
    with SeaweedServer(tmp_path) as server:
        server.create_bucket("bucket")
        store = open_s3(
            bucket="bucket",
            endpoint_url=server.endpoint,
            access_key=server.access_key,
            secret_key=server.secret_key,
        )
        store.put("k", b"acknowledged", mode=CREATE)
        server.kill()
        with pytest.raises(StorageError, match=server.endpoint) as caught:
            store.get("k")
        assert caught.value.kind is Kind.UNAVAILABLE
        server.restart()
        assert store.get("k") == b"acknowledged"
        server.kill()


def test_a_server_that_hangs_is_a_timeout(open_s3: Callable[..., S3Store], proxy: S3Proxy) -> None:
    """A server that takes the request and says nothing is given up after `read_timeout_s`."""
    store = open_s3(read_timeout_s=0.2, retry=RetrySchedule(attempts=2, base_s=0.0))
    clock = SystemClock()
    proxy.add("GET", "/k", Before(lambda: clock.sleep_s(0.5)), times=99)
    with pytest.raises(StorageError) as caught:
        store.get("k")
    assert caught.value.kind is Kind.TIMEOUT


def test_a_closed_store_says_so(s3_store: S3Store) -> None:
    """A call after close is an error of ours, not of some socket."""
    s3_store.put("k", b"x", mode=CREATE)
    s3_store.close()
    with pytest.raises(StorageError, match="was closed"):
        s3_store.get("k")


def test_a_profile_that_is_not_there_is_a_setting(open_s3: Callable[..., S3Store]) -> None:
    """A mistyped profile is told apart from a network that does not answer."""
    store = open_s3(profile="no-such-profile", access_key=None, secret_key=None)
    with pytest.raises(InvalidInputError, match="no-such-profile") as caught:
        store.get("k")
    assert caught.value.kind is Kind.SETTING
