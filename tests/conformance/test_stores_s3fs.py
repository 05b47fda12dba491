"""s3fs is how another region's bucket may be reached: a relay on a real server, caches and all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from aiobotocore.session import AioSession

from deltastore.errors import Kind, NotFoundError, StorageError
from deltastore.storage.fsspec_store import FsspecStore
from deltastore.storage.probe import probe_store, require_home
from deltastore.storage.store import ObjectStore, PutMode
from deltastore.testing.stores import StoreTests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.testing.servers import SeaweedServer

CREATE = PutMode.CREATE
_SESSION = AioSession()
"""One for all: it keeps what it has read of the service's description, a second of work each."""


def _options(server: SeaweedServer, **more: Any) -> dict[str, Any]:
    return {
        "key": server.access_key,
        "secret": server.secret_key,
        "client_kwargs": {"endpoint_url": server.endpoint, "region_name": server.region},
        "config_kwargs": {
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "retries": {"total_max_attempts": 1},
        },
        "session": _SESSION,
        **more,
    }


class TestS3fsOnSeaweedfs(StoreTests):
    """The suite through s3fs, as a relay: nobody commits there."""

    atomic_create = False
    race_rounds = 1

    @pytest.fixture
    def store(self, s3_server: SeaweedServer, s3_bucket: str) -> Iterator[ObjectStore]:
        """A prefix in a new bucket."""
        store = FsspecStore(f"s3://{s3_bucket}/some/prefix", **_options(s3_server))
        yield store
        store.close()


def test_a_version_of_another_process_is_seen_through_a_cache(
    s3_server: SeaweedServer, s3_bucket: str
) -> None:
    """CASE S8: where s3fs itself still lists what it listed before, the store sees v2."""
    cached = _options(s3_server, use_listings_cache=True, listings_expiry_time=3600)
    plain = fsspec.filesystem("s3", skip_instance_cache=True, **cached)
    reader = FsspecStore(f"s3://{s3_bucket}/run", **cached)
    writer = FsspecStore(f"s3://{s3_bucket}/run", **_options(s3_server))
    writer.put("versions/1", b"one", mode=CREATE)
    assert len(plain.ls(f"{s3_bucket}/run/versions")) == 1
    assert [i.key for i in reader.list("versions/")] == ["versions/1"]
    with pytest.raises(NotFoundError):
        reader.head("versions/2")

    writer.put("versions/2", b"two", mode=CREATE)

    assert len(plain.ls(f"{s3_bucket}/run/versions")) == 1, "this test proves nothing any more"
    assert reader.head("versions/2").size_bytes == 3
    assert reader.get("versions/2") == b"two"
    assert [i.key for i in reader.list("versions/")] == ["versions/1", "versions/2"]


def test_s3fs_is_no_home(s3_server: SeaweedServer, s3_bucket: str) -> None:
    """CASE S2: a bucket through s3fs passes as a relay and is refused as home."""
    store = FsspecStore(f"s3://{s3_bucket}/run", **_options(s3_server))
    report = probe_store(store)
    failed = {name for name, found in report.findings().items() if not found.ok}
    assert failed == {"create_only_race"}
    with pytest.raises(StorageError) as caught:
        require_home(report)
    assert caught.value.kind is Kind.NO_CONDITIONAL_PUT


def test_refused_credentials_have_a_name(s3_server: SeaweedServer, s3_bucket: str) -> None:
    """CASE S13: a wrong secret is a matter of credentials here too, and is not repeated."""
    options = _options(s3_server) | {"secret": "not-the-right-one"}
    store = FsspecStore(f"s3://{s3_bucket}/run", **options)
    with pytest.raises(StorageError) as caught:
        store.get("versions/1")
    assert caught.value.kind is Kind.CREDENTIALS
    assert "not-the-right-one" not in str(caught.value)
