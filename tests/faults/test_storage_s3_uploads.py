"""Uploads that nobody will complete are found and removed; one that lives is left, however old."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deltastore.errors import InvalidInputError, StorageError
from deltastore.storage.memory import MemoryStore
from deltastore.storage.s3_uploads import S3Uploads
from deltastore.storage.store import PutMode, PutOutcome
from deltastore.storage.uploads import LEAST_IDLE_S, abort_idle_uploads, incomplete_uploads_of
from deltastore.storage.wrapper import StoreWrapper
from deltastore.testing.s3_proxy import Before, DateLater, DropResponse, Reply, S3Proxy

if TYPE_CHECKING:
    from deltastore.storage.s3 import S3Store
    from deltastore.testing.servers import SeaweedServer

PART = 5 << 20
BODY = bytes(range(256)) * (PART // 256) + b"and a second part"
DAY_S = 86_400.0
CREATE = PutMode.CREATE


def _begin(server: SeaweedServer, bucket: str, *keys: str) -> None:
    """As a client that then dies."""
    client = server.client()
    for key in keys:
        client.create_multipart_upload(Bucket=bucket, Key=key)
    client.close()


def _left(store: S3Store, prefix: str = "") -> list[str]:
    return sorted(upload.key for upload in store.incomplete_uploads(prefix))


def test_an_upload_left_behind_is_removed_by_age(
    s3_store: S3Store, proxy: S3Proxy, s3_server: SeaweedServer, s3_bucket: str
) -> None:
    """CASE S14: two days later by the store's clock it goes; an hour later, or on trial, not."""
    _begin(s3_server, s3_bucket, "r/deltas/1", "r/deltas/2", "other/1")
    store = StoreWrapper(s3_store)
    assert abort_idle_uploads(store, "r/", idle_s=DAY_S, dry_run=False) == ()

    proxy.add("GET", "uploadId=", DateLater(2 * DAY_S), times=99)
    tried = abort_idle_uploads(store, "r/", idle_s=DAY_S, dry_run=True)
    assert sorted(upload.key for upload in tried) == ["r/deltas/1", "r/deltas/2"]
    assert all(2 * DAY_S - 60 <= upload.idle_s <= 2 * DAY_S + 60 for upload in tried)
    assert len(_left(s3_store)) == 3

    done = abort_idle_uploads(store, "r/", idle_s=DAY_S, dry_run=False)
    assert sorted(u.upload_id for u in done) == sorted(u.upload_id for u in tried)
    assert _left(s3_store) == ["other/1"]


def test_an_upload_whose_parts_still_arrive_lives(
    s3_store: S3Store, proxy: S3Proxy, s3_server: SeaweedServer, s3_bucket: str
) -> None:
    """CASE S14: what counts is the newest part, not the day on which the upload began."""
    client = s3_server.client()
    upload = client.create_multipart_upload(Bucket=s3_bucket, Key="k")
    begun_s = next(iter(s3_store.incomplete_uploads(""))).started_s
    client.upload_part(
        Bucket=s3_bucket, Key="k", UploadId=upload["UploadId"], PartNumber=1, Body=b"x" * PART
    )
    client.close()
    # One request of the listing sees its upload a day after its begin, which was now.
    (found,) = s3_store.incomplete_uploads("")
    assert found.started_s == begun_s
    assert found.idle_s <= 60
    proxy.add("GET", "uploadId=", DateLater(DAY_S), times=1)
    (later,) = s3_store.incomplete_uploads("")
    assert DAY_S - 60 <= later.idle_s <= DAY_S + 60


def test_an_upload_of_this_process_is_never_removed(
    s3_store: S3Store, proxy: S3Proxy, s3_server: SeaweedServer, s3_bucket: str
) -> None:
    """CASE S14: the janitor in the trainer's own process passes the upload that is being made."""
    _begin(s3_server, s3_bucket, "dead")
    removed: list[str] = []

    def clean() -> None:
        gone = abort_idle_uploads(s3_store, "", idle_s=DAY_S, dry_run=False)
        removed.extend(upload.key for upload in gone)

    proxy.add("GET", "uploadId=", DateLater(2 * DAY_S), times=99)
    proxy.add("POST", "/live?uploadId=", Before(clean))
    assert s3_store.put("live", BODY, mode=CREATE) is PutOutcome.WRITTEN
    assert removed == ["dead"]
    assert s3_store.get("live") == BODY
    assert _left(s3_store) == []


def test_an_age_that_may_be_a_part_on_its_way_is_refused(s3_store: S3Store) -> None:
    """CASE S14: nobody configures a janitor that ends running uploads."""
    for idle_s in (0.0, 900.0, LEAST_IDLE_S - 1, float("nan")):
        with pytest.raises(InvalidInputError):
            abort_idle_uploads(s3_store, "", idle_s=idle_s, dry_run=True)


def test_a_begin_whose_answer_was_lost_is_found(s3_store: S3Store, proxy: S3Proxy) -> None:
    """CASE S14: the first of two begun uploads has no owner: the janitor sees it."""
    proxy.add("POST", "/k?uploads", DropResponse())
    assert s3_store.put("k", BODY, mode=CREATE) is PutOutcome.WRITTEN
    assert _left(s3_store) == ["k"]
    proxy.add("GET", "uploadId=", DateLater(2 * DAY_S), times=9)
    abort_idle_uploads(s3_store, "", idle_s=DAY_S, dry_run=False)
    assert _left(s3_store) == []
    assert s3_store.get("k") == BODY


def test_a_long_list_of_uploads_is_read_page_by_page(
    s3_store: S3Store, s3_server: SeaweedServer, s3_bucket: str
) -> None:
    """Pages of two of five uploads, two of one key, give all five once each."""
    _begin(s3_server, s3_bucket, "a", "b", "b", "c/d", "e")
    paged = S3Uploads(s3_store._calls, s3_store._uploads.live, page_uploads=2)
    found = list(paged.incomplete(""))
    assert sorted(upload.key for upload in found) == ["a", "b", "b", "c/d", "e"]
    assert len({upload.upload_id for upload in found}) == 5


def test_a_listing_of_uploads_without_end_is_refused(s3_store: S3Store, proxy: S3Proxy) -> None:
    """A store that repeats its first page is an error, not a loop."""
    page = (
        "<ListMultipartUploadsResult><IsTruncated>true</IsTruncated>"
        "<NextKeyMarker>a</NextKeyMarker></ListMultipartUploadsResult>"
    )
    proxy.add("GET", "uploads", Reply(200, document=page), times=99)
    with pytest.raises(StorageError, match="without end"):
        list(s3_store.incomplete_uploads(""))


def test_an_upload_that_ended_meanwhile_is_no_error(
    s3_store: S3Store, proxy: S3Proxy, s3_server: SeaweedServer, s3_bucket: str
) -> None:
    """Two janitors at once: what one removed the other passes over, at either step."""
    _begin(s3_server, s3_bucket, "k")
    (upload,) = s3_store.incomplete_uploads("")
    proxy.add("DELETE", "uploadId=", Reply(404, "NoSuchUpload"))
    assert not s3_store.abort_upload(upload)
    proxy.add("GET", "uploadId=", Reply(404, "NoSuchUpload"))
    assert list(s3_store.incomplete_uploads("")) == []
    assert s3_store.abort_upload(upload)


def test_a_store_without_uploads_has_none_left_behind() -> None:
    """Files and memory take part in the janitor's round and have nothing to show."""
    store = StoreWrapper(MemoryStore())
    assert incomplete_uploads_of(store) is None
    assert abort_idle_uploads(store, "", idle_s=DAY_S, dry_run=False) == ()
