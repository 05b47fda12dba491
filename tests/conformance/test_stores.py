"""One suite on every store: what passes on memory must pass on files and on real S3 servers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.storage.fs import FileStore
from deltastore.storage.fsspec_store import FsspecStore
from deltastore.storage.memory import MemoryStore
from deltastore.storage.s3 import S3Store
from deltastore.storage.s3_settings import S3Settings
from deltastore.storage.wrapper import StoreWrapper
from deltastore.testing.clock import FakeClock
from deltastore.testing.faults import BandwidthStore, CountingStore, FaultyStore, LatencyStore
from deltastore.testing.stores import StoreTests
from tests.conformance.unfinished import kill_writer, leave_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.storage.store import ObjectStore
    from deltastore.testing.servers import SeaweedServer

MIB = 1 << 20


class TestMemoryStore(StoreTests):
    """The dict."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        """A new one."""
        return MemoryStore()


class TestWrappedStore(StoreTests):
    """Wrappers without faults, latency or limits in the way change nothing but the time."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        """All of them at once."""
        clock = FakeClock()
        slow = LatencyStore(MemoryStore(clock=clock), request_s=0.05, clock=clock)
        line = BandwidthStore(slow, bytes_per_s=1e6, clock=clock)
        return StoreWrapper(CountingStore(FaultyStore(line)))


class TestFileStore(StoreTests):
    """Local files."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        """A folder that is not there yet."""
        return FileStore(tmp_path / "not" / "yet")

    def leave_unfinished(self, store: ObjectStore, key: str) -> None:
        """A process that puts it is killed."""
        assert isinstance(store, FileStore)
        kill_writer(Path(store.url.removeprefix("file://")), key)


class TestS3StoreOnSeaweedfs(StoreTests):
    """A real server. Losers of a race wait a second each there, so few rounds."""

    race_rounds = 2
    folder_order = True
    large_bytes = 11 * MIB + 3

    def leave_unfinished(self, store: ObjectStore, key: str) -> None:
        """A part arrives, and nothing after it."""
        assert isinstance(store, S3Store)
        leave_parts(store, key)

    @pytest.fixture
    def store(self, s3_server: SeaweedServer, s3_bucket: str) -> Iterator[ObjectStore]:
        """A prefix in a new bucket, parts of 5 MiB."""
        store = S3Store(
            S3Settings(
                bucket=s3_bucket,
                prefix="some/prefix",
                endpoint_url=s3_server.endpoint,
                access_key=s3_server.access_key,
                secret_key=s3_server.secret_key,
                part_bytes=5 * MIB,
                streams=4,
            )
        )
        yield store
        store.close()


class TestS3StoreOnMoto(StoreTests):
    """A second opinion on the protocol; moto lets two racing creates win now and then."""

    atomic_create = False
    large_bytes = 6 * MIB + 3

    def leave_unfinished(self, store: ObjectStore, key: str) -> None:
        """A part arrives, and nothing after it."""
        assert isinstance(store, S3Store)
        leave_parts(store, key)

    @pytest.fixture
    def store(self, moto_endpoint: str, request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
        """A new bucket."""
        bucket = f"moto-{abs(hash(request.node.nodeid)) % 10**12}"
        store = S3Store(
            S3Settings(
                bucket=bucket,
                endpoint_url=moto_endpoint,
                access_key="moto",
                secret_key="moto",
                part_bytes=5 * MIB,
            )
        )
        store._calls.once(lambda client: client.create_bucket(Bucket=bucket))
        yield store
        store.close()


class TestFsspecStore(StoreTests):
    """fsspec's local files stand for all of fsspec: create is a look and a write, so no home."""

    atomic_create = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        """The scheme `local` reaches fsspec, where `file` is our own store."""
        options: dict[str, Any] = {"auto_mkdir": True}
        return FsspecStore(f"local://{tmp_path}/store", **options)
