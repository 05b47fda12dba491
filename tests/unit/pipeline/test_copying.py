"""What a region's copy says when an object that is on its way through a file finds no room."""

from __future__ import annotations

import errno
import hashlib
import os
from typing import TYPE_CHECKING

import pytest

from deltastore.errors import Kind, StorageError
from deltastore.pipeline import copying
from deltastore.storage.fs import FileStore
from deltastore.storage.store import PutMode
from deltastore.storage.transfer import FetchItem

if TYPE_CHECKING:
    from pathlib import Path

WRITE = os.write


def test_a_large_object_that_finds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's own error arrives, not one about the file that the object was mapped from."""

    def write(descriptor: int, data: memoryview) -> int:
        if isinstance(data, memoryview) and len(data) == len(body):
            raise OSError(errno.ENOSPC, "No space left on device")
        return WRITE(descriptor, data)

    body = os.urandom(5000)
    source, target = FileStore(tmp_path / "from"), FileStore(tmp_path / "to")
    source.put("k", body, mode=PutMode.CREATE)
    item = FetchItem("k", len(body), hashlib.sha256(body).hexdigest())
    monkeypatch.setattr(copying, "IN_MEMORY_BYTES", 0)
    with monkeypatch.context() as patch:
        patch.setattr("os.write", write)
        with pytest.raises(StorageError) as caught:
            copying.copy_objects(source, target, [item], streams=1, folder=tmp_path)
    assert (caught.value.kind, caught.value.key) == (Kind.DISK_FULL, "k")
    assert copying.copy_objects(source, target, [item], streams=1, folder=tmp_path) == len(body)
    assert target.get("k") == body
