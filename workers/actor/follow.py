"""Weights that change under a lease make a result of no version: they change at safe points only.

Owns the actor's weights: stages in the background, activates when the loop says that nothing is in
flight, and rebuilds them from the bucket when they are in doubt. A failed activation leaves the
actor at the version before; a poisoned one is refused until a rebuild has been proved over every
live weight.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deltastore.errors import ApplyError, IntegrityError, Kind
from deltastore.events import ActorJoined
from deltastore.pipeline.applier import Applier
from deltastore.pipeline.follower import Follower
from deltastore.pipeline.replay import JoinReport
from deltastore.pipeline.stager_rank import StagedFeed
from workers.actor.safe_point import SafePoint
from workers.head_hints import HeadHints
from workers.weights import rebuild

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.clock import Clock
    from deltastore.config import FollowerSettings
    from deltastore.coordination.backend import Coordination
    from deltastore.events import EventSink
    from deltastore.format.fingerprint import Fingerprint
    from deltastore.format.signing import TrustedKeys
    from deltastore.pipeline.protocols import WeightTarget
    from deltastore.repository.points import ActiveVersion
    from deltastore.repository.run import Run

_LOG = logging.getLogger(__name__)


class FollowedWeights:
    """Live weights that follow a run.

    Args:
        active: the version they are at now, proved.
        report: how they got there.
        stager_folder: of this host's stager; None: this process fetches by itself.
        most_rebuilds: rebuilds in a row, without an activation in between, before giving up.
        safe_point: shared with whoever runs forward passes; None: nobody does.
        trusted: keys that must have signed what is fetched here or rebuilt; None trusts the bucket.
    """

    def __init__(
        self,
        run: Run,
        target: WeightTarget,
        active: ActiveVersion,
        report: JoinReport,
        *,
        name: str,
        coordination: Coordination,
        settings: FollowerSettings,
        most_rebuilds: int,
        clock: Clock,
        sink: EventSink,
        stager_folder: Path | None = None,
        safe_point: SafePoint | None = None,
        trusted: TrustedKeys | None = None,
    ) -> None:
        self._safe_point = safe_point or SafePoint(clock)
        self._run = run
        self._trusted = trusted
        self._target = target
        self._name = name
        self._settings = settings
        self._most_rebuilds = most_rebuilds
        self._clock = clock
        self._sink = sink
        self._rebuilds = 0
        self._applier = self._new_applier(active)
        self._hints = HeadHints(coordination, clock)
        self._follower: Follower | StagedFeed
        if stager_folder is None:
            self._follower = Follower(
                run,
                active,
                name=name,
                clock=clock,
                settings=settings,
                sink=sink,
                hint_source=self._hints.wait,
                trusted=trusted,
            )
        else:
            self._follower = StagedFeed(stager_folder, run.layout, active, rank=name, clock=clock)
        self._report = report

    @property
    def active(self) -> ActiveVersion:
        """The version the weights are at."""
        return self._applier.active

    @property
    def poisoned(self) -> bool:
        """Whether the weights are in doubt: nothing may be served."""
        return self._applier.poisoned

    @property
    def staged_version(self) -> int | None:
        """The version that waits for a safe point."""
        staged = self._follower.staged()
        return None if staged is None else staged.target.version

    @property
    def staleness(self) -> int:
        """Newest known version minus the active one."""
        return max(0, self._follower.head_seen - self.active.version)

    @property
    def trouble(self) -> str:
        """What keeps the follower from going on, for people; empty when nothing does."""
        error = self._follower.error
        return "" if error is None else f"{error.kind.value}: {error.message}"

    def start(self) -> None:
        """Stage in the background from now on."""
        self._follower.start()

    def stop(self) -> None:
        """Stop staging."""
        self._hints.stop()
        self._follower.stop()

    def catch_up(self) -> None:
        """Stage and activate what exists now, and say how it got here. Only before `start`."""
        started_s = self._clock.monotonic_s()
        self._follower.catch_up()
        staged = self._follower.staged()
        report = self._report
        if staged is not None and self.activate():
            report = JoinReport(
                via=f"{report.via} + {staged.versions} deltas",
                size_bytes=report.size_bytes + staged.size_bytes,
                links=report.links + staged.versions,
                seconds=report.seconds + self._clock.monotonic_s() - started_s,
            )
        self._joined(report)

    def activate(self) -> bool:
        """Make a safe point and activate what is staged; whether the weights changed."""
        update = self._follower.take()
        if update is None:
            return False
        try:
            with self._safe_point.write():
                self._applier.activate(update)
        except (ApplyError, IntegrityError) as err:
            _LOG.warning("activation of version %d failed: %s", update.target.version, err)
            if not self.poisoned:
                self._prove()
            if not self.poisoned:
                self._follower.reset(self.active)
            return False
        self._rebuilds = 0
        return True

    def re_anchor(self) -> None:
        """Rebuild the weights from the bucket; ApplyError(poisoned) after too many in a row."""
        self._rebuilds += 1
        if self._rebuilds > self._most_rebuilds:
            raise ApplyError(
                f"{self._name} was rebuilt {self._most_rebuilds} times and is still in doubt",
                kind=Kind.POISONED,
                run=self._run.name,
                version=self.active.version,
                hint="check this machine's memory and disk, then `deltastore verify --deep`",
            )
        with self._safe_point.write():
            active, report = rebuild(
                self._run, self._target, clock=self._clock, trusted=self._trusted
            )
        self._applier = self._new_applier(active)
        self._follower.reset(active)
        self._joined(report)

    def lost_its_history(self) -> bool:
        """Whether the run's history no longer passes through the active version."""
        error = self._follower.error
        return isinstance(error, IntegrityError) and error.kind is Kind.WRONG_BASE

    def fingerprint(self) -> Fingerprint:
        """A whole pass over the live weights."""
        with self._safe_point.forward():
            return self._target.fingerprint()

    def _prove(self) -> None:
        try:
            with self._safe_point.forward():
                self._applier.check_whole()
        except IntegrityError as err:
            _LOG.warning("the live weights are in doubt: %s", err)

    def _new_applier(self, active: ActiveVersion) -> Applier:
        return Applier(
            self._target,
            active,
            name=self._name,
            clock=self._clock,
            settings=self._settings,
            sink=self._sink,
        )

    def _joined(self, report: JoinReport) -> None:
        self._sink(
            ActorJoined(
                self._name, self.active.version, report.via, report.size_bytes, report.seconds
            )
        )
