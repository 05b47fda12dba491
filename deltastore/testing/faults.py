"""What a network does to a program is rarely tried before it happens: here it is data.

A `Fault` says at which call what goes wrong. The other wrappers count requests, and slow them down
on a Clock. They stack in any order around any store.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from deltastore.errors import Kind, StorageError
from deltastore.storage.wrapper import StoreWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from deltastore.clock import Clock
    from deltastore.storage.store import (
        Body,
        ByteRange,
        ObjectInfo,
        ObjectStore,
        PutMode,
        PutOutcome,
    )


class Op(StrEnum):
    """The calls of a store."""

    PUT = "put"
    GET = "get"
    HEAD = "head"
    LIST = "list"
    DELETE = "delete"


def unavailable() -> StorageError:
    """The error of a store that does not answer."""
    return StorageError("the store does not answer (injected)", kind=Kind.UNAVAILABLE)


@dataclass(frozen=True, slots=True)
class Fail:
    """The call raises and the store is not touched."""

    error: Callable[[], Exception] = unavailable


@dataclass(frozen=True, slots=True)
class LoseResponse:
    """The call takes effect, then raises: its answer was lost."""

    error: Callable[[], Exception] = unavailable


@dataclass(frozen=True, slots=True)
class Truncate:
    """A get returns only the first `keep_bytes`; a put stores only those."""

    keep_bytes: int


@dataclass(frozen=True, slots=True)
class Corrupt:
    """A get returns, or a put stores, the bytes with one bit of byte `at_byte` flipped."""

    at_byte: int = 0


@dataclass(frozen=True, slots=True)
class Callback:
    """Something is done just before the call, or just after it: kill a process, write a rival."""

    action: Callable[[], None]
    after: bool = False


Action: TypeAlias = Fail | LoseResponse | Truncate | Corrupt | Callback


@dataclass(frozen=True, slots=True)
class Fault:
    """The `nth` call (from 1) of `op` whose key contains `key_contains`, and `times` - 1 more."""

    op: Op
    nth: int
    action: Action
    key_contains: str = ""
    times: int = 1

    def hits(self, count: int) -> bool:
        """Whether the call with this number is one of them."""
        return self.nth <= count < self.nth + self.times


def fail_at(
    op: Op, nth: int, action: Action | None = None, *, key_contains: str = "", times: int = 1
) -> Fault:
    """A Fault; by default the store does not answer."""
    return Fault(op, nth, action or Fail(), key_contains, times)


class FaultyStore(StoreWrapper):
    """A store on which the given faults happen. `fired` lists those that did, in order."""

    def __init__(self, inner: ObjectStore, faults: Iterable[Fault] = ()) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._faults: list[tuple[Fault, list[int]]] = [(fault, [0]) for fault in faults]
        self.fired: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Let another fault happen; its calls are counted from now."""
        with self._lock:
            self._faults.append((fault, [0]))

    def clear(self) -> None:
        """Let no further fault happen."""
        with self._lock:
            self._faults.clear()

    def put(self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        """A put, perhaps disturbed."""
        actions = self._begin(Op.PUT, key)
        if actions:  # what arrives may be other bytes: of those nothing is known
            body, sha256 = _damage(bytes(body), actions), None
        outcome = self.inner.put(key, body, mode=mode, sha256=sha256)
        _finish(actions)
        return outcome

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """A get, perhaps disturbed."""
        actions = self._begin(Op.GET, key)
        body = self.inner.get(key, byte_range)
        _finish(actions)
        return _damage(body, actions)

    def head(self, key: str) -> ObjectInfo:
        """A head, perhaps disturbed."""
        actions = self._begin(Op.HEAD, key)
        info = self.inner.head(key)
        _finish(actions)
        return info

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """A listing, perhaps disturbed."""
        actions = self._begin(Op.LIST, prefix)
        found = self.inner.list(prefix, start_after=start_after)
        _finish(actions)
        return found

    def delete(self, keys: Iterable[str]) -> None:
        """A deletion, perhaps disturbed."""
        names = tuple(keys)
        actions = self._begin(Op.DELETE, " ".join(names))
        self.inner.delete(names)
        _finish(actions)

    def _begin(self, op: Op, key: str) -> tuple[Action, ...]:
        actions: list[Action] = []
        with self._lock:
            for fault, count in self._faults:
                if fault.op is op and fault.key_contains in key:
                    count[0] += 1
                    if fault.hits(count[0]):
                        self.fired.append(fault)
                        actions.append(fault.action)
        for action in actions:
            if isinstance(action, Callback) and not action.after:
                action.action()
        for action in actions:
            if isinstance(action, Fail):
                raise action.error()
        return tuple(actions)


def _finish(actions: Iterable[Action]) -> None:
    for action in actions:
        if isinstance(action, Callback) and action.after:
            action.action()
    for action in actions:
        if isinstance(action, LoseResponse):
            raise action.error()


def _damage(body: bytes, actions: Iterable[Action]) -> bytes:
    for action in actions:
        if isinstance(action, Truncate):
            body = body[: action.keep_bytes]
        if isinstance(action, Corrupt) and action.at_byte < len(body):
            flipped = bytearray(body)
            flipped[action.at_byte] ^= 1
            body = bytes(flipped)
    return body


class LatencyStore(StoreWrapper):
    """A store that answers every call `request_s` later."""

    def __init__(self, inner: ObjectStore, *, request_s: float, clock: Clock) -> None:
        super().__init__(inner)
        self._request_s = request_s
        self._clock = clock

    def put(self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        """A put, later."""
        self._clock.sleep_s(self._request_s)
        return self.inner.put(key, body, mode=mode, sha256=sha256)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """A get, later."""
        self._clock.sleep_s(self._request_s)
        return self.inner.get(key, byte_range)

    def head(self, key: str) -> ObjectInfo:
        """A head, later."""
        self._clock.sleep_s(self._request_s)
        return self.inner.head(key)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """A listing, later."""
        self._clock.sleep_s(self._request_s)
        return self.inner.list(prefix, start_after=start_after)

    def delete(self, keys: Iterable[str]) -> None:
        """A deletion, later."""
        self._clock.sleep_s(self._request_s)
        self.inner.delete(keys)


class BandwidthStore(StoreWrapper):
    """A store behind a line of `bytes_per_s` each way, shared by all threads that use it."""

    def __init__(self, inner: ObjectStore, *, bytes_per_s: float, clock: Clock) -> None:
        super().__init__(inner)
        if bytes_per_s <= 0:
            raise ValueError("a line has a speed above 0")
        self._clock = clock
        self._up = _Line(bytes_per_s, clock)
        self._down = _Line(bytes_per_s, clock)

    def put(self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        """A put that takes its time."""
        self._clock.sleep_s(self._up.reserve_s(memoryview(body).nbytes))
        return self.inner.put(key, body, mode=mode, sha256=sha256)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """A get that takes its time."""
        body = self.inner.get(key, byte_range)
        self._clock.sleep_s(self._down.reserve_s(len(body)))
        return body


class _Line:
    """One direction of a line: who sends waits until what was sent before has passed."""

    def __init__(self, bytes_per_s: float, clock: Clock) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at_s = clock.monotonic_s()

    def reserve_s(self, size_bytes: int) -> float:
        """How long to wait from now until these bytes have passed."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self._bytes_per_s
            return self._free_at_s - now_s


@dataclass(frozen=True, slots=True)
class Traffic:
    """What has passed a CountingStore. Failed calls count as requests, without bytes."""

    requests: Mapping[Op, int] = field(default_factory=dict)
    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def total_requests(self) -> int:
        """Requests of all kinds."""
        return sum(self.requests.values())


class CountingStore(StoreWrapper):
    """A store that counts its calls and the bytes of their bodies."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self._lock = threading.Lock()
        self._requests: Counter[Op] = Counter()
        self._sent_bytes = 0
        self._received_bytes = 0

    @property
    def traffic(self) -> Traffic:
        """What has passed so far."""
        with self._lock:
            return Traffic(dict(self._requests), self._sent_bytes, self._received_bytes)

    def put(self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        """A counted put."""
        self._count(Op.PUT)
        outcome = self.inner.put(key, body, mode=mode, sha256=sha256)
        with self._lock:
            self._sent_bytes += memoryview(body).nbytes
        return outcome

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """A counted get."""
        self._count(Op.GET)
        body = self.inner.get(key, byte_range)
        with self._lock:
            self._received_bytes += len(body)
        return body

    def head(self, key: str) -> ObjectInfo:
        """A counted head."""
        self._count(Op.HEAD)
        return self.inner.head(key)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """A counted listing."""
        self._count(Op.LIST)
        return self.inner.list(prefix, start_after=start_after)

    def delete(self, keys: Iterable[str]) -> None:
        """A counted deletion, one however many keys it has."""
        self._count(Op.DELETE)
        self.inner.delete(keys)

    def _count(self, op: Op) -> None:
        with self._lock:
            self._requests[op] += 1
