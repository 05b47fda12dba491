"""A store opened in five places is counted in four: stores that are watched are opened here.

Whoever counts (metrics, a stager's own counts) implements `StoreObserver`; `open_observed` opens a
store whose calls, bytes and retries it is told of, with the name of the region whose bucket it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypedDict, TypeVar

from deltastore.errors import DeltastoreError
from deltastore.storage.url import open_store
from deltastore.storage.wrapper import StoreWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Unpack

    from deltastore.clock import Clock
    from deltastore.storage.s3_writer import OnPart
    from deltastore.storage.store import (
        Body,
        ByteRange,
        ObjectInfo,
        ObjectStore,
        PutMode,
        PutOutcome,
    )

T = TypeVar("T")


class StoreObserver(Protocol):
    """Is told what passes a store. Called on many threads; must neither block nor raise."""

    def called(self, region: str, op: str, outcome: str, seconds: float) -> None:
        """A call of a region's store has ended, its retries included.

        Args:
            op: put, get, head, list or delete.
            outcome: `ok`, or the kind of the error that was raised.
        """
        ...

    def moved(self, region: str, *, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        """A body has passed."""
        ...

    def retried(self, region: str, err: DeltastoreError) -> None:
        """A request is made again because of `err`."""
        ...


@dataclass(frozen=True, slots=True)
class Observers:
    """A StoreObserver that tells several."""

    told: tuple[StoreObserver, ...]

    def called(self, region: str, op: str, outcome: str, seconds: float) -> None:
        """A call has ended; see StoreObserver."""
        for one in self.told:
            one.called(region, op, outcome, seconds)

    def moved(self, region: str, *, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        """A body has passed."""
        for one in self.told:
            one.moved(region, sent_bytes=sent_bytes, received_bytes=received_bytes)

    def retried(self, region: str, err: DeltastoreError) -> None:
        """A request is made again because of `err`."""
        for one in self.told:
            one.retried(region, err)


class StoreOptions(TypedDict, total=False):
    """How to reach a store; see `open_store`."""

    endpoint_url: str | None
    region: str | None
    profile: str | None
    access_key: str | None
    secret_key: str | None
    session_token: str | None
    streams: int
    on_part: OnPart | None


def open_observed(
    url: str,
    observer: StoreObserver | None,
    region_name: str,
    *,
    clock: Clock,
    **options: Unpack[StoreOptions],
) -> ObjectStore:
    """The store at `url`, as `open_store` opens it; `observer` is told what passes it.

    Args:
        observer: None: nobody is told.
        region_name: what the observer hears the bucket called. (`region` is what S3 calls it.)
    """
    if observer is None:
        return open_store(url, clock=clock, **options)
    on_retry = partial(observer.retried, region_name)
    store = open_store(url, clock=clock, on_retry=on_retry, **options)
    return ObservedStore(store, observer, region=region_name, clock=clock)


class ObservedStore(StoreWrapper):
    """A store whose calls, bytes and seconds an observer is told of; failures by kind."""

    def __init__(
        self, inner: ObjectStore, observer: StoreObserver, *, region: str, clock: Clock
    ) -> None:
        super().__init__(inner)
        self._observer = observer
        self._region = region
        self._clock = clock

    def put(self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        """A counted put."""
        outcome = self._call("put", lambda: self.inner.put(key, body, mode=mode, sha256=sha256))
        self._observer.moved(self._region, sent_bytes=memoryview(body).nbytes)
        return outcome

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """A counted get."""
        body = self._call("get", lambda: self.inner.get(key, byte_range))
        self._observer.moved(self._region, received_bytes=len(body))
        return body

    def head(self, key: str) -> ObjectInfo:
        """A counted head."""
        return self._call("head", lambda: self.inner.head(key))

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """A counted listing, one however many pages it has; counted when it ends."""
        return self._listed(self.inner.list(prefix, start_after=start_after))

    def delete(self, keys: Iterable[str]) -> None:
        """A counted deletion, one however many keys it has."""
        self._call("delete", lambda: self.inner.delete(keys))

    def _listed(self, found: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        """Pages are fetched as they are read: what the reader does between is not counted."""
        seconds, outcome = 0.0, "ok"
        try:
            while True:
                started_s = self._clock.monotonic_s()
                try:
                    info = next(found)
                except StopIteration:
                    return
                except DeltastoreError as err:
                    outcome = err.kind.value
                    raise
                finally:
                    seconds += self._clock.monotonic_s() - started_s
                yield info
        finally:
            self._observer.called(self._region, "list", outcome, seconds)

    def _call(self, op: str, call: Callable[[], T]) -> T:
        started_s = self._clock.monotonic_s()
        outcome = "ok"
        try:
            return call()
        except DeltastoreError as err:
            outcome = err.kind.value
            raise
        finally:
            seconds = self._clock.monotonic_s() - started_s
            self._observer.called(self._region, op, outcome, seconds)
