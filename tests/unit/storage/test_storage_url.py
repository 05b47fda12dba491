"""URLs: every good one opens the store it says, every bad one is refused with the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deltastore.errors import InvalidInputError, Kind
from deltastore.storage.fs import FileStore
from deltastore.storage.fsspec_store import FsspecStore
from deltastore.storage.s3 import S3Store
from deltastore.storage.store import PutMode
from deltastore.storage.url import open_store, split_run_url

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("url", "kind", "shown"),
    [
        ("s3://bucket", S3Store, "s3://bucket"),
        ("s3://bucket/", S3Store, "s3://bucket"),
        ("s3://bucket/team/runs/", S3Store, "s3://bucket/team/runs"),
        ("s3://Bucket.with_old-name/a%20b", S3Store, "s3://Bucket.with_old-name/a%20b"),
        ("file:///data/runs", FileStore, "file:///data/runs"),
        ("file://localhost/data/runs/", FileStore, "file:///data/runs"),
        ("file:///with%20space/and space", FileStore, "file:///with space/and space"),
        ("local:///data/runs", FsspecStore, "local:///data/runs"),
    ],
)
def test_good_urls_open_their_store(url: str, kind: type, shown: str) -> None:
    """The scheme chooses the store; opening makes no request and no folder."""
    store = open_store(url)
    assert isinstance(store, kind)
    assert store.url == shown
    store.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket/prefix",
        "/data/runs",
        "./runs",
        "s3:/bucket",
        "s3://",
        "s3:///prefix",
        "file://runs",
        "file://",
        "file://./runs",
        "memory://",
        "memory://x",
        "nosuch://x",
        "S4://x/y",
        "s3://bucket/x?versionId=1",
        "s3://bucket/x#y",
        "simplecache::s3://bucket/x",
        "ftp://user:secret@host/x",
        "s3://[/x",
        "file:///a/%00/b",
        "dir://x",
        "reference://x",
        "generic://x",
    ],
)
def test_bad_urls_are_refused(url: str) -> None:
    """What cannot be a store is an InvalidInputError(url) with a hint, and shows no password."""
    with pytest.raises(InvalidInputError) as caught:
        open_store(url)
    assert caught.value.kind is Kind.URL
    assert caught.value.hint
    assert "secret" not in str(caught.value)


def test_a_prefix_that_leaves_the_bucket_is_refused() -> None:
    """A prefix is a relative path."""
    with pytest.raises(InvalidInputError):
        open_store("s3://bucket/a/../../b")


@pytest.mark.parametrize(
    ("url", "store_url", "run"),
    [
        ("s3://bucket/r1", "s3://bucket", "r1"),
        ("s3://bucket/team/r1/", "s3://bucket/team", "r1"),
        ("file:///data/runs/r1", "file:///data/runs", "r1"),
        ("file:///data/a%20b/r-1.x_y", "file:///data/a%20b", "r-1.x_y"),
    ],
)
def test_a_run_is_the_last_part_of_its_url(url: str, store_url: str, run: str) -> None:
    """What is before the last part opens as the store."""
    assert split_run_url(url) == (store_url, run)
    open_store(store_url).close()


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://bucket/", "file:///r1", "file:///", "s3://b/r 1", "s3://b/r%2F1"]
)
def test_a_url_without_a_run_is_refused(url: str) -> None:
    """A bucket is no run, the root folder no store, and a run's name is a plain name."""
    with pytest.raises(InvalidInputError) as caught:
        split_run_url(url)
    assert caught.value.kind in {Kind.URL, Kind.NAME}


def test_a_folder_with_unusual_characters_is_found_again(tmp_path: Path) -> None:
    """A path made into a URL by pathlib opens that path."""
    folder = tmp_path / "with space [and] ünicode%"
    store = open_store(folder.as_uri())
    store.put("k", b"x", mode=PutMode.CREATE)
    assert (folder / "k").read_bytes() == b"x"
    store_url, run = split_run_url((folder / "r1").as_uri())
    assert run == "r1"
    assert open_store(store_url).get("k") == b"x"


def test_options_reach_the_s3_store() -> None:
    """Credentials and sizes given beside the URL are used, and not shown."""
    store = open_store(
        "s3://bucket/p",
        endpoint_url="http://127.0.0.1:9",
        region="eu-north-1",
        access_key="AK!",
        secret_key="SK!",
        streams=3,
        part_bytes=6 << 20,
    )
    assert isinstance(store, S3Store)
    assert (store._settings.streams, store._settings.part_bytes) == (3, 6 << 20)
    assert store._settings.region == "eu-north-1"
    assert "SK!" not in repr(store)


def test_a_file_system_whose_package_is_missing_is_named() -> None:
    """A known scheme without its package says what to install."""
    with pytest.raises(InvalidInputError, match="not installed") as caught:
        open_store("gs://bucket/x")
    assert caught.value.kind is Kind.URL
