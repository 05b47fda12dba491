"""Some stores accept If-None-Match and ignore it: two trainers then both commit version 7 (S2).

What a run's home must do is tried out before the first version, with real requests, two of them
racing; a store that fails may be a relay, never a home. What is good to know, and nothing depends
on, is tried too: a store says what more there is by `probe_more`.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from deltastore.errors import (
    ConflictError,
    DeltastoreError,
    InvalidInputError,
    Kind,
    NotFoundError,
    StorageError,
)
from deltastore.ids import new_token
from deltastore.storage.store import ByteRange, ObjectStore, PutMode, PutOutcome
from deltastore.storage.wrapper import StoreWrapper

if TYPE_CHECKING:
    from collections.abc import Mapping

PROBE_PREFIX = ".probe/"
_RACE_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether the store does one thing, and what was seen."""

    ok: bool
    note: str


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What a store does, each found out by trying."""

    url: str
    create_only: Finding
    create_only_race: Finding
    read_after_write: Finding
    absent_is_404: Finding
    ranged_reads: Finding
    listing_order: Finding
    more: Mapping[str, Finding] = field(default_factory=dict)
    """What only this kind of store can be asked; a home needs none of it."""

    def required(self) -> dict[str, Finding]:
        """What a home must do, by name, in the order in which it was tried."""
        return {
            "absent_is_404": self.absent_is_404,
            "read_after_write": self.read_after_write,
            "create_only": self.create_only,
            "create_only_race": self.create_only_race,
            "ranged_reads": self.ranged_reads,
            "listing_order": self.listing_order,
        }

    def findings(self) -> dict[str, Finding]:
        """Everything, by name, in the order in which it was tried."""
        return {**self.required(), **self.more}

    @property
    def may_be_home(self) -> bool:
        """Whether all that a home must do was found to work."""
        return all(found.ok for found in self.required().values())


@runtime_checkable
class ProbesMore(Protocol):
    """A store that can be asked more than every other one."""

    def probe_more(self, prefix: str, race_rounds: int) -> Mapping[str, Finding]:
        """Findings by name; whatever is written lies under `prefix`, and the caller deletes it."""
        ...


@runtime_checkable
class KeepsFolders(Protocol):
    """A store in which the folder of a prefix outlives its last object."""

    def remove_empty(self, prefix: str) -> None:
        """Remove the folders below the prefix, its own, and those above, as far as empty."""
        ...


def probe_store(store: ObjectStore, *, race_rounds: int = 4, ask_more: bool = False) -> ProbeReport:
    """Try the store out under `.probe/<random>/`, and delete what was written.

    With `ask_more` also what a home does not need (`ProbeReport.more`), which takes as long again.
    Refused credentials, a missing bucket and a store that does not answer are raised: then nothing
    can be found out.
    """
    probe = _Probe(store, f"{PROBE_PREFIX}{new_token()}/")
    try:
        return ProbeReport(
            url=store.url,
            absent_is_404=probe.absent_is_404(),
            read_after_write=probe.read_after_write(),
            create_only=probe.create_only(),
            create_only_race=probe.create_only_race(race_rounds),
            ranged_reads=probe.ranged_reads(),
            listing_order=probe.listing_order(),
            more=probe.more(race_rounds) if ask_more else {},
        )
    finally:
        store.delete(probe.written)
        if ask_more:
            store.delete([info.key for info in store.list(probe.prefix)])
        inner = _unwrapped(store)
        if isinstance(inner, KeepsFolders):
            inner.remove_empty(probe.prefix)


@runtime_checkable
class ChecksBodies(Protocol):
    """A store that can refuse a body that was damaged on its way."""

    @property
    def where(self) -> str:
        """Which store an answer holds for."""
        ...

    def use_checksums(self) -> None:
        """Send checksums from now on: the store is known to check them."""
        ...

    def enable_checksums(self, prefix: str) -> Finding:
        """Try it under `prefix`, and send checksums from now on if it works."""
        ...


def checks_bodies(store: ObjectStore) -> ChecksBodies | None:
    """The store inside of all wrappers, if it is of a kind that may check bodies."""
    inner = _unwrapped(store)
    return inner if isinstance(inner, ChecksBodies) else None


def enable_checksums(store: ObjectStore) -> Finding:
    """Let the store check every body that it gets from now on, if it is one that does.

    Without it a body that was damaged on its way is found only by the first who reads it: some
    stores do not even check the digest that the request was signed with.
    """
    inner = checks_bodies(store)
    if inner is None:
        return Finding(False, "it takes no checksums")
    prefix = f"{PROBE_PREFIX}{new_token()}/"
    try:
        return inner.enable_checksums(prefix)
    finally:
        store.delete([info.key for info in store.list(prefix)])


def _unwrapped(store: ObjectStore) -> ObjectStore:
    while isinstance(store, StoreWrapper):
        store = store.inner
    return store


def creates_atomically(store: ObjectStore) -> bool:
    """False for a store that says of itself that two racing creates may both win."""
    return bool(getattr(store, "create_is_atomic", True))


def require_home(report: ProbeReport) -> None:
    """Raise StorageError(no_conditional_put) unless the store can be a run's home."""
    failed = {name: found for name, found in report.required().items() if not found.ok}
    if not failed:
        return
    notes = "; ".join(f"{name}: {found.note}" for name, found in failed.items())
    if "create_only" in failed or "create_only_race" in failed:
        raise StorageError(
            f"{report.url} cannot be the home of a run, two trainers would overwrite each other: "
            f"{notes}",
            kind=Kind.NO_CONDITIONAL_PUT,
            hint="choose a store that honours If-None-Match (storage/PROVIDERS.md); "
            "this one may still be another region's relay",
        )
    raise StorageError(
        f"{report.url} cannot be the home of a run: {notes}",
        kind=Kind.REFUSED,
        hint="choose another store; see storage/PROVIDERS.md",
    )


class _Probe:
    """The single tries. Failures that say nothing about the store's abilities go through."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self.prefix = prefix
        self.written: list[str] = []

    def _key(self, name: str) -> str:
        key = self.prefix + name
        self.written.append(key)
        return key

    def absent_is_404(self) -> Finding:
        key = self.prefix + "absent"
        for what, call in (("get", self._store.get), ("head", self._store.head)):
            try:
                call(key)
            except NotFoundError as err:
                if err.kind is not Kind.OBJECT_MISSING:
                    raise
            except StorageError as err:
                if err.kind is not Kind.CREDENTIALS:
                    raise
                return Finding(False, f"{what} of an absent key answers {err}")
            else:
                return Finding(False, f"{what} of an absent key found something")
        return Finding(True, "an absent key is not found")

    def read_after_write(self) -> Finding:
        key = self._key("read")
        for body in (b"first", b"second and longer", b""):
            self._store.put(key, body, mode=PutMode.OVERWRITE)
            held, size_bytes = self._store.get(key), self._store.head(key).size_bytes
            if held != body or size_bytes != len(body):
                return Finding(False, f"after a put of {body!r} a read gave {held!r}")
        return Finding(True, "a read sees the last write")

    def create_only(self) -> Finding:
        key = self._key("create")
        unsupported = self._try_create(key, b"one")
        if unsupported:
            return unsupported
        if self._store.put(key, b"one", mode=PutMode.CREATE) is PutOutcome.WRITTEN:
            return Finding(False, "a create-only put wrote onto an existing object")
        try:
            outcome = self._store.put(key, b"two", mode=PutMode.CREATE)
        except ConflictError:
            outcome = None
        held = self._store.get(key)
        if outcome is not None or held != b"one":
            return Finding(False, f"a second create-only put was accepted, the object is {held!r}")
        return Finding(True, "a create-only put onto an object is refused")

    def create_only_race(self, rounds: int) -> Finding:
        if not creates_atomically(self._store):  # a race is lost now and then only: no need to try
            return Finding(False, "its create is a look followed by a write")
        for number in range(rounds):
            key = self._key(f"race-{number}")
            bodies = (b"a" * 1000, b"b" * 1000)
            barrier = threading.Barrier(len(bodies))
            with ThreadPoolExecutor(len(bodies), thread_name_prefix="probe") as pool:
                wins = list(pool.map(lambda body: self._race(key, body, barrier), bodies))  # noqa: B023 - both run inside this round
            winners = [body for body, won in zip(bodies, wins, strict=True) if won]
            if len(winners) != 1:
                return Finding(False, f"{len(winners)} of 2 racing creates won in round {number}")
            if self._store.get(key) != winners[0]:
                return Finding(False, f"the loser's bytes were kept in round {number}")
        return Finding(True, f"exactly one of two racing creates won, {rounds} times")

    def ranged_reads(self) -> Finding:
        key, body = self._key("range"), bytes(range(256))
        self._store.put(key, body, mode=PutMode.OVERWRITE)
        for start, end in ((0, 1), (0, 256), (100, 200), (255, 256)):
            if self._store.get(key, ByteRange(start, end)) != body[start:end]:
                return Finding(False, f"bytes [{start}, {end}) came back wrong")
        try:
            self._store.get(key, ByteRange(200, 300))
        except InvalidInputError:
            return Finding(True, "ranges are exact")
        return Finding(False, "a range past the end was not noticed")

    def listing_order(self) -> Finding:
        # What a run lists: numbers of one width in one folder. Across folders some stores differ.
        keys = [self._key(f"list/{number:010}") for number in (9, 100, 11, 1, 10)]
        for key in keys:
            self._store.put(key, b"", mode=PutMode.OVERWRITE)
        listed = [info.key for info in self._store.list(self.prefix + "list/")]
        if sorted(listed) != sorted(keys):
            return Finding(False, "a listing right after the writes was not complete")
        after = [
            i.key for i in self._store.list(self.prefix + "list/", start_after=sorted(keys)[1])
        ]
        if after != sorted(keys)[2:]:
            return Finding(False, "a listing does not begin after the key that was asked for")
        if listed != sorted(keys):
            return Finding(False, "listings are not in the order of the keys' bytes")
        return Finding(True, "listings are complete and in order")

    def more(self, race_rounds: int) -> Mapping[str, Finding]:
        store = _unwrapped(self._store)
        if not isinstance(store, ProbesMore):
            return {}
        return store.probe_more(self.prefix, race_rounds)

    def _try_create(self, key: str, body: bytes) -> Finding | None:
        try:
            self._store.put(key, body, mode=PutMode.CREATE)
        except StorageError as err:
            if err.kind not in {Kind.NO_CONDITIONAL_PUT, Kind.NO_HARD_LINKS, Kind.REFUSED}:
                raise
            return Finding(False, str(err))
        return None

    def _race(self, key: str, body: bytes, barrier: threading.Barrier) -> bool:
        barrier.wait(_RACE_WAIT_S)
        try:
            return self._store.put(key, body, mode=PutMode.CREATE) is PutOutcome.WRITTEN
        except ConflictError:
            return False
        except DeltastoreError as err:
            if err.kind not in {Kind.NO_CONDITIONAL_PUT, Kind.NO_HARD_LINKS, Kind.REFUSED}:
                raise
            return False
