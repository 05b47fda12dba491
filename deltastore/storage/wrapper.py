"""Latency, faults, counters and limits as flags inside a store make every store different.

They wrap one instead: override what changes, the rest goes through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deltastore.storage.store import (
        Body,
        ByteRange,
        ObjectInfo,
        ObjectStore,
        PutMode,
        PutOutcome,
    )


class StoreWrapper:
    """An ObjectStore that passes every call to another one."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        """Where the inner store is."""
        return self.inner.url

    @property
    def create_is_atomic(self) -> bool:
        """What the inner store says of itself; the probe asks."""
        return bool(getattr(self.inner, "create_is_atomic", True))

    def put(self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        """Pass a put on."""
        return self.inner.put(key, body, mode=mode, sha256=sha256)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Pass a get on."""
        return self.inner.get(key, byte_range)

    def head(self, key: str) -> ObjectInfo:
        """Pass a head on."""
        return self.inner.head(key)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Pass a listing on."""
        return self.inner.list(prefix, start_after=start_after)

    def delete(self, keys: Iterable[str]) -> None:
        """Pass a deletion on."""
        self.inner.delete(keys)

    def close(self) -> None:
        """Close the inner store."""
        self.inner.close()
