"""What lies under a key is as large as its writer liked: its size is compared before it is read."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from deltastore.errors import IntegrityError, Kind
from deltastore.format.manifest import FileRef
from deltastore.maintenance.fsck_bodies import check_digest
from deltastore.repository.full import read_file
from deltastore.testing.faults import CountingStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.repository.run import Run
    from tests.unit.maintenance.conftest import Copy

GOOD = b'{"model_type": "qwen3"}'
KEY = "r1/config.json"


def _check(run: Run, file: FileRef) -> None:
    assert file.key is not None
    check_digest(run, file.key, file.size_bytes, file.sha256)


@pytest.mark.parametrize("read", [read_file, _check])
@pytest.mark.parametrize("found", [b"", GOOD[:-1], GOOD + b" ", bytes(32 << 20)])
def test_an_object_of_another_size_is_not_read(
    copy: Copy, read: Callable[[Run, FileRef], object], found: bytes
) -> None:
    """A small file under whose key lies an object of another size is refused without its bytes."""
    copy.write(KEY, found)
    run = copy.run(counted := CountingStore(copy.store))
    before_bytes = counted.traffic.received_bytes
    file = FileRef("config.json", KEY, len(GOOD), hashlib.sha256(GOOD).hexdigest())
    with pytest.raises(IntegrityError, match=f"has {len(found)} bytes, not the {len(GOOD)}") as got:
        read(run, file)
    assert (got.value.kind, got.value.key) == (Kind.DIGEST, KEY)
    assert counted.traffic.received_bytes == before_bytes


@pytest.mark.parametrize("body", [b"", GOOD])
def test_an_object_of_the_right_size_is_read(copy: Copy, body: bytes) -> None:
    """A small file, and an empty one, of which no range can be asked, is read and checked."""
    copy.write(KEY, body)
    file = FileRef("config.json", KEY, len(body), hashlib.sha256(body).hexdigest())
    assert read_file(copy.run(), file) == body
    _check(copy.run(), file)
    copy.write(KEY, bytes(len(body)) or b"x")
    with pytest.raises(IntegrityError):
        _check(copy.run(), file)
