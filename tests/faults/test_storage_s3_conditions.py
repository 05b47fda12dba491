"""Stores that take a condition or a checksum and ignore it, as real requests: found, and named."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

import pytest

from deltastore.errors import IntegrityError, Kind, StorageError
from deltastore.storage.memory import MemoryStore
from deltastore.storage.probe import enable_checksums, probe_store, require_home
from deltastore.storage.s3 import S3Store
from deltastore.storage.s3_settings import S3Settings
from deltastore.storage.store import PutMode, PutOutcome
from deltastore.storage.transfer import FetchItem, fetch
from deltastore.storage.wrapper import StoreWrapper
from deltastore.testing.clock import FakeClock
from deltastore.testing.s3_proxy import FlipBit, Reply, S3Proxy, Strip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PART = 5 << 20
BODY = bytes(range(256)) * (PART // 256) + b"and a second part"
CREATE = PutMode.CREATE


@pytest.fixture
def moto_line(moto_endpoint: str) -> Iterator[S3Proxy]:
    """A line to moto, which checks no signature: headers may go missing on it."""
    with S3Proxy(moto_endpoint) as proxy:
        yield proxy


@pytest.fixture
def moto_store(moto_line: S3Proxy) -> Iterator[S3Store]:
    """A store behind it."""
    bucket = f"line-{secrets.token_hex(6)}"
    store = S3Store(
        S3Settings(
            bucket=bucket,
            endpoint_url=moto_line.endpoint,
            access_key="any",
            secret_key="any",
            part_bytes=PART,
        ),
        clock=FakeClock(),
    )
    store._calls.once(lambda client: client.create_bucket(Bucket=bucket))
    yield store
    store.close()


def test_a_server_that_ignores_create_only_is_no_home(
    moto_store: S3Store, moto_line: S3Proxy
) -> None:
    """CASE S2: a second trainer's version 7 would replace the first one's: refused by name."""
    moto_line.add("PUT", "", Strip("if-none-match"), times=999)
    assert moto_store.put("v7", b"theirs", mode=CREATE) is PutOutcome.WRITTEN
    assert moto_store.put("v7", b"ours", mode=CREATE) is PutOutcome.WRITTEN

    report = probe_store(moto_store, race_rounds=2)
    assert not report.create_only.ok
    assert not report.create_only_race.ok
    with pytest.raises(StorageError, match="cannot be the home") as caught:
        require_home(report)
    assert caught.value.kind is Kind.NO_CONDITIONAL_PUT
    assert "relay" in str(caught.value.hint)


def test_a_server_that_ignores_it_at_complete_only_may_be_home(
    moto_store: S3Store, moto_line: S3Proxy
) -> None:
    """CASE S2: the commit is a small put: what a completion ignores is said, and harms nothing."""
    moto_line.add("POST", "", Strip("if-none-match"), times=999)
    report = probe_store(moto_store, race_rounds=2, ask_more=True)
    assert not report.more["create_only_complete"].ok
    assert not report.more["create_only_complete_race"].ok
    assert report.may_be_home
    require_home(report)


def test_racing_completes_of_one_body_are_all_ours(moto_store: S3Store, moto_line: S3Proxy) -> None:
    """Bodies lie under names made of their content: where both win, both wrote the same bytes."""
    moto_line.add("POST", "", Strip("if-none-match"), times=999)
    for _ in range(2):
        assert moto_store.put("sha-of-body", BODY, mode=CREATE) in set(PutOutcome)
    assert moto_store.get("sha-of-body") == BODY


def test_a_server_that_ignores_checksums_is_named(moto_store: S3Store) -> None:
    """CASE S3: a store that takes a wrong checksum proves nothing by taking a right one."""
    report = probe_store(moto_store, race_rounds=1, ask_more=True)
    assert not report.more["checksums"].ok
    assert "wrong checksum is accepted" in report.more["checksums"].note


def test_a_server_that_refuses_checksums_is_named(
    open_s3: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    """CASE S3: a store that does not know the header is told apart from one that checks it."""
    proxy.add("PUT", "/checksum", Reply(501, "NotImplemented"), times=9)
    report = probe_store(open_s3(), race_rounds=1, ask_more=True)
    assert not report.more["checksums"].ok
    assert "501" in report.more["checksums"].note
    assert report.may_be_home


def test_a_reader_that_may_not_list_is_told_so(
    open_s3: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    """403 for an absent key is a finding of its own, with what to change."""
    proxy.add("GET", "/absent", Reply(403, "AccessDenied"))
    report = probe_store(open_s3(), race_rounds=1)
    assert not report.absent_is_404.ok
    assert "ListBucket" in report.absent_is_404.note


@pytest.mark.parametrize("size_bytes", [1000, len(BODY)])
def test_checksums_go_along_where_they_are_on(
    open_s3: Callable[..., S3Store], proxy: S3Proxy, size_bytes: int
) -> None:
    """CASE S3: with `checksums` every put and every part carries one, and a real server agrees."""
    store = open_s3(checksums=True)
    assert store.put("k", BODY[:size_bytes], mode=CREATE) is PutOutcome.WRITTEN
    assert store.get("k") == BODY[:size_bytes]
    bodies = [seen for seen in proxy.seen if seen.method == "PUT"]
    assert bodies
    assert all("x-amz-checksum-crc32" in seen.headers for seen in bodies)
    assert not any("aws-chunked" in seen.headers.get("content-encoding", "") for seen in bodies)


@pytest.mark.parametrize(("target", "size_bytes"), [("/k", 1000), ("partNumber=2", len(BODY))])
def test_bytes_damaged_on_their_way_are_sent_again(
    open_s3: Callable[..., S3Store], proxy: S3Proxy, target: str, size_bytes: int
) -> None:
    """With checksums a put whose body changed on the way is refused, and written by the retry."""
    store = open_s3()
    assert enable_checksums(StoreWrapper(store)).ok
    assert list(store.list("")) == []
    proxy.add("PUT", target, FlipBit(3, of_request=True))
    assert store.put("k", BODY[:size_bytes], mode=CREATE) is PutOutcome.WRITTEN
    assert store.get("k") == BODY[:size_bytes]
    assert sum(seen.method == "PUT" and target in seen.target for seen in proxy.seen) == 2


def test_bytes_damaged_on_their_way_are_found_by_the_reader(
    open_s3: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    """Without checksums the store keeps what arrived: the SHA-256 of the manifest does not hold."""
    store = open_s3()
    proxy.add("PUT", "/k", FlipBit(3, of_request=True))
    store.put("k", BODY[:1000], mode=CREATE)
    item = FetchItem("k", 1000, hashlib.sha256(BODY[:1000]).hexdigest())
    with pytest.raises(IntegrityError) as caught:
        fetch(store, item)
    assert caught.value.kind is Kind.DIGEST


def test_checksums_stay_off_where_they_are_not_checked(moto_store: S3Store) -> None:
    """CASE S3: what a store does not check is not sent: it may be refused at the next size."""
    assert not enable_checksums(moto_store).ok
    assert moto_store._calls.checksum(memoryview(b"x")) == {}
    assert not enable_checksums(MemoryStore()).ok
