"""A killed put leaves its temporary file: no listing shows it, and the disk stays full of them.

A writer locks its file (flock), and the kernel lets go when it dies: one that is slow or stopped is
told from a dead one however old its file is. Where a file system keeps no locks age alone decides,
by the date of the last write. Should a file be taken from under a living writer all the same, its
put fails with an error and nothing is lost: the name of an object is given last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from deltastore.clock import SystemClock
from deltastore.ids import is_token, new_token
from deltastore.storage.rules import TEMPORARY_PREFIX, is_key
from deltastore.storage.uploads import IncompleteUpload

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOT_A_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR})
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def unfinished_name() -> str:
    """A name for a new temporary file, that nothing else has."""
    return f"{TEMPORARY_PREFIX}{new_token()}"


@contextlib.contextmanager
def unfinished_file(path: Path) -> Iterator[int]:
    """A new temporary file, open for writing and locked in the block, and gone after it."""
    # Plain mode bits: the umask decides who may read, as for any other file.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            _lock(descriptor)
            yield descriptor
        finally:
            os.close(descriptor)
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def list_unfinished(root: Path, prefix: str) -> Iterator[IncompleteUpload]:
    """The temporary files in the folders whose path begins with `prefix`; links are not followed.

    Whose key it would have become no file says: `key` is where it lies. Nor does a file system say
    when it was begun: `started_s` is the date of its last write. Raises OSError.
    """
    now_s: float | None = None
    for folder, _folders, names in os.walk(root / prefix.rpartition("/")[0], onerror=_unless_gone):
        for name in names:
            path = Path(folder, name)
            key = path.relative_to(root).as_posix()
            if not (_is_ours(name) and key.startswith(prefix) and _may_hold_keys(key)):
                continue
            try:
                status = path.lstat()
            except FileNotFoundError:  # its writer is done with it
                continue
            if stat.S_ISREG(status.st_mode):
                now_s = _now_s(root) if now_s is None else now_s
                idle_s = now_s - status.st_mtime
                yield IncompleteUpload(key, f"{status.st_mtime_ns:x}", status.st_mtime, idle_s)


def abort_unfinished(root: Path, upload: IncompleteUpload) -> bool:
    """Remove one; False when it is locked, was written to since it was listed, or is gone.

    Raises OSError.
    """
    path = root / upload.key
    try:
        # For writing, as locks on network file systems want it; never through a link.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except OSError as err:
        if err.errno not in _NOT_A_FILE:
            raise
        return False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or f"{status.st_mtime_ns:x}" != upload.upload_id:
            return False
        _lock(descriptor)
        path.unlink()
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        os.close(descriptor)
    return True


def _lock(descriptor: int) -> None:
    """Take the lock, or raise BlockingIOError; where there are no locks, do nothing."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        if err.errno not in _NO_LOCKS:
            raise


def _is_ours(name: str) -> bool:
    return name.startswith(TEMPORARY_PREFIX) and is_token(name.removeprefix(TEMPORARY_PREFIX))


def _may_hold_keys(key: str) -> bool:
    folder = key.rpartition("/")[0]
    return not folder or is_key(folder)


def _unless_gone(err: OSError) -> None:
    if not isinstance(err, FileNotFoundError | NotADirectoryError):
        raise err


def _now_s(root: Path) -> float:
    """The file system's own time, that of a file made there just now; else this machine's."""
    try:
        with tempfile.TemporaryFile(dir=root) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # read-only, or full: what is to be removed can be listed all the same
        return SystemClock().utc_s()
