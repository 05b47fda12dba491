"""A 16 GB file read into memory to be sent on needs 16 GB: what is copied between regions streams.

Objects of committed versions, from one region's bucket to another's, several at once. Each is
verified by its SHA-256 before it is put, and put create-only under the same key. One that is there
already, with the right size, is left alone: names are made from contents.

Memory: `streams` bodies of at most `IN_MEMORY_BYTES`; larger ones go through a file without a name
in `folder`, one at a time, in ranges of 8 MiB.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import IO, TYPE_CHECKING

from deltastore.errors import IntegrityError, InvalidInputError, Kind, NotFoundError, StorageError
from deltastore.repository.commit import advertise, commit_version
from deltastore.storage.mapped import mapped_body
from deltastore.storage.store import ByteRange, ObjectStore, PutMode
from deltastore.storage.transfer import FetchItem, fetch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from deltastore.format.manifest import VersionManifest
    from deltastore.repository.run import Run

IN_MEMORY_BYTES = 64 << 20
RANGE_BYTES = 8 << 20


def replicate_version(
    home: Run,
    region: Run,
    manifest: VersionManifest,
    *,
    present: frozenset[str],
    streams: int,
    folder: Path | None = None,
) -> int:
    """Copy one committed version to a region that holds the version before it.

    Args:
        present: keys of bodies already confirmed in the region.
        folder: for large files on their way; None: the system's folder for such.

    Returns the bytes that were read from home.
    """
    core = manifest.core
    items = [FetchItem(s.key, s.size_bytes, s.sha256) for s in core.segments]
    items += [FetchItem(f.key, f.size_bytes, f.sha256) for f in core.files if f.key is not None]
    missing = [item for item in items if item.key not in present]
    copied_bytes = copy_objects(home.store, region.store, missing, streams=streams, folder=folder)
    commit_version(region, manifest)
    advertise(region, manifest)
    return copied_bytes


def copy_objects(
    source: ObjectStore,
    target: ObjectStore,
    items: Sequence[FetchItem],
    *,
    streams: int,
    folder: Path | None = None,
) -> int:
    """Bring objects to another store, unless they are there; returns the bytes that were read.

    Raises NotFoundError(object_missing), IntegrityError(digest), ConflictError, StorageError.
    """
    small = [item for item in items if item.size_bytes <= IN_MEMORY_BYTES]
    copied_bytes = 0
    with ThreadPoolExecutor(max(1, min(streams, len(small))), thread_name_prefix="copy") as pool:
        jobs = [pool.submit(_copy_small, source, target, item) for item in small]
        try:
            for job in jobs:
                copied_bytes += job.result()
        finally:
            for job in jobs:
                job.cancel()
    for item in items:
        if item.size_bytes > IN_MEMORY_BYTES and not _is_there(target, item):
            _copy_large(source, target, item, streams, folder)
            copied_bytes += item.size_bytes
    return copied_bytes


def _is_there(target: ObjectStore, item: FetchItem) -> bool:
    try:
        return target.head(item.key).size_bytes == item.size_bytes
    except NotFoundError as err:
        if err.kind is not Kind.OBJECT_MISSING:
            raise
        return False


def _copy_small(source: ObjectStore, target: ObjectStore, item: FetchItem) -> int:
    if _is_there(target, item):
        return 0
    target.put(item.key, fetch(source, item).body, mode=PutMode.CREATE, sha256=item.sha256)
    return item.size_bytes


def _copy_large(
    source: ObjectStore, target: ObjectStore, item: FetchItem, streams: int, folder: Path | None
) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            _download(source, item, file, streams)
            with mapped_body(file) as body:
                target.put(item.key, body, mode=PutMode.CREATE)
    except OSError as err:
        raise StorageError(
            f"no room for {item.size_bytes} bytes on their way to another region: {err.strerror}",
            kind=Kind.DISK_FULL,
            key=item.key,
            hint="free space there, or point spool_folder elsewhere",
        ) from err


def _download(source: ObjectStore, item: FetchItem, file: IO[bytes], streams: int) -> None:
    digest = hashlib.sha256()
    for chunk in read_ahead(source, item, streams=streams):
        digest.update(chunk)
        file.write(chunk)
    file.flush()
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    if digest.hexdigest() != item.sha256:
        raise IntegrityError(
            f"the object in {source.url} is not what its manifest names",
            kind=Kind.DIGEST,
            key=item.key,
            hint="restore it from another region",
        )


def read_ahead(source: ObjectStore, item: FetchItem, *, streams: int) -> Iterator[bytes]:
    """An object's bytes in order, in ranges of 8 MiB, `streams` of them at once. Not verified."""
    starts = iter(range(0, item.size_bytes, RANGE_BYTES))

    def read(start: int) -> bytes:
        part = ByteRange(start, min(start + RANGE_BYTES, item.size_bytes))
        try:
            return source.get(item.key, part)
        except InvalidInputError as err:
            if err.kind is not Kind.RANGE:
                raise
            raise IntegrityError(
                f"the object in {source.url} is shorter than its manifest says",
                kind=Kind.DIGEST,
                key=item.key,
                hint="restore it from another region",
            ) from err

    with ThreadPoolExecutor(streams, thread_name_prefix="read") as pool:
        ahead: deque[Future[bytes]] = deque()
        try:
            ahead.extend(pool.submit(read, start) for start in islice(starts, streams))
            while ahead:
                chunk = ahead.popleft().result()
                ahead.extend(pool.submit(read, start) for start in islice(starts, 1))
                yield chunk
        finally:
            for future in ahead:
                future.cancel()


class Backoff:
    """When a region that failed is tried again; failures at the same time count once.

    Args:
        first_s, cap_s: the wait after the first failure, and the longest.
    """

    def __init__(self, *, first_s: float, cap_s: float) -> None:
        self._first_s = first_s
        self._cap_s = cap_s
        self._lock = threading.Lock()
        self._wait_s = first_s
        self._until_s = 0.0

    def failed(self, now_s: float) -> bool:
        """Note a failure; whether it is the first since the last wait ended."""
        with self._lock:
            if now_s < self._until_s:
                return False
            self._until_s = now_s + self._wait_s
            self._wait_s = min(2 * self._wait_s, self._cap_s)
            return True

    def succeeded(self) -> None:
        """Note that the region answers."""
        with self._lock:
            self._wait_s, self._until_s = self._first_s, 0.0

    def left_s(self, now_s: float) -> float:
        """Seconds until it may be tried again."""
        with self._lock:
            return max(0.0, self._until_s - now_s)
