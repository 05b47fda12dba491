"""A process that must be restarted to fail differently fails like no machine: it takes orders.

The director writes an actor's orders into a file, the actor looks at it whenever it could matter:
how slow to be, how many results and reads to damage, how wrong its clocks are. What it did it
writes down: orders count what is wanted in all, deeds what was done in all, over all its lives.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from deltastore.clock import SystemClock
from deltastore.storage.wrapper import StoreWrapper
from workers.chaos.deeds import (
    CLOCK_AHEAD,
    CLOCK_STEP,
    CUT_RESULTS,
    FLIP_READS,
    FLIP_RESULTS,
    READ_AGAIN,
    STORED,
    Deed,
    DeedLog,
)
from workers.run_folder import write_whole_file

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.storage.store import Body, ByteRange, ObjectStore, PutMode, PutOutcome
    from workers.run_folder import RunFolder

LOOK_S = 0.2
_RESULTS, _CHANGES = "/rollouts/", "/deltas/"


def orders_file(folder: RunFolder, actor_id: str) -> Path:
    """Where an actor's orders are."""
    return folder.path / "orders" / f"{actor_id}.json"


def deeds_file(folder: RunFolder, actor_id: str) -> Path:
    """Where an actor writes down what it did."""
    return folder.path / "orders" / f"{actor_id}.deeds.jsonl"


@dataclass(frozen=True, slots=True)
class Orders:
    """How an actor misbehaves from now on.

    Args:
        number: grows with every change; deeds name it.
        slow: how many times slower than usual it generates.
        flip_results, cut_results, flip_reads: how many uploads and reads it damages, in all.
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
    """The orders in a file as one process sees them, and what of them was done. Thread-safe."""

    def __init__(self, path: Path, log: DeedLog) -> None:
        self._path = path
        self._log = log
        self._lock = threading.Lock()
        self._done = Counter(deed.what for deed in log.read_new())
        self._noted: dict[str, int] = {}

    def read(self) -> Orders:
        """The present orders."""
        try:
            return Orders(**json.loads(self._path.read_bytes()))
        except FileNotFoundError:
            return Orders()

    def left(self, what: str) -> bool:
        """Whether one more of `flip_results`, `cut_results`, `flip_reads` is to be done."""
        with self._lock:
            return bool(getattr(self.read(), what) > self._done[what])

    def take(self, what: str, about: str) -> bool:
        """The same, and if so it is done now: write it down."""
        with self._lock:
            orders = self.read()
            if getattr(orders, what) <= self._done[what]:
                return False
            self._done[what] += 1
            self._log.append(Deed(what, orders.number, about))
            return True

    def note(self, what: str, about: str = "") -> None:
        """Write down something else that was done."""
        self._log.append(Deed(what, self.read().number, about))

    def note_once(self, what: str, orders: Orders) -> None:
        """Write down that what lasts is in effect, once under the same orders."""
        with self._lock:
            if self._noted.get(what) == orders.number:
                return
            self._noted[what] = orders.number
            self._log.append(Deed(what, orders.number))


class SpoilingStore(StoreWrapper):
    """A region's store as a failing machine sees it: some bodies are damaged on their way.

    One thread puts results.
    """

    def __init__(self, inner: ObjectStore, book: OrderBook) -> None:
        super().__init__(inner)
        self._book = book
        self._flipped: set[str] = set()

    def put(self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        """A put; a result may be stored with a flipped bit, or cut short."""
        if _RESULTS not in key:
            return self.inner.put(key, body, mode=mode, sha256=sha256)
        job_id = key.split("/")[-2]
        if self._book.left(FLIP_RESULTS):
            outcome = self.inner.put(key, flipped(bytes(body)), mode=mode)
            self._book.take(FLIP_RESULTS, job_id)
        elif self._book.left(CUT_RESULTS):
            outcome = self.inner.put(key, bytes(body)[: len(body) // 2], mode=mode)
            self._book.take(CUT_RESULTS, job_id)
        else:
            outcome = self.inner.put(key, body, mode=mode, sha256=sha256)
            self._book.note(STORED, job_id)
        return outcome

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """A get; a segment may arrive with a flipped bit."""
        body = self.inner.get(key, byte_range)
        if _CHANGES not in key or not body:
            return body
        if self._book.take(FLIP_READS, key):
            self._flipped.add(key)
            return flipped(body)
        if key in self._flipped and hashlib.sha256(body).hexdigest() in key:
            self._flipped.discard(key)
            self._book.note(READ_AGAIN, key)
        return body


class SteppedClock(SystemClock):
    """The machine's clocks, off by what the orders say; the monotonic one never goes back."""

    def __init__(self, book: OrderBook) -> None:
        self._book = book
        orders = book.read()  # a clock that is wrong from the start does not step
        self._ahead_s = orders.clock_ahead_s
        self._step_s = orders.clock_step_s
        self._look_at_s = 0.0

    def monotonic_s(self) -> float:
        """Seconds on a clock that may jump ahead. It is asked all the time: looks now and then."""
        now_s = super().monotonic_s()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            orders = self._book.read()
            if orders.clock_ahead_s > self._ahead_s:
                self._ahead_s = orders.clock_ahead_s
                self._book.note_once(CLOCK_AHEAD, orders)
        return now_s + self._ahead_s

    def utc_s(self) -> float:
        """Unix time as this machine believes it to be."""
        orders = self._book.read()
        if orders.clock_step_s != self._step_s:
            self._step_s = orders.clock_step_s
            self._book.note_once(CLOCK_STEP, orders)
        return super().utc_s() + self._step_s


def flipped(body: bytes) -> bytes:
    """The body with one bit in its middle flipped."""
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 0x10]) + body[middle + 1 :] if body else body
