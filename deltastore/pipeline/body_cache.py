"""Bodies read twice cross the region's line twice: what was read ahead, or a moment ago, is kept.

Wraps the store of a run for reading. Segments are named by their contents, so a body whose SHA-256
is the one in its key is what the key means, whoever asked for it and whenever.

*Early staging*: a publisher announces segments as home confirms them, before their version exists.
Announcements are hints: they are bounded, nothing is believed of them, and what no manifest names
is dropped when the versions have passed it. Nothing is used before its manifest names it.

Memory: `max_bytes` of bodies, the ones being read ahead included.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from deltastore.errors import DeltastoreError, FormatError
from deltastore.format.keys import KeyKind, ParsedKey, parse_key
from deltastore.ids import MAX_VERSION
from deltastore.storage.store import ByteRange
from deltastore.storage.wrapper import StoreWrapper

if TYPE_CHECKING:
    from deltastore.storage.store import ObjectStore

AHEAD_STREAMS = 4
MAX_AHEAD = 256
"""Announcements under way: more are ignored."""
MAX_VERSIONS_AHEAD = 4
"""How far above the newest version that was read an announcement may be."""


class BodyCache(StoreWrapper):
    """A store that keeps segments that were read lately, or announced, up to `max_bytes`."""

    def __init__(self, inner: ObjectStore, run: str, *, max_bytes: int) -> None:
        super().__init__(inner)
        self._run = run
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._bodies: OrderedDict[str, bytes] = OrderedDict()
        self._used_bytes = 0
        self._reserved: dict[str, int] = {}
        self._floor = -1
        self._pool = ThreadPoolExecutor(AHEAD_STREAMS, thread_name_prefix="ahead")
        self.refused = 0
        """Announcements that were not followed, or led to nothing."""

    @property
    def held_bytes(self) -> int:
        """Bytes of bodies held and reserved."""
        with self._lock:
            return self._used_bytes + sum(self._reserved.values())

    def announce(self, key: str, size_bytes: int) -> bool:
        """Somebody says that this segment exists; whether it will be read ahead. Never blocks."""
        parsed = self._segment(key)
        with self._lock:
            wanted = (
                parsed is not None
                and parsed.version is not None
                and self._floor < parsed.version <= self._floor + MAX_VERSIONS_AHEAD
                and key not in self._bodies
                and key not in self._reserved
                and len(self._reserved) < MAX_AHEAD
                and size_bytes > 0
                and self._used_bytes + sum(self._reserved.values()) + size_bytes <= self._max_bytes
            )
            if not wanted:
                self.refused += 1
                return False
            self._reserved[key] = size_bytes
        self._pool.submit(self._read_ahead, key, size_bytes)
        return True

    def passed(self, version: int) -> None:
        """The versions up to this one have been read: bodies of theirs are not needed again."""
        with self._lock:
            self._floor = max(self._floor, min(version, MAX_VERSION))
            for key in list(self._bodies):
                parsed = parse_key(key)
                if parsed.version is not None and parsed.version <= self._floor:
                    self._used_bytes -= len(self._bodies.pop(key))

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """The object's bytes; a whole segment that is held costs no request."""
        with self._lock:
            held = self._bodies.get(key)
        if held is not None and byte_range in {None, ByteRange(0, len(held))}:
            return held
        body = self.inner.get(key, byte_range)
        whole = byte_range is None or byte_range.start == 0
        if whole and self._is_its_own(key, body):
            self._keep(key, body)
        return body

    def close(self) -> None:
        """Stop reading ahead, forget everything, close the inner store."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._bodies.clear()
            self._used_bytes = 0
        self.inner.close()

    def _read_ahead(self, key: str, size_bytes: int) -> None:
        body = b""
        try:
            body = self.inner.get(key, ByteRange(0, size_bytes))
        except DeltastoreError:
            with self._lock:
                self.refused += 1  # not there, or not so long: it is read when a manifest names it
        finally:
            with self._lock:
                self._reserved.pop(key, None)
        if body and self._is_its_own(key, body):
            self._keep(key, body)

    def _keep(self, key: str, body: bytes) -> None:
        with self._lock:
            parsed = parse_key(key)
            late = parsed.version is not None and parsed.version <= self._floor
            if late or key in self._bodies:
                return
            room = self._max_bytes - sum(self._reserved.values())
            while self._bodies and self._used_bytes + len(body) > room:
                self._used_bytes -= len(self._bodies.popitem(last=False)[1])
            if self._used_bytes + len(body) <= room:
                self._bodies[key] = body
                self._used_bytes += len(body)

    def _is_its_own(self, key: str, body: bytes) -> bool:
        """Whether these bytes are the ones that a segment's key names."""
        parsed = self._segment(key)
        return parsed is not None and key.endswith(f"-{hashlib.sha256(body).hexdigest()}.seg")

    def _segment(self, key: str) -> ParsedKey | None:
        try:
            parsed = parse_key(key)
        except FormatError:
            return None
        kinds = {KeyKind.SEGMENT, KeyKind.COMPOSITE_SEGMENT}
        return parsed if parsed.run == self._run and parsed.kind in kinds else None
