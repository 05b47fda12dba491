"""A lock file that stays for ever fills its folder, one removed under its holder is held by two.

Names that no other process may have are held by locks on files, which the kernel lets go of when
their holder dies. The files of the dead are removed by those who come later (`remove_if_dead`),
while others may be about to take the same name. A file has two bytes to lock:

    byte 0   the name: held as long as its holder lives
    byte 1   the door: held for the moment in which byte 0 is taken, or the file is removed

Who takes the name waits at the door, then takes byte 0 or is refused; then looks whether the file
that is locked still has its name, and begins again with the new one if it was removed meanwhile.
Who removes the file takes both bytes at once, or leaves it alone. So nobody is refused because of
a removal, and nobody holds a file without a name. A process that dies anywhere in between lets go
of both; the file is then as good as before.
"""

from __future__ import annotations

import fcntl
import os
import struct
from typing import TYPE_CHECKING

from deltastore.errors import InvalidInputError, Kind

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAME, DOOR, BOTH = (0, 1), (1, 1), (0, 2)
"""First byte and length of what is locked."""
ATTEMPTS = 64
"""Removals that one acquisition outlives: a remover takes each file once."""
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, len, pid


class HeldLock:
    """A lock file that this process holds until it closes it, or dies.

    Raises InvalidInputError: `lease_held` when a living process holds it, `setting` when somebody
    removes the file again and again.
    """

    def __init__(self, path: Path, *, what: str) -> None:
        self._descriptor: int | None = None
        for _ in range(ATTEMPTS):
            self._descriptor = os.open(path, _FLAGS, 0o600)
            try:
                fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLKW, _flock(fcntl.F_WRLCK, DOOR))
                fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, NAME))
                fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, DOOR))
            except BlockingIOError as err:
                self.close()
                raise InvalidInputError(
                    f"{what} is taken: {path} is locked by another process",
                    kind=Kind.LEASE_HELD,
                    hint="one process per name; stop the other one, or use another folder",
                ) from err
            if _has_name(self._descriptor, path):
                return
            self.close()
        raise InvalidInputError(
            f"{what} cannot be held: {path} is removed as often as it is made",
            kind=Kind.SETTING,
            hint="something removes files there; use another folder",
        )

    def close(self) -> None:
        """Let go."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock. Asks without taking it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, NAME))
    finally:
        os.close(descriptor)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def remove_if_dead(path: Path, clear: Callable[[], object] = bool) -> bool:
    """Remove a lock file that nobody holds, with what its holder left; whether it is gone.

    Args:
        clear: removes the rest, before the file; until it returns nobody can take the name, and
            those who want it wait. When it raises, or this process dies in it, the file stays: the
            next one who comes finds it again.
    """
    descriptor = os.open(path, _FLAGS, 0o600)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, BOTH))
        if not _has_name(descriptor, path):
            return False  # it was removed, and may be somebody's again
        clear()
        path.unlink()
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _has_name(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one that `path` names now."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), found)


def _flock(kind: int, place: tuple[int, int]) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, *place, 0)
