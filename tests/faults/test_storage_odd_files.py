"""A pipe, a socket or a device under an object's key is named at once: nobody waits for it."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deltastore.errors import DeltastoreError, Kind, NotFoundError, StorageError
from deltastore.storage.fs import FileStore
from deltastore.storage.store import ByteRange, PutMode, PutOutcome
from deltastore.storage.transfer import FetchItem, fetch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CREATE = PutMode.CREATE


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """A store with one object."""
    made = FileStore(tmp_path)
    made.put("a/k", b"object", mode=CREATE)
    return made


@pytest.fixture(params=["pipe", "socket", "device", "link to a device"])
def odd(store: FileStore, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The key under which something lies that is no file."""
    path = tmp_path / "a" / "odd"
    if request.param == "pipe":
        os.mkfifo(path)
        held = os.open(path, os.O_RDWR)  # so that what opens it wrongly fails and does not hang
        yield "a/odd"
        os.close(held)
        return
    if request.param == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.path.relpath(path))  # the name of a socket must be short
            yield "a/odd"
        return
    device = Path("/dev/zero")
    if request.param == "device":
        try:
            os.mknod(path, device.stat().st_mode, device.stat().st_rdev)
        except PermissionError:  # not root: a link to it is the nearest there is
            path.symlink_to(device)
    else:
        path.symlink_to(device)
    yield "a/odd"


def _refusals(store: FileStore, key: str) -> Iterator[Callable[[], object]]:
    yield lambda: store.get(key)
    yield lambda: store.get(key, ByteRange(0, 4))
    yield lambda: store.head(key)
    yield lambda: store.put(key, b"", mode=CREATE)
    yield lambda: store.put(key, b"body", mode=CREATE)
    yield lambda: fetch(store, FetchItem(key, 4, "0" * 64))


def test_what_is_no_file_is_refused_by_name(store: FileStore, odd: str) -> None:
    """Reads, heads and creates name the key and the way out; trying again would not help."""
    for call in _refusals(store, odd):
        with pytest.raises(StorageError, match="pipe, a socket or a device") as caught:
            call()
        assert caught.value.kind is Kind.REFUSED
        assert caught.value.key == odd
        assert caught.value.hint


def test_what_is_no_file_is_no_object(store: FileStore, odd: str) -> None:
    """It is in no listing, stops none, and an overwrite or a deletion removes it."""
    assert [info.key for info in store.list("")] == ["a/k"]
    assert store.put(odd, b"repaired", mode=PutMode.OVERWRITE) is PutOutcome.WRITTEN
    assert store.get(odd) == b"repaired"
    store.delete([odd])
    assert [info.key for info in store.list("a/")] == ["a/k"]


def test_a_pipe_in_the_place_of_a_folder_is_named(store: FileStore, tmp_path: Path) -> None:
    """Nothing lies below a pipe, and nothing can be put there."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotFoundError):
        store.get("pipe/k")
    with pytest.raises(DeltastoreError) as caught:
        store.put("pipe/k", b"x", mode=CREATE)
    assert caught.value.kind is Kind.NAME


def test_a_file_that_becomes_a_pipe_before_it_is_opened(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at as a file and opened as a pipe: it is not waited for either."""
    real, path = os.open, tmp_path / "a" / "k"

    def swap(name: Path, flags: int, *mode: int) -> int:
        if path.is_file():
            path.unlink()
            os.mkfifo(path)
        assert flags & os.O_NONBLOCK, "this would wait for a writer"
        return real(name, flags, *mode)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(StorageError, match="pipe"):
        store.get("a/k")


def test_a_link_to_a_file_is_that_file(store: FileStore, tmp_path: Path) -> None:
    """Objects that somebody moved to another disk, and linked, are read as before."""
    (tmp_path / "a" / "k").rename(tmp_path / "moved")
    (tmp_path / "a" / "k").symlink_to(tmp_path / "moved")
    assert store.get("a/k") == b"object"
    assert store.head("a/k").size_bytes == 6
    assert store.put("a/k", b"object", mode=CREATE) is PutOutcome.ALREADY_OURS
