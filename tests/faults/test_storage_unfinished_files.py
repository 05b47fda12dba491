"""What a killed writer of files left goes when it is old; nothing is taken from one that lives."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from typing import TYPE_CHECKING

import pytest

from deltastore.errors import Kind, StorageError
from deltastore.ids import new_token
from deltastore.storage import fs
from deltastore.storage.fs import FileStore
from deltastore.storage.store import PutMode, PutOutcome
from deltastore.storage.uploads import abort_idle_uploads
from tests.conformance.unfinished import kill_writer, start_writer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DAY_S = 86_400.0
CREATE = PutMode.CREATE


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """A store in an empty folder."""
    return FileStore(tmp_path)


def _temporary(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.startswith(".tmp-")]


def _age(path: Path, seconds: float = 2 * DAY_S) -> None:
    """As if nothing had been written to it for so long."""
    then_s = path.stat().st_mtime - seconds
    os.utime(path, (then_s, then_s), follow_symlinks=False)


def _remove_idle(store: FileStore, prefix: str = "", *, dry_run: bool = False) -> list[str]:
    done = abort_idle_uploads(store, prefix, idle_s=DAY_S, dry_run=dry_run)
    return [upload.key for upload in done]


def test_what_a_killed_put_left_goes_by_age(store: FileStore, tmp_path: Path) -> None:
    """CASE S14: SIGKILL in the middle of a body: a day later what was written goes, before and on
    trial it stays, and only under the prefix that was asked for."""
    kill_writer(tmp_path, "r/deltas/1/k")
    kill_writer(tmp_path, "other/k")
    left = sorted(path.relative_to(tmp_path).as_posix() for path in _temporary(tmp_path))
    assert [key.rpartition("/")[0] for key in left] == ["other", "r/deltas/1"]
    assert [path.stat().st_size for path in _temporary(tmp_path)] == [2000, 2000]
    assert _remove_idle(store) == []
    for path in _temporary(tmp_path):
        _age(path)
    assert _remove_idle(store, "r/", dry_run=True) == left[1:]
    assert len(_temporary(tmp_path)) == 2
    assert _remove_idle(store, "r/") == left[1:]
    assert _remove_idle(store, "r/deltas/2") == []
    assert _remove_idle(store) == left[:1]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert store.put("r/deltas/1/k", b"again", mode=CREATE) is PutOutcome.WRITTEN


def test_a_put_that_is_stopped_for_days_is_left_alone(store: FileStore, tmp_path: Path) -> None:
    """CASE S14: a writer that is stopped for two days goes on and succeeds; a dead one does not
    keep its file by that."""
    writer = start_writer(tmp_path, "k", pieces=2, number=signal.SIGSTOP)
    try:
        _, status = os.waitpid(writer.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        (path,) = _temporary(tmp_path)
        _age(path)
        (found,) = store.incomplete_uploads("")
        assert found.idle_s >= 2 * DAY_S - 60
        assert _remove_idle(store) == []
        assert not store.abort_upload(found)
        writer.send_signal(signal.SIGCONT)
        assert writer.wait() == 0
    finally:
        if writer.poll() is None:
            writer.kill()
            writer.wait()
    assert store.get("k") == bytes(5000)
    assert _temporary(tmp_path) == []


def test_a_put_of_this_process_is_never_removed(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASE S14: the janitor in the trainer's own process passes the file that is being written."""
    real, removed = os.fsync, []

    def clean(descriptor: int) -> None:
        for path in _temporary(tmp_path):
            _age(path)
            removed.extend(_remove_idle(store))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", clean)
    assert store.put("k", b"body", mode=CREATE) is PutOutcome.WRITTEN
    assert removed == []
    assert store.get("k") == b"body"


def test_a_large_body_is_written_in_pieces(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASE S14: every piece renews the date: a file is as old as its last piece, not its first."""
    monkeypatch.setattr(fs, "_WRITE_BYTES", 1000)
    real, idle_s = os.write, []

    def write(descriptor: int, body: memoryview) -> int:
        written = real(descriptor, body)
        idle_s.extend(upload.idle_s for upload in store.incomplete_uploads(""))
        _age(_temporary(tmp_path)[0])
        return written

    monkeypatch.setattr(os, "write", write)
    store.put("k", bytes(4500), mode=CREATE)
    assert len(idle_s) == 5
    assert max(idle_s) < 60


def _no_locks(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def test_without_locks_age_decides(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASE S14: on a file system that keeps no locks a put works, what is old goes, and what was
    written to since it was listed stays."""
    monkeypatch.setattr(fcntl, "flock", _no_locks)
    assert store.put("k", b"body", mode=CREATE) is PutOutcome.WRITTEN
    kill_writer(tmp_path, "dead")
    (path,) = _temporary(tmp_path)
    _age(path)
    (found,) = store.incomplete_uploads("")
    _age(path, -DAY_S)  # a piece was written
    assert not store.abort_upload(found)
    _age(path, DAY_S)
    assert _remove_idle(store) == [found.key]
    assert not store.abort_upload(found)


@pytest.mark.parametrize("mode", list(PutMode))
def test_a_put_whose_file_was_taken_fails_and_loses_nothing(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: PutMode
) -> None:
    """Where somebody removes the file of a living writer, the put says so and gives no name."""
    real = os.fsync

    def steal(descriptor: int) -> None:
        real(descriptor)
        for path in _temporary(tmp_path):
            path.unlink()

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", steal)
        with pytest.raises(StorageError) as caught:
            store.put("k", b"body", mode=mode)
    assert caught.value.kind is Kind.UNAVAILABLE
    assert "went away" in str(caught.value)
    assert list(store.list("")) == []
    assert store.put("k", b"body", mode=mode) is PutOutcome.WRITTEN


def test_only_what_this_store_makes_is_removed(
    store: FileStore, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Names of others, links, pipes, and what lies behind a link are neither listed nor removed."""
    outside = tmp_path_factory.mktemp("outside")
    beyond = outside / f".tmp-{new_token()}"
    beyond.write_bytes(b"another's")
    others = [tmp_path / ".tmp-0123", tmp_path / "tmp-x", tmp_path / f".tmp-{new_token()}x"]
    for path in others:
        path.write_bytes(b"another's")
    (tmp_path / "linked").symlink_to(outside)
    (tmp_path / f".tmp-{new_token()}").symlink_to(beyond)
    os.mkfifo(tmp_path / f".tmp-{new_token()}")
    (tmp_path / f".tmp-{new_token()}").mkdir()
    for path in (*others, beyond):
        _age(path, 8 * DAY_S)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert list(store.incomplete_uploads("")) == []
    assert _remove_idle(store) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert beyond.read_bytes() == b"another's"


@pytest.mark.parametrize("now", ["link", "pipe", "folder"])
def test_what_has_become_something_else_is_not_removed(
    store: FileStore, tmp_path: Path, now: str
) -> None:
    """Between the listing and the removal: no link is followed, no pipe waited for."""
    kill_writer(tmp_path, "k")
    (path,) = _temporary(tmp_path)
    (found,) = store.incomplete_uploads("")
    kept = tmp_path / "kept"
    path.rename(kept)
    become: dict[str, Callable[[], None]] = {
        "link": lambda: path.symlink_to(kept),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }
    become[now]()
    assert not store.abort_upload(found)
    assert kept.exists()
    assert path.is_symlink() or path.exists()


def test_a_folder_that_nobody_may_write_to_is_listed(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run on a read-only mount shows what is old, by this machine's own clock."""
    kill_writer(tmp_path, "k")
    _age(_temporary(tmp_path)[0])

    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert len(_remove_idle(store, dry_run=True)) == 1
