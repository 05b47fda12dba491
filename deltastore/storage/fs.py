"""A rename overwrites, and a file not synced is empty after a power cut: both lose versions.

Write order of a put: temporary file in the same folder, its bytes synced, then the name: link(2)
for CREATE, which fails if the name exists, rename(2) for OVERWRITE, then the folder synced. A crash
before the name exists leaves a temporary file, which is in no listing and goes with the janitor
(fs_unfinished.py); after it, the whole object.

What lies under a key and is no regular file is never opened to be read: a named pipe would be
waited for, a device may never end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from deltastore.errors import DeltastoreError, InvalidInputError, Kind, StorageError
from deltastore.storage.fs_unfinished import (
    abort_unfinished,
    list_unfinished,
    unfinished_file,
    unfinished_name,
)
from deltastore.storage.rules import (
    check_key,
    check_prefix,
    check_unranged,
    is_key,
    object_exists,
    object_missing,
    range_past_end,
)
from deltastore.storage.store import Body, ByteRange, ObjectInfo, PutMode, PutOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deltastore.storage.uploads import IncompleteUpload

_WRITE_BYTES = 8 << 20
"""Written at a time: a file's date is that of its last write, and says that its writer lives."""
_COMPARE_BYTES = 1 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NO_LINK = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class FileStore:
    """An ObjectStore in a folder of a local (or hard-linking network) file system.

    Args:
        root: the folder; made by the first put.
    """

    def __init__(self, root: Path | str) -> None:
        self._root = Path(root)
        if not self._root.is_absolute():
            raise InvalidInputError(
                f"store folder {str(root)!r} is relative",
                kind=Kind.URL,
                hint="give an absolute path, e.g. file://$PWD/runs",
            )

    @property
    def url(self) -> str:
        """Where this store is, for people."""
        return f"file://{self._root}"

    def put(self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        """Store `body` under `key`; see ObjectStore."""
        path = self._path(key)
        temporary = path.parent / unfinished_name()
        try:
            self._make_folder(path.parent)
            with unfinished_file(temporary) as descriptor:
                _write_synced(descriptor, body)
                outcome = self._name(temporary, path, key, body, mode)
            _sync_folder(path.parent)
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as err:
            raise InvalidInputError(
                f"in {self.url} a file and a folder would have the same name",
                kind=Kind.NAME,
                key=key,
                hint="no key may continue another key with '/'",
            ) from err
        except FileNotFoundError as err:  # somebody removed what we wrote, or the folder around it
            raise StorageError(
                f"a folder of {self.url}, or what was being written into it, went away",
                kind=Kind.UNAVAILABLE,
                key=key,
            ) from err
        except OSError as err:
            raise self._translate(err, key) from err
        return outcome

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """The object's bytes, or that range of them; see ObjectStore."""
        path = self._path(key)
        try:
            with self._opened(path, key) as (descriptor, size_bytes):
                if byte_range is None:
                    check_unranged(key, size_bytes)
                    return _read(descriptor, 0, size_bytes)
                if byte_range.end > size_bytes:
                    raise range_past_end(key, byte_range, size_bytes)
                return _read(descriptor, byte_range.start, byte_range.end)
        except OSError as err:
            raise self._translate(err, key) from err

    def head(self, key: str) -> ObjectInfo:
        """Size and age of the object; see ObjectStore."""
        path = self._path(key)
        try:
            status = path.stat()
            self._require_regular(status, key)
        except OSError as err:
            raise self._translate(err, key) from err
        return _info(key, status)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix`, in key order; see ObjectStore."""
        check_prefix(prefix)
        folder, _, _ = prefix.rpartition("/")
        return self._walk(folder + "/" if folder else "", prefix, start_after or "")

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the objects; absent keys are fine. Gone for good when this returns."""
        folders: set[Path] = set()
        for key in keys:
            path = self._path(key)
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                continue
            except OSError as err:
                raise self._translate(err, key) from err
            folders.add(path.parent)
        for folder in folders:
            try:
                _sync_folder(folder)
            except OSError as err:
                raise self._translate(err, str(folder)) from err

    def incomplete_uploads(self, prefix: str) -> Iterator[IncompleteUpload]:
        """Temporary files of puts that were killed, or are running; see IncompleteUploads."""
        check_prefix(prefix)
        try:
            yield from list_unfinished(self._root, prefix)
        except OSError as err:
            raise self._translate(err, prefix) from err

    def abort_upload(self, upload: IncompleteUpload) -> bool:
        """Remove one, unless its writer lives or it is gone; see IncompleteUploads."""
        try:
            return abort_unfinished(self._root, upload)
        except OSError as err:
            raise self._translate(err, upload.key) from err

    def close(self) -> None:
        """Nothing is held open between calls."""

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    @contextlib.contextmanager
    def _opened(self, path: Path, key: str) -> Iterator[tuple[int, int]]:
        """An object's descriptor and size. A link is followed, to a regular file and no other."""
        self._require_regular(path.stat(), key)  # opening a device may do something
        # Not waiting for a writer, if it has become a pipe in between.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            self._require_regular(status, key)
            yield descriptor, status.st_size
        finally:
            os.close(descriptor)

    def _require_regular(self, status: os.stat_result, key: str) -> None:
        if stat.S_ISREG(status.st_mode):
            return
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), key)
        raise StorageError(
            f"in {self.url} there is a pipe, a socket or a device where an object should be",
            kind=Kind.REFUSED,
            key=key,
            hint="find out who put it there, and remove it",
        )

    def _name(self, temporary: Path, path: Path, key: str, body: Body, mode: PutMode) -> PutOutcome:
        if mode is PutMode.OVERWRITE:
            temporary.replace(path)
            return PutOutcome.WRITTEN
        try:
            os.link(temporary, path)
        except FileExistsError:
            with self._opened(path, key) as (descriptor, size_bytes):
                if not _same_bytes(descriptor, size_bytes, body):
                    raise object_exists(self.url, key) from None
            return PutOutcome.ALREADY_OURS
        except OSError as err:
            if err.errno not in _NO_LINK:
                raise
            raise StorageError(
                f"the file system of {self.url} has no hard links, so a version could be lost",
                kind=Kind.NO_HARD_LINKS,
                key=key,
                hint="use a folder on a local disk, or an S3 bucket, as home",
            ) from err
        return PutOutcome.WRITTEN

    def remove_empty(self, prefix: str) -> None:
        """Remove the folders below a prefix, its own, and those above it, as far as they are empty.

        Only for folders that no other writer needs: deleting an object leaves its folder, so that
        nobody's put finds it gone.
        """
        folder = self._root / check_key(prefix.rstrip("/"))
        try:
            for below, _, _ in os.walk(folder, topdown=False):
                Path(below).rmdir()
            while (folder := folder.parent) != self._root:
                folder.rmdir()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as err:
            if err.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise self._translate(err, prefix) from err

    def _make_folder(self, folder: Path) -> None:
        try:
            _make_folders(folder)
        except FileNotFoundError:  # `remove_empty` took one between our look and our making
            _make_folders(folder)

    def _walk(self, folder: str, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        """Depth first; a folder sorts as its name and '/', so keys come out in byte order."""
        try:
            with os.scandir(self._root / folder) as entries:
                found = sorted(
                    (folder + entry.name + ("/" if entry.is_dir() else ""), entry)
                    for entry in entries
                    if is_key(folder + entry.name)
                )
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as err:
            if err.errno == errno.ELOOP:  # a link that leads back up: nothing new is below it
                return
            raise self._translate(err, folder) from err
        for key, entry in found:
            if key.endswith("/"):
                inside = key.startswith(prefix) or prefix.startswith(key)
                passed = key < start_after and not start_after.startswith(key)
                if inside and not passed:
                    yield from self._walk(key, prefix, start_after)
            elif key.startswith(prefix) and key > start_after:
                try:
                    status = entry.stat()
                except FileNotFoundError:  # deleted while we list
                    continue
                except OSError as err:
                    raise self._translate(err, key) from err
                if stat.S_ISREG(status.st_mode):
                    yield _info(key, status)

    def _translate(self, err: OSError, key: str) -> DeltastoreError:
        if isinstance(err, FileNotFoundError | NotADirectoryError | IsADirectoryError):
            return object_missing(self.url, key)
        number = err.errno
        if number in _FULL:
            return StorageError(
                f"the disk under {self.url} is full",
                kind=Kind.DISK_FULL,
                key=key,
                hint="free space or raise the quota; nothing half-written was left",
            )
        if number in _FORBIDDEN:
            return StorageError(
                f"{self.url} may not be used by this user: {err.strerror}",
                kind=Kind.CREDENTIALS,
                key=key,
                hint="change the folder's owner or mode, or mount it writable",
            )
        if number in {errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ}:
            return InvalidInputError(
                f"the file system of {self.url} cannot hold this name: {err.strerror}",
                kind=Kind.NAME,
                key=key,
                hint="use shorter, plainer names",
            )
        if number == errno.ELOOP:
            return InvalidInputError(
                f"a symbolic link in {self.url} leads back to itself",
                kind=Kind.NAME,
                key=key,
                hint="remove the link: deltastore makes none",
            )
        return StorageError(
            f"{self.url} failed: {err.strerror or err}", kind=Kind.UNAVAILABLE, key=key
        )


def _write_synced(descriptor: int, body: Body) -> None:
    view = memoryview(body).cast("B")
    while view:
        view = view[os.write(descriptor, view[:_WRITE_BYTES]) :]
    os.fsync(descriptor)


def _make_folders(folder: Path) -> None:
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(descriptor: int, start: int, end: int) -> bytes:
    pieces = []
    while start < end:
        piece = os.pread(descriptor, end - start, start)
        if not piece:
            raise OSError(errno.EIO, "the file shrank while it was read")
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _same_bytes(descriptor: int, size_bytes: int, body: Body) -> bool:
    view = memoryview(body).cast("B")
    if size_bytes != len(view):
        return False
    for start in range(0, len(view), _COMPARE_BYTES):
        piece = view[start : start + _COMPARE_BYTES]
        if _read(descriptor, start, start + len(piece)) != piece:
            return False
    # A writer that crashed may have left it unsynced, and we are about to vouch for it.
    os.fsync(descriptor)
    return True


def _info(key: str, status: os.stat_result) -> ObjectInfo:
    etag = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
    return ObjectInfo(key, status.st_size, status.st_mtime, etag)
