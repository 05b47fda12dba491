"""The probe finds out what a store does, and a store that loses versions never becomes a home."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deltastore.errors import Kind, NotFoundError, StorageError
from deltastore.storage.fs import FileStore
from deltastore.storage.fsspec_store import FsspecStore
from deltastore.storage.memory import MemoryStore
from deltastore.storage.probe import probe_store, require_home
from deltastore.storage.s3 import S3Store
from deltastore.storage.s3_settings import S3Settings
from deltastore.storage.store import ByteRange, ObjectInfo, PutMode, PutOutcome
from deltastore.storage.wrapper import StoreWrapper
from deltastore.testing.faults import Fail, FaultyStore, Op, fail_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.storage.store import Body, ObjectStore
    from deltastore.testing.servers import SeaweedServer


class _Ignores(StoreWrapper):
    """Accepts If-None-Match and ignores it, as several stores do."""

    def put(self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        del mode
        return self.inner.put(key, body, mode=PutMode.OVERWRITE)


class _LooksThenWrites(StoreWrapper):
    """Checks, then writes: right alone, wrong in a race in which both look before one writes."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.both_have_looked = threading.Barrier(2)

    def put(self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        if mode is PutMode.CREATE:
            try:
                self.inner.get(key)
            except NotFoundError:
                if "race" in key:
                    self.both_have_looked.wait(20.0)
            else:
                return self.inner.put(key, body, mode=mode, sha256=sha256)
        return self.inner.put(key, body, mode=PutMode.OVERWRITE)


class _AnswersForbidden(StoreWrapper):
    """Answers 403 for an absent key, as without the right to list."""

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        try:
            return self.inner.get(key, byte_range)
        except NotFoundError as err:
            raise StorageError("403", kind=Kind.CREDENTIALS, key=key) from err


class _ListsBackwards(StoreWrapper):
    """Lists in another order."""

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        return reversed(list(self.inner.list(prefix, start_after=start_after)))


class _ShortRanges(StoreWrapper):
    """Returns what there is of a range past the end."""

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        body = self.inner.get(key)
        return body if byte_range is None else body[byte_range.start : byte_range.end]


class _Stale(StoreWrapper):
    """Reads give what was there before."""

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        self.inner.get(key, byte_range)
        return b"stale"


def test_a_sound_store_may_be_home(tmp_path: Path) -> None:
    """Memory and files pass everything, and the probe leaves nothing behind."""
    for store in (MemoryStore(), FileStore(tmp_path)):
        report = probe_store(store)
        assert all(found.ok for found in report.findings().values()), report
        require_home(report)
        assert list(store.list("")) == []


def test_a_probe_leaves_no_folder(tmp_path: Path) -> None:
    """Nothing of a probe is left in a folder of files, and nothing of others is removed."""
    store = FileStore(tmp_path / "store")
    probe_store(StoreWrapper(store), ask_more=True)
    assert list((tmp_path / "store").iterdir()) == []
    store.put(".probe/of-another/k", b"x", mode=PutMode.CREATE)
    probe_store(store)
    assert [path.name for path in (tmp_path / "store" / ".probe").iterdir()] == ["of-another"]


def test_a_folder_that_a_probe_removes_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who writes while another's probe removes the folder above writes all the same."""
    store, mkdir = FileStore(tmp_path), Path.mkdir

    def late(self: Path, **options: bool) -> None:
        if self.name == "mine":
            monkeypatch.setattr(Path, "mkdir", mkdir)
            store.remove_empty(".probe/")
        mkdir(self, **options)

    monkeypatch.setattr(Path, "mkdir", late)
    store.put(".probe/mine/k", b"x", mode=PutMode.CREATE)
    assert store.get(".probe/mine/k") == b"x"


def test_a_real_s3_server_may_be_home(s3_server: SeaweedServer, s3_bucket: str) -> None:
    """CASE S2: SeaweedFS lets exactly one of two racing creates win."""
    store = S3Store(
        S3Settings(
            bucket=s3_bucket,
            endpoint_url=s3_server.endpoint,
            access_key=s3_server.access_key,
            secret_key=s3_server.secret_key,
        )
    )
    report = probe_store(StoreWrapper(store), race_rounds=2, ask_more=True)
    assert report.may_be_home, report
    assert set(report.more) == {"create_only_complete", "create_only_complete_race", "checksums"}
    assert report.more["create_only_complete"].ok
    assert report.more["checksums"].ok
    require_home(report)
    assert list(store.list("")) == []
    assert list(store.incomplete_uploads("")) == []
    store.close()


def test_a_store_that_ignores_create_only_is_refused() -> None:
    """CASE S2: If-None-Match without effect is found, and the message names store and way out."""
    report = probe_store(_Ignores(MemoryStore("bad")))
    assert not report.create_only.ok
    assert not report.create_only_race.ok
    with pytest.raises(StorageError, match="memory://bad cannot be the home") as caught:
        require_home(report)
    assert caught.value.kind is Kind.NO_CONDITIONAL_PUT
    assert "relay" in str(caught.value.hint)


def test_a_create_that_is_only_right_alone_is_refused(tmp_path: Path) -> None:
    """CASE S2: a look followed by a write passes alone and fails the race."""
    report = probe_store(_LooksThenWrites(FileStore(tmp_path)), race_rounds=2)
    assert report.create_only.ok
    assert not report.create_only_race.ok
    with pytest.raises(StorageError) as caught:
        require_home(report)
    assert caught.value.kind is Kind.NO_CONDITIONAL_PUT


def test_fsspec_may_be_a_relay_and_no_home(tmp_path: Path) -> None:
    """CASE S2: fsspec's create is a look and a write: said by the store, through every wrapper."""
    report = probe_store(StoreWrapper(FsspecStore(f"local://{tmp_path}")))
    failed = {name for name, found in report.findings().items() if not found.ok}
    assert failed == {"create_only_race"}
    with pytest.raises(StorageError):
        require_home(report)


@pytest.mark.parametrize(
    ("store", "finding"),
    [
        (_AnswersForbidden(MemoryStore()), "absent_is_404"),
        (_ListsBackwards(MemoryStore()), "listing_order"),
        (_ShortRanges(MemoryStore()), "ranged_reads"),
    ],
)
def test_other_failures_are_named(store: StoreWrapper, finding: str) -> None:
    """What a store does wrong is one finding with its note, and refuses it as home."""
    report = probe_store(store)
    failed = {name: found for name, found in report.findings().items() if not found.ok}
    assert set(failed) == {finding}
    assert failed[finding].note
    with pytest.raises(StorageError, match=finding) as caught:
        require_home(report)
    assert caught.value.kind is Kind.REFUSED


def test_stale_reads_are_found() -> None:
    """A store that does not read its own writes fails everything that reads."""
    report = probe_store(_Stale(MemoryStore()))
    assert not report.read_after_write.ok
    assert not report.create_only.ok


def test_a_store_that_is_down_is_not_judged() -> None:
    """Failures that say nothing about abilities are raised, not reported."""
    store = FaultyStore(MemoryStore(), [fail_at(Op.PUT, 1, Fail())])
    with pytest.raises(StorageError) as caught:
        probe_store(store)
    assert caught.value.kind is Kind.UNAVAILABLE
