"""A store that is slow to set up is not used in tests: this one is a dict with the same contract.

Its contents end with the process, so no URL opens it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.clock import Clock, SystemClock
from deltastore.storage.rules import (
    check_key,
    check_prefix,
    check_unranged,
    object_exists,
    object_missing,
    range_past_end,
    store_closed,
)
from deltastore.storage.store import Body, ByteRange, ObjectInfo, PutMode, PutOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(frozen=True, slots=True)
class _Object:
    body: bytes
    modified_s: float
    etag: str


class MemoryStore:
    """An ObjectStore in this process's memory."""

    def __init__(self, name: str = "memory", *, clock: Clock | None = None) -> None:
        self._name = name
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._writes = 0
        self._closed = False

    @property
    def url(self) -> str:
        """Where this store is, for people."""
        return f"memory://{self._name}"

    def put(self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        """Store `body` under `key`; see ObjectStore."""
        check_key(key)
        copy = bytes(body)
        with self._lock:
            self._check_open()
            held = self._objects.get(key)
            if held is not None and mode is PutMode.CREATE:
                if held.body == copy:
                    return PutOutcome.ALREADY_OURS
                raise object_exists(self.url, key)
            self._writes += 1
            self._objects[key] = _Object(copy, self._clock.utc_s(), f"m{self._writes}")
        return PutOutcome.WRITTEN

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """The object's bytes, or that range of them; see ObjectStore."""
        body = self._find(key).body
        if byte_range is None:
            check_unranged(key, len(body))
            return body
        if byte_range.end > len(body):
            raise range_past_end(key, byte_range, len(body))
        return body[byte_range.start : byte_range.end]

    def head(self, key: str) -> ObjectInfo:
        """Size and age of the object; see ObjectStore."""
        return _info(key, self._find(key))

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix`, in key order; see ObjectStore."""
        check_prefix(prefix)
        with self._lock:
            self._check_open()
            found = sorted(
                (key, held)
                for key, held in self._objects.items()
                if key.startswith(prefix) and (start_after is None or key > start_after)
            )
        return iter([_info(key, held) for key, held in found])

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the objects; absent keys are fine."""
        names = [check_key(key) for key in keys]
        with self._lock:
            self._check_open()
            for name in names:
                self._objects.pop(name, None)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._closed = True
            self._objects.clear()

    def _find(self, key: str) -> _Object:
        check_key(key)
        with self._lock:
            self._check_open()
            held = self._objects.get(key)
        if held is None:
            raise object_missing(self.url, key)
        return held

    def _check_open(self) -> None:
        if self._closed:
            raise store_closed(self.url)


def _info(key: str, held: _Object) -> ObjectInfo:
    return ObjectInfo(key, len(held.body), held.modified_s, held.etag)
