"""A cached listing hides a version that another process wrote (S8): here nothing is cached.

Any fsspec URL can be read and can be a relay. It cannot be a home: for most of these file systems
"create" is a look followed by a write, and two writers then both believe they won. The probe asks.
"""

from __future__ import annotations

import errno
import posixpath
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import fsspec

from deltastore.errors import DeltastoreError, InvalidInputError, Kind, StorageError
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
    from collections.abc import Iterable, Iterator, Mapping

_MODIFIED_FIELDS = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


class FsspecStore:
    """An ObjectStore at an fsspec URL.

    Args:
        url: scheme and path; options of the file system go into `options`, never into the URL.
        options: what the file system's constructor takes; a cache of listings stays off whatever
            they say.
    """

    create_is_atomic = False
    """For most file systems "create" is a look followed by a write: a relay, never a home."""

    def __init__(self, url: str, **options: Any) -> None:
        self._url = url.rstrip("/")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(
                self._url, **{**options, "use_listings_cache": False, "skip_instance_cache": True}
            )
        except ImportError as err:
            raise InvalidInputError(
                f"{url!r} needs a package that is not installed: {err}",
                kind=Kind.URL,
                hint="install it, or use an s3:// or file:// URL",
            ) from err
        except ValueError as err:
            raise InvalidInputError(
                f"{url!r} is not a URL of a known file system: {err}",
                kind=Kind.URL,
                hint="use s3://bucket/prefix or file:///folder",
            ) from err
        except OSError as err:
            raise StorageError(
                f"{url!r} cannot be opened: {err}",
                kind=Kind.UNAVAILABLE,
                hint="check the host and the path",
            ) from err
        except Exception as err:  # a constructor that needs options raises what it likes
            raise InvalidInputError(
                f"{url!r} alone opens no file system: {type(err).__name__}: {err}",
                kind=Kind.URL,
                hint="use s3://bucket/prefix or file:///folder",
            ) from err

    @property
    def url(self) -> str:
        """Where this store is, for people."""
        return self._url

    def put(self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        """Store `body` under `key`; as atomic as the file system makes it (see the probe)."""
        path, copy = self._path(key), bytes(body)
        try:
            if mode is PutMode.CREATE and self._exists(path):
                return self._compare(path, key, copy)
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
            try:
                self._fs.pipe_file(
                    path, copy, mode="create" if mode is PutMode.CREATE else "overwrite"
                )
            except OSError as err:
                # s3fs says EINVAL where others say FileExistsError.
                lost = isinstance(err, FileExistsError) or err.errno == errno.EINVAL
                if mode is PutMode.CREATE and lost and self._exists(path):
                    return self._compare(path, key, copy)
                raise
        except DeltastoreError:
            raise
        except Exception as err:
            raise self._translate(err, key) from err
        return PutOutcome.WRITTEN

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """The object's bytes, or that range of them; see ObjectStore."""
        path = self._path(key)
        try:
            if byte_range is None:
                check_unranged(key, int(self._info(path)["size"] or 0))
                return bytes(self._fs.cat_file(path))
            body = self._read_range(path, byte_range)
            short = len(body) != byte_range.size_bytes
            size_bytes = int(self._info(path)["size"]) if short else 0
        except DeltastoreError:
            raise
        except Exception as err:
            raise self._translate(err, key) from err
        if short:
            raise range_past_end(key, byte_range, size_bytes)
        return body

    def head(self, key: str) -> ObjectInfo:
        """Size and age of the object; see ObjectStore."""
        path = self._path(key)
        try:
            info = self._info(path)
        except Exception as err:
            raise self._translate(err, key) from err
        if info["type"] != "file":
            raise object_missing(self._url, key)
        return _object_info(key, info)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix`, in key order; read at once."""
        check_prefix(prefix)
        folder, _, _ = prefix.rpartition("/")
        top = f"{self._root}/{folder}" if folder else self._root
        try:
            self._fs.invalidate_cache()
            found: Mapping[str, Any] = self._fs.find(top, detail=True)
        except FileNotFoundError:
            found = {}
        except Exception as err:
            raise self._translate(err, prefix) from err
        root = self._root.rstrip("/") + "/"
        infos = [
            _object_info(path[len(root) :], info)
            for path, info in found.items()
            if path.startswith(root) and is_key(path[len(root) :])
        ]
        return iter(
            sorted(
                (i for i in infos if i.key.startswith(prefix) and i.key > (start_after or "")),
                key=lambda info: info.key,
            )
        )

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the objects; absent keys are fine."""
        for key in keys:
            path = self._path(key)
            try:
                self._remove(path)
            except FileNotFoundError:
                continue
            except Exception as err:
                raise self._translate(err, key) from err

    def close(self) -> None:
        """Nothing is held open that fsspec lets us close."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _read_range(self, path: str, wanted: ByteRange) -> bytes:
        try:
            return bytes(self._fs.cat_file(path, start=wanted.start, end=wanted.end))
        except OSError as err:  # a range that begins past the end: s3fs says EINVAL, others ''
            if err.errno == errno.EINVAL and int(self._info(path)["size"]) <= wanted.start:
                return b""
            raise

    def _info(self, path: str) -> Mapping[str, Any]:
        self._fs.invalidate_cache()
        info: Mapping[str, Any] = self._fs.info(path)
        return info

    def _exists(self, path: str) -> bool:
        try:
            return bool(self._info(path)["type"] == "file")
        except FileNotFoundError:
            return False

    def _remove(self, path: str) -> None:
        try:
            self._fs.rm_file(path)
        except NotImplementedError:  # some file systems have only the general form
            self._fs.rm(path)

    def _compare(self, path: str, key: str, body: bytes) -> PutOutcome:
        if bytes(self._fs.cat_file(path)) != body:
            raise object_exists(self._url, key)
        return PutOutcome.ALREADY_OURS

    def _translate(self, err: Exception, key: str) -> DeltastoreError:
        if isinstance(err, FileNotFoundError | IsADirectoryError | NotADirectoryError):
            return object_missing(self._url, key)
        if isinstance(err, PermissionError):
            return StorageError(
                f"{self._url} refuses these credentials: {err}",
                kind=Kind.CREDENTIALS,
                key=key,
                hint="check the account and its rights",
            )
        if isinstance(err, TimeoutError):
            return StorageError(f"{self._url} did not answer: {err}", kind=Kind.TIMEOUT, key=key)
        if isinstance(err, NotImplementedError):
            return StorageError(
                f"{self._url} cannot do this: {err}",
                kind=Kind.REFUSED,
                key=key,
                hint="use an s3:// or file:// URL",
            )
        # A file system may raise anything; what it is stays visible as the cause.
        return StorageError(
            f"{self._url} failed: {type(err).__name__}: {err}", kind=Kind.UNAVAILABLE, key=key
        )


def _object_info(key: str, info: Mapping[str, Any]) -> ObjectInfo:
    etag = info.get("ETag") or info.get("etag")
    return ObjectInfo(key, int(info["size"]), _modified_s(info), str(etag) if etag else None)


def _modified_s(info: Mapping[str, Any]) -> float:
    for field in _MODIFIED_FIELDS:
        value = info.get(field)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, datetime):
            aware = value if value.tzinfo else value.replace(tzinfo=UTC)
            return aware.timestamp()
    return 0.0  # a file system without dates: everything is old, so nothing may age by it
