"""A put that silently overwrites loses a version: every put here says what it may replace.

The protocol is what the system needs of a bucket and no more. Implementations: `s3`, `fs`,
`memory`; `deltastore.testing.StoreTests` is the conformance suite each of them passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Body: TypeAlias = bytes | bytearray | memoryview


class PutMode(Enum):
    """What a put may replace. There is no default."""

    CREATE = auto()
    """Nothing: fails if the key exists with other bytes."""
    OVERWRITE = auto()
    """Anything: only for `hints/`, and for repair of a corrupt object."""


class PutOutcome(Enum):
    """What a put that did not raise has done."""

    WRITTEN = auto()
    ALREADY_OURS = auto()
    """The key already held exactly these bytes (a lost response, a repeated put)."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes [start, end) of an object."""

    start: int
    end: int

    def __post_init__(self) -> None:
        """Refuse empty and negative ranges: stores disagree on what they mean."""
        if not 0 <= self.start < self.end:
            raise ValueError(f"byte range [{self.start}, {self.end}) is empty or negative")

    @property
    def size_bytes(self) -> int:
        """How many bytes the range covers."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store says of an object without sending its body."""

    key: str
    size_bytes: int
    last_modified_s: float
    """Unix seconds by the store's own clock."""
    etag: str | None = None
    """An opaque tag of these bytes, never taken for a digest (S17)."""


class ObjectStore(Protocol):
    """Objects under keys in one bucket. Thread-safe; every method blocks until it has an answer.

    Keys are relative to the store's prefix, '/'-separated. Errors: NotFoundError
    (`object_missing`, `bucket_missing`), ConflictError (`object_exists`), StorageError
    (`unavailable`, `throttled`, `timeout`, `credentials`, ...).
    """

    @property
    def url(self) -> str:
        """Where this store is, for people; never with a secret in it."""
        ...

    def put(self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        """Store `body` under `key`, whole or not at all.

        CREATE is atomic among racing writers: exactly one of several different bodies is kept.
        A response that was lost, or an object that exists, is read back and compared: the same
        bytes are ALREADY_OURS, others raise ConflictError(object_exists).

        Args:
            sha256: the body's, in hex, from who knows it already: a store that must sign the bytes
                need not read them once more, and one that checks signatures refuses any others.
        """
        ...

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """The object's bytes, or that range of them; NotFoundError when absent.

        A range past the end of the object raises InvalidInputError, never returns fewer bytes.
        Without a range, an object of more than 256 MiB raises FormatError(limit), unread.
        """
        ...

    def head(self, key: str) -> ObjectInfo:
        """Size and age of the object; NotFoundError when absent."""
        ...

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Every object whose key begins with `prefix`, in key order, fetched page by page."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the objects; absent keys are fine."""
        ...

    def close(self) -> None:
        """Release connections and threads; the store is unusable afterwards."""
        ...
