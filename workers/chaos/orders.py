"""A process that must be restarted to fail differently fails like no machine: it takes orders.

The director writes an actor's orders into a file, the actor looks at it whenever it could matter:
how slow to be, how many of its next results and reads to damage, how wrong its wall clock is.
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from deltastore.clock import SystemClock
from deltastore.storage.wrapper import StoreWrapper
from workers.run_folder import write_whole_file

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.storage.store import Body, ByteRange, ObjectStore, PutMode, PutOutcome

LOOK_S = 0.2
_RESULTS, _CHANGES = "/rollouts/", "/deltas/"


@dataclass(frozen=True, slots=True)
class Orders:
    """How an actor misbehaves from now on.

    Args:
        number: orders with a number not seen yet begin their counts anew.
        slow: how many times slower than usual it generates.
        flip_results, cut_results, flip_reads: how many of its next uploads and reads are damaged.
        clock_step_s: how far its wall clock is off.
        clock_ahead_s: how far its monotonic clock is ahead, as after a suspended machine; grows.
    """

    number: int = 0
    slow: float = 1.0
    flip_results: int = 0
    cut_results: int = 0
    flip_reads: int = 0
    clock_step_s: float = 0.0
    clock_ahead_s: float = 0.0

    def write(self, path: Path) -> None:
        """Give these orders."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole_file(path, json.dumps(asdict(self)).encode())


class OrderBook:
    """The orders in a file as one process sees them, and what of them is left to do."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._orders = Orders()

    def read(self) -> Orders:
        """The present orders."""
        with self._lock:
            return self._read()

    def take(self, name: str) -> bool:
        """Whether one more of `flip_results`, `cut_results`, `flip_reads` is ordered; use it up."""
        with self._lock:
            left = getattr(self._read(), name)
            if left > 0:
                self._orders = replace(self._orders, **{name: left - 1})
            return bool(left > 0)

    def _read(self) -> Orders:
        try:
            found = Orders(**json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return self._orders
        if found.number != self._orders.number:
            self._orders = found
        return self._orders


class SpoilingStore(StoreWrapper):
    """A region's store as a failing machine sees it: some bodies are damaged on their way."""

    def __init__(self, inner: ObjectStore, book: OrderBook) -> None:
        super().__init__(inner)
        self._book = book

    def put(self, key: str, body: Body, *, mode: PutMode) -> PutOutcome:
        """A put; a result may be stored with a flipped bit, or cut short."""
        if _RESULTS in key:
            if self._book.take("flip_results"):
                body = flipped(bytes(body))
            elif self._book.take("cut_results"):
                body = bytes(body)[: len(body) // 2]
        return self.inner.put(key, body, mode=mode)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """A get; a segment may arrive with a flipped bit."""
        body = self.inner.get(key, byte_range)
        if _CHANGES in key and self._book.take("flip_reads"):
            return flipped(body)
        return body


class SteppedClock(SystemClock):
    """The machine's clocks, off by what the orders say; the monotonic one never goes back."""

    def __init__(self, book: OrderBook) -> None:
        self._book = book
        self._ahead_s = 0.0
        self._look_at_s = 0.0

    def monotonic_s(self) -> float:
        """Seconds on a clock that may jump ahead. It is asked all the time: looks now and then."""
        now_s = super().monotonic_s()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            self._ahead_s = max(self._ahead_s, self._book.read().clock_ahead_s)
        return now_s + self._ahead_s

    def utc_s(self) -> float:
        """Unix time as this machine believes it to be."""
        return super().utc_s() + self._book.read().clock_step_s


def flipped(body: bytes) -> bytes:
    """The body with one bit in its middle flipped."""
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 0x10]) + body[middle + 1 :] if body else body
