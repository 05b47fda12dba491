"""An actor with two loops races itself: one thread leases, generates, and lets the weights change.

Each turn: work if a job can be leased at the active version, else activate what is staged (no
lease is open, no forward pass in flight: the safe point), else wait a little. Work comes before
activation, because jobs name the version they want and may be waiting for this actor alone.

Ends when told to (SIGTERM): generation in progress is finished or, after `drain_max_s`, handed
back. Ends by itself when the run's stop file names a version: it catches up to it, proves its
weights by a whole pass, writes its report, and leaves.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from deltastore.coordination.backend import ActorRecord, ActorState, ActorStatus
from deltastore.coordination.outage import is_outage
from deltastore.errors import ApplyError, CoordinationError, Kind
from workers.actor.presence import Presence
from workers.actor.rollout import RolloutWorker
from workers.run_folder import FinalReport

if TYPE_CHECKING:
    from deltastore.clock import Clock
    from deltastore.coordination.backend import Coordination
    from deltastore.events import EventSink
    from deltastore.repository.run import Run
    from workers.actor.engine import ActorWeights, Engine
    from workers.actor.safe_point import SafePoint
    from workers.config import ActorConfig
    from workers.run_folder import RunFolder

_LOG = logging.getLogger(__name__)
MAX_NOTE_CHARS = 200


class Actor:
    """One rollout actor. `run` blocks until it is told to stop.

    Args:
        run: in the actor's own region.
        weights: the engine's, at a proved version.
        via: how they got there, for people.
        safe_point: shared by engine and weights.
    """

    def __init__(
        self,
        run: Run,
        engine: Engine,
        weights: ActorWeights,
        *,
        via: str,
        safe_point: SafePoint,
        coordination: Coordination,
        settings: ActorConfig,
        threads: int,
        folder: RunFolder,
        clock: Clock,
        sink: EventSink,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._clock = clock
        self._stopping = threading.Event()
        self._drain_deadline_s: float | None = None
        self._state = ActorState.JOINING
        self.safe_point = safe_point
        self.weights = weights
        self._worker = RolloutWorker(
            run,
            coordination,
            engine,
            settings,
            may_go_on=self._may_go_on,
            safe_point=self.safe_point,
            clock=clock,
            sink=sink,
        )
        record = ActorRecord(
            settings.actor_id, settings.region, settings.engine, threads, _note(via)
        )
        self._presence = Presence(
            coordination,
            record,
            ttl_s=settings.heartbeat_ttl_s,
            status=self.status,
            clock=clock,
        )

    def request_stop(self) -> None:
        """Drain and leave. From any thread; a signal handler rings for it (cli/signals.py)."""
        if self._drain_deadline_s is None:
            self._drain_deadline_s = self._clock.monotonic_s() + self._settings.drain_max_s
        self._stopping.set()

    def status(self) -> ActorStatus:
        """What the heartbeat says now."""
        active = self.weights.active
        state = self._state
        if self.weights.poisoned or self._worker.in_doubt:
            state = ActorState.POISONED
        elif self._stopping.is_set():
            state = ActorState.DRAINING
        return ActorStatus(
            state=state,
            active_version=active.version,
            policy_hash=active.policy_hash,
            staged_version=self.weights.staged_version,
            tokens_per_s=self._worker.tokens_per_s,
            staleness=self.weights.staleness,
            note=_note(self.weights.trouble),
        )

    def run(self) -> FinalReport:
        """Join, work until told to stop, leave; return where the weights are at the end."""
        self.weights.catch_up()
        self._state = ActorState.ACTIVE
        self._presence.start()
        self.weights.start()
        try:
            while not self._stopping.is_set():
                self._presence.check()
                stop_version = self._folder.read_stop()
                if stop_version is not None:
                    self._finish_at(stop_version)
                    break
                if not self.turn():
                    self._clock.wait(self._stopping, self._settings.idle_s)
            return self._report()
        finally:
            self.weights.stop()
            self._presence.stop()

    def turn(self) -> bool:
        """Do one thing; whether there was something to do."""
        weights, worker = self.weights, self._worker
        if weights.poisoned or weights.lost_its_history() or worker.in_doubt:
            self._presence.beat()  # nothing may be dealt to it while it rebuilds
            weights.re_anchor()
            worker.in_doubt = False
            self._presence.beat()
            return True
        try:
            leases = self._worker.take(self.weights.active)
        except CoordinationError as err:
            if not is_outage(err):
                raise
            leases = []  # the heartbeat says so; following goes on without Redis
        if leases:
            self._worker.work(leases)
            return True
        return self._activate()

    def _activate(self) -> bool:
        changed = self.weights.activate()
        if changed:
            self._presence.beat()  # the trainer deals by active versions
        return changed

    def _finish_at(self, version: int) -> None:
        self._state = ActorState.DRAINING
        self._presence.beat()
        deadline_s = self._clock.monotonic_s() + self._settings.catch_up_s
        while self.weights.active.version < version and not self._stopping.is_set():
            self._presence.check()
            if self.weights.poisoned:
                self.weights.re_anchor()
            elif not self._activate():
                if self._clock.monotonic_s() > deadline_s:
                    raise ApplyError(
                        f"{self._settings.actor_id} did not reach version {version} within"
                        f" {self._settings.catch_up_s} s: {self.weights.trouble or 'not staged'}",
                        kind=Kind.NOT_STAGED,
                        version=version,
                        hint="see whether this actor's region holds the version",
                    )
                self._clock.wait(self._stopping, self._settings.idle_s)

    def _report(self) -> FinalReport:
        report = FinalReport.of(
            self._settings.actor_id, self.weights.active, self.weights.fingerprint()
        )
        self._folder.report(self._folder.actor_report(self._settings.actor_id), report)
        _LOG.info("leaving at version %d", report.version)
        return report

    def _may_go_on(self) -> bool:
        if self.safe_point.stop_wanted:
            return False
        deadline_s = self._drain_deadline_s
        return deadline_s is None or self._clock.monotonic_s() < deadline_s


def _note(text: str) -> str:
    line = "".join(c if c.isprintable() else " " for c in text)
    return line[:MAX_NOTE_CHARS]
