"""A region that is down must cost the trainer neither time nor memory: what it missed waits here.

Encoded bodies on their way to one region: in memory first, beyond half of `memory_max_bytes` a
thread of its own moves the newest to disk, and what fits in neither is not kept: the region copies
it from home later. `add` does no I/O and never waits.

The files have no name, so nothing is left of a process that was killed. There is one per version,
and it ends with it.

Memory: `memory_max_bytes`, and of each sender the body it has read from disk. Disk:
`disk_max_bytes`.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING

from deltastore.errors import Kind, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
MAX_VERSIONS = 256
"""Versions in a backlog, because each may hold a file open."""


class _State(Enum):
    WAITING = auto()
    BUSY = auto()
    """Being sent, or being moved to disk."""


class _NamelessFile:
    """A file that ends with the last reference to it: one in use is never closed under its user."""

    def __init__(self, folder: Path) -> None:
        self.descriptor, name = tempfile.mkstemp(dir=folder, prefix=".backlog-")
        Path(name).unlink()
        self.end = 0

    def __del__(self) -> None:
        os.close(self.descriptor)


@dataclass(slots=True, eq=False)
class WaitingBody:
    """A body on its way to one region; in memory, or at an offset of its version's file."""

    version: int
    key: str
    size_bytes: int
    body: bytes | None
    file: _NamelessFile | None = None
    offset: int = 0
    state: _State = _State.WAITING
    dropped: bool = False
    sha256: str | None = None
    """The body's, where it is known: it is sent with it, so that the disk cannot change it."""


class Backlog:
    """Bodies that wait for one region, in the order they came. Thread-safe.

    Args:
        name: of the region, for its thread.
        folder: where bodies go that memory does not hold; None: nowhere.
        trouble: told when the disk takes no more; the backlog stays in memory from then on.
    """

    def __init__(
        self,
        name: str,
        *,
        memory_max_bytes: int,
        disk_max_bytes: int,
        folder: Path | None,
        trouble: Callable[[StorageError], None],
    ) -> None:
        self._memory_max_bytes = memory_max_bytes
        self._disk_max_bytes = disk_max_bytes if folder is not None else 0
        self._folder = folder
        self._trouble = trouble
        self._changed = threading.Condition()
        self._items: list[WaitingBody] = []
        self._versions: Counter[int] = Counter()
        self._files: dict[int, _NamelessFile] = {}
        self._memory_bytes = 0
        self._disk_bytes = 0
        self._open = True
        self._spiller: threading.Thread | None = None
        if self._disk_max_bytes:
            self._spiller = threading.Thread(target=self._spill, name=f"spill-{name}", daemon=True)
            self._spiller.start()

    @property
    def memory_bytes(self) -> int:
        """Bytes of bodies in memory."""
        with self._changed:
            return self._memory_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of bodies on disk."""
        with self._changed:
            return self._disk_bytes

    def add(self, version: int, key: str, body: bytes, *, sha256: str | None = None) -> bool:
        """Keep a body; False when there is no room for it."""
        with self._changed:
            fits = self._memory_bytes + len(body) <= self._memory_max_bytes
            known = version in self._versions or len(self._versions) < MAX_VERSIONS
            if not (self._open and fits and known):
                return False
            self._versions[version] += 1
            self._items.append(WaitingBody(version, key, len(body), body, sha256=sha256))
            self._memory_bytes += len(body)
            self._changed.notify_all()
        return True

    def take(self) -> WaitingBody | None:
        """Wait for the next body to send; None once the backlog is closed.

        Give it back or finish it.
        """
        with self._changed:
            while self._open:
                for item in self._items:
                    if item.state is _State.WAITING:
                        item.state = _State.BUSY
                        return item
                self._changed.wait()
        return None

    def read(self, item: WaitingBody) -> bytes | None:
        """A taken body's bytes; None if its version was dropped meanwhile.

        Raises StorageError(unavailable) when the disk does not give them back.
        """
        with self._changed:
            body, file, offset = item.body, item.file, item.offset
        if body is not None or file is None:
            return body
        try:
            body = os.pread(file.descriptor, item.size_bytes, offset)
        except OSError as err:
            raise _disk_error(err, "read") from err
        if len(body) != item.size_bytes:
            raise StorageError("a region's backlog was cut short", kind=Kind.UNAVAILABLE)
        return body

    def give_back(self, item: WaitingBody) -> None:
        """A taken body could not be sent now: it waits again, in its old place."""
        with self._changed:
            item.state = _State.WAITING
            self._changed.notify_all()

    def finish(self, item: WaitingBody) -> None:
        """A taken body is done with, sent or given up."""
        with self._changed:
            self._remove([item])

    def drop(self, version: int, *, and_below: bool = False) -> None:
        """Forget the bodies of a version, and of those below it if asked to."""
        with self._changed:
            self._remove(
                [
                    item
                    for item in self._items
                    if item.version == version or (and_below and item.version < version)
                ]
            )

    def holds(self, version: int) -> bool:
        """Whether bodies of the version are still on their way."""
        with self._changed:
            return version in self._versions

    def wait_sent(self, version: int, timeout_s: float) -> bool:
        """Wait until no body of the version is on its way, or the backlog is closed."""

        def sent() -> bool:
            return not self._open or version not in self._versions

        with self._changed:
            return self._changed.wait_for(sent, timeout_s)

    def close(self) -> None:
        """Forget everything, wake everybody."""
        with self._changed:
            self._open = False
            self._remove(list(self._items))
        if self._spiller is not None:
            self._spiller.join()

    def _remove(self, items: list[WaitingBody]) -> None:
        for item in items:
            if item.dropped:
                continue
            item.dropped = True
            if item.file is None:
                self._memory_bytes -= item.size_bytes
            else:
                self._disk_bytes -= item.size_bytes
            item.body = item.file = None
            self._items.remove(item)
            self._versions[item.version] -= 1
            if not self._versions[item.version]:
                del self._versions[item.version]
                self._files.pop(item.version, None)
        self._changed.notify_all()

    def _spill(self) -> None:
        """Move bodies to disk, the newest first, while more than half of the memory is used."""
        while (item := self._next_to_spill()) is not None:
            body = item.body
            try:
                file, offset = self._room_on_disk(item)
                _write_all(file, b"" if body is None else body, offset)
            except OSError as err:
                with self._changed:
                    self._disk_max_bytes = 0
                self.give_back(item)
                self._trouble(_disk_error(err, "written"))
                return
            with self._changed:
                if not item.dropped:
                    item.file, item.offset, item.body = file, offset, None
                    self._memory_bytes -= item.size_bytes
                    self._disk_bytes += item.size_bytes
                    item.state = _State.WAITING
                self._changed.notify_all()
            del body, file

    def _next_to_spill(self) -> WaitingBody | None:
        with self._changed:
            while self._open:
                if self._memory_bytes > self._memory_max_bytes // 2:
                    for item in reversed(self._items):
                        fits = self._disk_bytes + item.size_bytes <= self._disk_max_bytes
                        if item.state is _State.WAITING and item.body is not None and fits:
                            item.state = _State.BUSY
                            return item
                self._changed.wait()
        return None

    def _room_on_disk(self, item: WaitingBody) -> tuple[_NamelessFile, int]:
        assert self._folder is not None
        with self._changed:
            file = self._files.get(item.version) or _NamelessFile(self._folder)
            if not item.dropped:
                self._files[item.version] = file
            offset, file.end = file.end, file.end + item.size_bytes
            return file, offset


def _write_all(file: _NamelessFile, body: bytes, offset: int) -> None:
    left = memoryview(body)
    while left:
        written = os.pwrite(file.descriptor, left, offset)
        left, offset = left[written:], offset + written


def _disk_error(err: OSError, done: str) -> StorageError:
    return StorageError(
        f"a region's backlog cannot be {done}: {err.strerror}",
        kind=Kind.DISK_FULL if err.errno in _FULL else Kind.UNAVAILABLE,
        hint="free space in spool_folder, or set a smaller backlog_max_bytes",
    )
