"""Transfers without a limit fill memory; without digests they fill it with noise.

`fetch_all` reads many objects at once and hands them out in order, verified. `Uploader` sends many
at once and blocks who submits too much. Both hold a bounded number of bytes; whatever ends them,
every future resolves.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Self, TypeAlias

from deltastore.errors import IntegrityError, InvalidInputError, Kind, NotFoundError
from deltastore.ids import is_sha256
from deltastore.storage.store import Body, ByteRange, ObjectStore, PutMode, PutOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

OnBytes: TypeAlias = "Callable[[int, int], None]"
"""Told, on any thread, that so many bytes more have arrived, and so many more are on their way.

It must neither block nor raise.
"""
DEFAULT_STREAMS = 8
DEFAULT_PENDING_BYTES = 256 << 20
_READS = 2  # once, and once more when the bytes were wrong: a cache or a cable may have lied


@dataclass(frozen=True, slots=True)
class FetchItem:
    """An object to read, and what its bytes must be."""

    key: str
    size_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if self.size_bytes < 0 or not is_sha256(self.sha256):
            raise InvalidInputError(
                f"cannot fetch {self.size_bytes} bytes with SHA-256 {self.sha256!r}",
                kind=Kind.PAYLOAD,
                key=self.key,
                hint="give a size and 64 lower-case hex digits",
            )


@dataclass(frozen=True, slots=True)
class Fetched:
    """A verified body."""

    item: FetchItem
    body: bytes


def fetch(store: ObjectStore, item: FetchItem) -> Fetched:
    """Read one object and verify it; wrong bytes are read once more, then IntegrityError(digest).

    An object that is named but not found is looked for once more too: a proxy or a lagging copy may
    have said so. No more than `size_bytes` are ever read, whatever lies under the key.
    """
    for left in reversed(range(_READS)):
        try:
            body = _read(store, item)
        except NotFoundError as err:
            if err.kind is not Kind.OBJECT_MISSING or not left:
                raise
            continue
        if body is not None and hashlib.sha256(body).hexdigest() == item.sha256:
            return Fetched(item, body)
    raise IntegrityError(
        f"the object in {store.url} is not what its manifest names, twice",
        kind=Kind.DIGEST,
        key=item.key,
        hint="quarantine it and take another way: another region, a composite, an anchor",
    )


def fetch_all(
    store: ObjectStore, items: Sequence[FetchItem], *, streams: int = DEFAULT_STREAMS
) -> Iterator[Fetched]:
    """The objects, verified, in the order given; at most `streams` in memory beside the one out.

    The first failure in order is raised. Closing the iterator starts nothing more and waits for the
    reads in flight.
    """
    _check_streams(streams)
    return _fetch_all(store, items, min(streams, max(1, len(items))))


def _fetch_all(store: ObjectStore, items: Sequence[FetchItem], streams: int) -> Iterator[Fetched]:
    waiting = iter(items)
    running: deque[Future[Fetched]] = deque()
    pool = ThreadPoolExecutor(streams, thread_name_prefix="fetch")
    try:
        running.extend(pool.submit(fetch, store, item) for item in islice(waiting, streams))
        while running:
            fetched = running.popleft().result()
            running.extend(pool.submit(fetch, store, item) for item in islice(waiting, 1))
            yield fetched
            del fetched
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _read(store: ObjectStore, item: FetchItem) -> bytes | None:
    if not item.size_bytes:  # an empty object has no range to ask for (S7)
        return b"" if store.head(item.key).size_bytes == 0 else None
    try:
        return store.get(item.key, ByteRange(0, item.size_bytes))
    except InvalidInputError as err:
        if err.kind is not Kind.RANGE:
            raise
        return None  # shorter than the manifest says


class Uploader:
    """A bounded pool of threads that put objects.

    Args:
        streams: puts in flight.
        max_pending_bytes: bodies submitted and not yet resolved; `submit` blocks above it. One
            larger body passes when nothing else is pending.
        on_bytes: told of every body when it is submitted, and again when it has been put.

    As a context manager it waits for all puts at the end of the block, or cancels those that have
    not started when the block raises.
    """

    def __init__(
        self,
        *,
        streams: int = DEFAULT_STREAMS,
        max_pending_bytes: int = DEFAULT_PENDING_BYTES,
        on_bytes: OnBytes | None = None,
    ) -> None:
        _check_streams(streams)
        if max_pending_bytes < 1:
            raise InvalidInputError(
                f"max_pending_bytes = {max_pending_bytes} is not possible",
                kind=Kind.SETTING,
                hint="use at least one segment's bytes",
            )
        self._max_pending_bytes = max_pending_bytes
        self._on_bytes = on_bytes
        self._pool = ThreadPoolExecutor(streams, thread_name_prefix="upload")
        self._changed = threading.Condition()
        self._pending_bytes = 0
        self._pending: set[Future[PutOutcome]] = set()
        self._open = True

    @property
    def pending_bytes(self) -> int:
        """Bytes of bodies that are submitted and not yet resolved."""
        with self._changed:
            return self._pending_bytes

    def submit(
        self,
        store: ObjectStore,
        key: str,
        body: Body,
        mode: PutMode,
        *,
        sha256: str | None = None,
    ) -> Future[PutOutcome]:
        """Put `body` on a thread of the pool; `body` must not change until the future resolves.

        `sha256` is the body's, if it is known; see ObjectStore.put.

        Raises CancelledError when the uploader is, or meanwhile gets, closed or cancelled.
        """
        size_bytes = memoryview(body).nbytes
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._fits(size_bytes))
            if not self._open:
                raise CancelledError(f"the uploader is closed; {key} was not sent")
            future = self._pool.submit(store.put, key, body, mode=mode, sha256=sha256)
            self._pending_bytes += size_bytes
            self._pending.add(future)
        if self._on_bytes is not None:
            self._on_bytes(0, size_bytes)
        # Outside the lock: a future that is done already calls back on this thread.
        future.add_done_callback(lambda done: self._resolved(done, size_bytes))
        return future

    def cancel(self) -> None:
        """Refuse new bodies and cancel the puts that have not started; those in flight end."""
        with self._changed:
            self._open = False
            pending = list(self._pending)
            self._changed.notify_all()
        for future in pending:
            future.cancel()

    def close(self) -> None:
        """Refuse new bodies and wait until every future is resolved."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        self._pool.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.cancel()
        self.close()

    def _fits(self, size_bytes: int) -> bool:
        return not self._pending or self._pending_bytes + size_bytes <= self._max_pending_bytes

    def _resolved(self, future: Future[PutOutcome], size_bytes: int) -> None:
        with self._changed:
            self._pending.discard(future)
            self._pending_bytes -= size_bytes
            self._changed.notify_all()
        put = not future.cancelled() and future.exception() is None
        if put and self._on_bytes is not None:
            self._on_bytes(size_bytes, 0)


def _check_streams(streams: int) -> None:
    if not 1 <= streams <= 256:
        raise InvalidInputError(
            f"streams = {streams} is not possible", kind=Kind.SETTING, hint="use 1 to 256"
        )
