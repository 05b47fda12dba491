"""Backends that refuse different keys, or word one failure four ways, are not interchangeable.

What every store refuses and raises is written once, here; `StoreTests` checks that they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.errors import (
    ConflictError,
    FormatError,
    InvalidInputError,
    Kind,
    NotFoundError,
    StorageError,
)

if TYPE_CHECKING:
    from deltastore.storage.store import ByteRange

MAX_KEY_BYTES = 1024  # what S3 allows
MAX_UNRANGED_BYTES = 256 << 20
"""Read without a range: documents, never bodies. Whoever can write to a bucket could otherwise fill
the memory of all who read it."""
TEMPORARY_PREFIX = ".tmp-"
"""File names that begin so are unfinished writes of FileStore, in no listing and no key."""


def check_key(key: str) -> str:
    """Return `key` if every store can hold it, else raise InvalidInputError(name)."""
    parts = key.split("/")
    if any(part in {"", ".", ".."} or part.startswith(TEMPORARY_PREFIX) for part in parts):
        raise _bad_key(key, "relative, without empty, '.' and '..' parts")
    _check_characters(key)
    return key


def is_key(key: str) -> bool:
    """Whether `check_key` accepts it: a listing leaves out what we cannot have written."""
    try:
        check_key(key)
    except InvalidInputError:
        return False
    return True


def check_prefix(prefix: str) -> str:
    """Return `prefix` if keys can begin with it, else raise InvalidInputError(name)."""
    *folders, _ = prefix.split("/")
    if any(part in {"", ".", ".."} for part in folders):
        raise _bad_key(prefix, "relative, without empty, '.' and '..' parts")
    _check_characters(prefix)
    return prefix


def _check_characters(key: str) -> None:
    if any(ord(char) < 32 or char in "\\\x7f" for char in key):
        raise _bad_key(key, "free of control characters and backslashes")
    try:
        encoded = key.encode()
    except UnicodeEncodeError as err:
        raise _bad_key(key, "valid Unicode") from err
    if len(encoded) > MAX_KEY_BYTES:
        raise _bad_key(key[:64] + "...", f"at most {MAX_KEY_BYTES} bytes long")


def _bad_key(key: str, rule: str) -> InvalidInputError:
    return InvalidInputError(
        f"object key {key!r} is not allowed", kind=Kind.NAME, hint=f"be {rule}"
    )


def object_missing(url: str, key: str) -> NotFoundError:
    """The error for a key that holds nothing."""
    return NotFoundError(f"no object in {url}", kind=Kind.OBJECT_MISSING, key=key)


def object_exists(url: str, key: str) -> ConflictError:
    """The error for a create-only put onto other bytes."""
    return ConflictError(
        f"another object is already in {url}",
        kind=Kind.OBJECT_EXISTS,
        key=key,
        hint="somebody else wrote it first; read it, then decide",
    )


def range_past_end(key: str, byte_range: ByteRange, size_bytes: int) -> InvalidInputError:
    """The error for a range that the object does not have."""
    return InvalidInputError(
        f"bytes [{byte_range.start}, {byte_range.end}) are not in an object of {size_bytes} bytes",
        kind=Kind.RANGE,
        key=key,
        hint="the object is shorter than expected: compare its size with the manifest",
    )


def check_unranged(key: str, size_bytes: int) -> None:
    """Refuse to read a whole object that is larger than any document; FormatError(limit)."""
    if size_bytes > MAX_UNRANGED_BYTES:
        raise FormatError(
            f"an object of {size_bytes} bytes is not read whole: the limit is {MAX_UNRANGED_BYTES}",
            kind=Kind.LIMIT,
            key=key,
            hint="read ranges of it; if this should be a manifest, restore it from another region",
        )


def store_closed(url: str) -> StorageError:
    """The error for a call on a store that was closed."""
    return StorageError(f"the store {url} was closed", kind=Kind.UNAVAILABLE, hint="open it again")
