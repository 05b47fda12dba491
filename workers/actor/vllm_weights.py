"""An engine that changes its own weights must be asked, not believed: every rank says where it is.

The weights of a vLLM engine as an actor's loop sees them. The engine's workers stage by themselves;
here they are told when (no lease is open, no request is in the engine), and asked afterwards. Only
what all ranks prove and agree on counts as active; anything else is poisoned until a rebuild.
Caches filled by other weights are dropped before anything is sampled again: while they are not, the
engine counts as poisoned too.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.errors import ApplyError, DeltastoreError, Kind, StorageError
from deltastore.events import ActivationFailed, ActorJoined, VersionActivated
from deltastore.pipeline.engine_control import NEWEST, agreed, doubt
from deltastore.pipeline.spool_use import UseReader
from deltastore.repository.fetch import load_manifest
from deltastore.repository.resolve import find_head

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deltastore.clock import Clock
    from deltastore.events import EventSink
    from deltastore.format.fingerprint import Fingerprint
    from deltastore.pipeline.engine_control import EngineControl, RankStatus, ServedVersion
    from deltastore.pipeline.replay import JoinReport
    from deltastore.repository.run import Run
    from deltastore.storage.store_use import StoreUse
    from workers.actor.safe_point import SafePoint

_LOG = logging.getLogger(__name__)
POLL_S = 0.1
MOST_LINKS = 64  # manifests read to say how many elements an activation changed
STALE = "its caches may hold what other weights computed"


@dataclass(frozen=True, slots=True)
class _View:
    """What the ranks said last. Replaced as a whole: the heartbeat's thread reads it."""

    active: ServedVersion
    staged: int | None
    head: int
    doubt: str
    trouble: str


class VllmWeights:
    """`ActorWeights` of an engine whose ranks follow a run by themselves.

    Args:
        control: of the engine, initialised: its ranks know the version that they are at.
        run: in the actor's own region.
        fingerprint: a whole pass over the live weights of all ranks.
        start: how the checkpoint was made that the engine started on; None: it was there.
        most_rebuilds: rebuilds in a row, without an activation in between, before giving up.
        catch_up_s: how long to wait, before the first lease, for what exists to be staged.
        safe_point: shared with whoever runs forward passes.
        used: takes what the ranks and their stager have done with their store; None: nobody counts.

    Raises ApplyError(poisoned) when the ranks do not agree on a version.
    """

    def __init__(
        self,
        control: EngineControl,
        run: Run,
        *,
        name: str,
        fingerprint: Callable[[], Fingerprint],
        start: JoinReport | None,
        most_rebuilds: int,
        catch_up_s: float,
        clock: Clock,
        sink: EventSink,
        safe_point: SafePoint,
        used: Callable[[StoreUse], None] | None = None,
    ) -> None:
        self._used = None if used is None else UseReader(used)
        self._control = control
        self._run = run
        self._name = name
        self._fingerprint = fingerprint
        self._most_rebuilds = most_rebuilds
        self._catch_up_s = catch_up_s
        self._clock = clock
        self._sink = sink
        self._safe_point = safe_point
        self._rebuilds = 0
        self._stale = ""
        statuses = control.status()
        active = agreed(statuses)
        if active is None:
            raise ApplyError(
                f"{name} cannot start: {doubt(statuses)}",
                kind=Kind.POISONED,
                run=run.name,
                hint="see the engine's log",
            )
        self._view = _seen(statuses, active)
        self.via = f"checkpoint v{active.version}" if start is None else start.via
        self._read_bytes = 0 if start is None else start.size_bytes

    @property
    def active(self) -> ServedVersion:
        """The version that all ranks were at last."""
        return self._view.active

    @property
    def poisoned(self) -> bool:
        """Whether ranks are in doubt, or caches hold what other weights computed."""
        return bool(self._view.doubt or self._stale)

    @property
    def staged_version(self) -> int | None:
        """The version that waits for a safe point."""
        return self._view.staged

    @property
    def staleness(self) -> int:
        """Newest version the ranks know of minus the active one."""
        return max(0, self._view.head - self._view.active.version)

    @property
    def trouble(self) -> str:
        """What keeps the ranks from going on, for people; empty when nothing does."""
        return self._view.doubt or self._stale or self._view.trouble

    def start(self) -> None:
        """Nothing: the engine's workers stage since they were initialised."""

    def stop(self) -> None:
        """Nothing: staging ends with the engine."""

    def catch_up(self) -> None:
        """Activate what exists now, as far as it is staged in time, and say how it got here."""
        started_s = self._clock.monotonic_s()
        first, head = self.active.version, find_head(self._run)
        while self.active.version < head and not self.poisoned:
            if not self.activate():
                if self._clock.monotonic_s() - started_s > self._catch_up_s:
                    _LOG.warning("version %d is not staged yet: %s", head, self.trouble)
                    break
                self._clock.sleep_s(POLL_S)
        deltas = self.active.version - first
        via = f"{self.via} + {deltas} deltas" if deltas else self.via
        self._joined(via, self._clock.monotonic_s() - started_s, self._read_bytes)

    def activate(self) -> bool:
        """Have every rank activate what is staged; whether the weights changed.

        A failure that leaves every rank at the version before is reported and tried again later;
        any other leaves the weights poisoned.
        """
        base = self.active
        self._look(self._control.status())
        if self.poisoned or (self._view.staged or 0) <= base.version:
            return False
        started_s = self._clock.monotonic_s()
        try:
            with self._safe_point.write():
                self._stale = STALE
                self._control.update(NEWEST)
                serves = self._settle()
        except DeltastoreError as err:
            _LOG.warning("activation of version %s failed: %s", self._view.staged, err)
            self._sink(
                ActivationFailed(
                    self._name, self._view.staged or base.version, err.kind.value, err.message
                )
            )
            self._look(self._control.status())
            if not self._view.doubt and self.active == base:
                self._stale = ""  # nothing was written
            return False
        pause_s = self._clock.monotonic_s() - started_s
        if not serves or self.active == base:
            return False
        self._rebuilds = 0
        here = self.active
        self._sink(
            VersionActivated(
                actor=self._name,
                base_version=base.version,
                version=here.version,
                policy_hash=here.policy_hash,
                nnz=self._changed(base.version, here.version),
                write_pause_s=pause_s,
            )
        )
        return True

    def re_anchor(self) -> None:
        """Rebuild every rank from the bucket; ApplyError(poisoned) after too many in a row."""
        self._rebuilds += 1
        if self._rebuilds > self._most_rebuilds:
            raise ApplyError(
                f"{self._name} was rebuilt {self._most_rebuilds} times and is still in doubt",
                kind=Kind.POISONED,
                run=self._run.name,
                version=self.active.version,
                hint="check this machine's memory and disk, then `deltastore verify --deep`",
            )
        started_s = self._clock.monotonic_s()
        with self._safe_point.write():
            self._stale = STALE
            self._control.re_anchor()
            serves = self._settle()
        if serves:
            self._joined(
                f"rebuilt at v{self.active.version}", self._clock.monotonic_s() - started_s
            )

    def lost_its_history(self) -> bool:
        """Whether the run's history no longer passes through the active version."""
        return self._view.trouble.startswith(Kind.WRONG_BASE.value)

    def fingerprint(self) -> Fingerprint:
        """A whole pass over the live weights of all ranks."""
        with self._safe_point.forward():
            return self._fingerprint()

    def _settle(self) -> bool:
        """After a write: see where every rank is, drop what other weights computed; all well?"""
        self._look(self._control.status())
        if self._control.reset_caches():
            self._stale = ""
        return not self.poisoned

    def _look(self, statuses: Sequence[RankStatus]) -> None:
        if self._used is not None:
            self._used.see(statuses)
        here = agreed(statuses)
        if here is None:
            why = doubt(statuses)
            _LOG.error("%s is in doubt: %s", self._name, why)
            self._view = _seen(statuses, self.active, doubt=why)
        else:
            self._view = _seen(statuses, here)

    def _changed(self, base: int, version: int) -> int:
        """How many changes the versions in between declare; 0 when nobody can say now."""
        try:
            links = range(max(base, version - MOST_LINKS) + 1, version + 1)
            return sum(load_manifest(self._run, number).core.nnz for number in links)
        except StorageError as err:
            # The number is for people; the weights are proved without the store.
            _LOG.warning("the changes up to version %d are not counted: %s", version, err)
            return 0

    def _joined(self, via: str, seconds: float, size_bytes: int = 0) -> None:
        """Bytes are those this process read: what the engine's own stager fetches is not among."""
        self._sink(ActorJoined(self._name, self.active.version, via, size_bytes, seconds))


def _seen(statuses: Sequence[RankStatus], active: ServedVersion, *, doubt: str = "") -> _View:
    troubles = dict.fromkeys(one.trouble for one in statuses if one.trouble)
    return _View(
        active=active,
        staged=max((one.staged for one in statuses if one.staged is not None), default=None),
        head=max((one.head for one in statuses if one.head is not None), default=active.version),
        doubt=doubt,
        trouble="; ".join(troubles),
    )
