"""Files when the disk is full, links are missing, the writer is killed: whole objects or none."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from deltastore.errors import (
    DeltastoreError,
    InvalidInputError,
    Kind,
    NotFoundError,
    StorageError,
)
from deltastore.storage.fs import FileStore
from deltastore.storage.probe import probe_store, require_home
from deltastore.storage.store import PutMode, PutOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CREATE, OVERWRITE = PutMode.CREATE, PutMode.OVERWRITE


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """A store in an empty folder."""
    return FileStore(tmp_path)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may pass 1000 bytes: a real write that fails half way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _fails(number: int) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def _files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file())


@pytest.mark.usefixtures("small_files")
def test_a_write_that_stops_half_way_leaves_nothing(store: FileStore, tmp_path: Path) -> None:
    """A real write error gives disk_full and leaves neither object nor temporary file."""
    store.put("old", b"x" * 900, mode=CREATE)
    for mode in PutMode:
        with pytest.raises(StorageError) as caught:
            store.put("old", b"y" * 5000, mode=mode)
        assert caught.value.kind is Kind.DISK_FULL
        assert caught.value.hint
    assert _files(tmp_path) == ["old"]
    assert store.get("old") == b"x" * 900


@pytest.mark.parametrize("step", ["write", "fsync", "link"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_has_a_name_at_every_step(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int
) -> None:
    """ENOSPC and a used-up quota give disk_full wherever they strike, and leave nothing."""
    with monkeypatch.context() as patch:
        patch.setattr(os, step, _fails(number))
        with pytest.raises(StorageError) as caught:
            store.put("k", b"body", mode=CREATE)
    assert caught.value.kind is Kind.DISK_FULL
    assert _files(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_no_home(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Where link(2) does not work a create is refused by name, and so is the store as home."""
    monkeypatch.setattr(os, "link", _fails(number))
    with pytest.raises(StorageError) as caught:
        store.put("k", b"body", mode=CREATE)
    assert caught.value.kind is Kind.NO_HARD_LINKS
    assert _files(tmp_path) == []
    report = probe_store(store)
    assert not report.create_only.ok
    assert "hard links" in report.create_only.note
    with pytest.raises(StorageError, match="cannot be the home") as refused:
        require_home(report)
    assert refused.value.kind is Kind.NO_CONDITIONAL_PUT
    assert _files(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_written_has_a_name(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Missing rights and a read-only mount are a matter of credentials, with a hint."""
    monkeypatch.setattr(os, "open", _fails(number))
    with pytest.raises(StorageError) as caught:
        store.put("k", b"body", mode=CREATE)
    assert caught.value.kind is Kind.CREDENTIALS
    assert "mode" in str(caught.value.hint)


def test_a_bad_disk_is_unavailable(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO says that the disk failed, and that a retry may help."""
    monkeypatch.setattr(os, "fsync", _fails(errno.EIO))
    with pytest.raises(StorageError) as caught:
        store.put("k", b"body", mode=CREATE)
    assert caught.value.kind is Kind.UNAVAILABLE


def test_unfinished_writes_are_in_no_listing(store: FileStore, tmp_path: Path) -> None:
    """A temporary file that a crash left is not listed and disturbs nothing."""
    store.put("a/k", b"x", mode=CREATE)
    (tmp_path / "a" / ".tmp-0123").write_bytes(b"half")
    assert [info.key for info in store.list("")] == ["a/k"]
    assert [info.key for info in store.list("a/")] == ["a/k"]


def test_files_of_others_are_left_alone(store: FileStore, tmp_path: Path) -> None:
    """Names that no key can have, and a loop of links, neither stop a listing nor appear in it."""
    store.put("a/k", b"x", mode=CREATE)
    (tmp_path / "a" / "back\\slash").write_bytes(b"")
    (tmp_path / "a" / "new\nline").mkdir()
    (tmp_path / os.fsdecode(b"not-utf8-\xff")).write_bytes(b"")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert [info.key for info in store.list("")] == ["a/k"]
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    assert next(store.list("")).key == "a/k"
    assert len(list(store.list(""))) <= 1024 // len("/loop") + 1


def test_a_crash_between_link_and_unlink_is_healed(store: FileStore, tmp_path: Path) -> None:
    """The object exists from the link on: the retry of the same put finds it as ours."""
    (tmp_path / ".tmp-0123").write_bytes(b"body")
    os.link(tmp_path / ".tmp-0123", tmp_path / "k")
    assert store.put("k", b"body", mode=CREATE) is PutOutcome.ALREADY_OURS


def test_a_key_cannot_be_a_folder_too(store: FileStore) -> None:
    """What S3 allows and files do not is refused by name in both orders, and nothing is lost."""
    store.put("a", b"x", mode=CREATE)
    store.put("b/c", b"y", mode=CREATE)
    for key in ("a/below", "b"):
        for mode in PutMode:
            with pytest.raises(InvalidInputError) as caught:
                store.put(key, b"z", mode=mode)
            assert caught.value.kind is Kind.NAME
    assert [info.key for info in store.list("")] == ["a", "b/c"]


def test_a_link_to_itself_is_no_outage(store: FileStore, tmp_path: Path) -> None:
    """A loop of links is input that can never work: nobody waits for it to pass."""
    store.put("r/k", b"x", mode=PutMode.CREATE)
    (tmp_path / "r" / "loop").symlink_to("loop")
    calls = (
        lambda: store.get("r/loop"),
        lambda: store.head("r/loop/k"),
        lambda: store.put("r/loop/k", b"x", mode=PutMode.CREATE),
    )
    for call in calls:
        with pytest.raises((InvalidInputError, NotFoundError)) as caught:
            call()
        assert caught.value.kind in {Kind.NAME, Kind.OBJECT_MISSING}


def test_a_name_that_is_too_long_for_files_is_refused(store: FileStore) -> None:
    """A name above 255 bytes is an input error, not a failing disk."""
    with pytest.raises(InvalidInputError) as caught:
        store.put("n" * 300, b"x", mode=CREATE)
    assert caught.value.kind is Kind.NAME


def test_a_relative_folder_is_refused() -> None:
    """A store that moves with the working directory would lose its run."""
    with pytest.raises(InvalidInputError):
        FileStore("runs")


def test_a_killed_writer_leaves_whole_objects(tmp_path: Path) -> None:
    """SIGKILL in the middle of puts: every acknowledged object is there, every listed one whole."""
    script = (
        "import sys\n"
        "from deltastore.storage.fs import FileStore\n"
        "from deltastore.storage.store import PutMode\n"
        "store = FileStore(sys.argv[1])\n"
        "for n in range(10_000):\n"
        "    store.put(f'o/{n:06}', n.to_bytes(4, 'big') * 50_000, mode=PutMode.CREATE)\n"
        "    print(n, flush=True)\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    acknowledged = [int(writer.stdout.readline()) for _ in range(20)]
    writer.kill()
    acknowledged += [int(line) for line in writer.stdout.read().split()]
    writer.stdout.close()
    writer.wait()
    store = FileStore(tmp_path)
    listed = [info.key for info in store.list("o/")]
    assert listed[: len(acknowledged)] == [f"o/{n:06}" for n in acknowledged]
    for number, key in enumerate(listed):
        assert store.get(key) == number.to_bytes(4, "big") * 50_000


def test_a_listing_of_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    """A store whose folder nobody made yet has no objects, and reading makes no folder."""
    store = FileStore(tmp_path / "later")
    assert list(store.list("")) == []
    with pytest.raises(DeltastoreError) as caught:
        store.get("k")
    assert caught.value.kind is Kind.OBJECT_MISSING
    store.delete(["k"])
    assert not (tmp_path / "later").exists()
