"""An actor that decodes for a minute looks dead: its heartbeat has a thread of its own.

Redis may be away, or restart and know nobody: the actor goes on with what it holds, registers again
when it can, and says so in its log once per outage. Only a refusal (a wrong policy of the server)
ends it.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from deltastore.coordination.outage import is_outage
from deltastore.errors import CoordinationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.clock import Clock
    from deltastore.coordination.backend import ActorRecord, ActorStatus, Coordination

_LOG = logging.getLogger(__name__)
BEATS_PER_TTL = 3  # two may be lost before the actor counts as lost


class Presence:
    """Keeps one actor registered.

    Args:
        status: what to report; called from the heartbeat thread.
    """

    def __init__(
        self,
        coordination: Coordination,
        record: ActorRecord,
        *,
        ttl_s: float,
        status: Callable[[], ActorStatus],
        clock: Clock,
    ) -> None:
        self._coordination = coordination
        self._record = record
        self._ttl_s = ttl_s
        self._status = status
        self._clock = clock
        self._stopped = threading.Event()
        self._away = False
        self._refusal: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Register, report once, and go on reporting. Raises what a retry cannot cure."""
        self._attempt(lambda: self._coordination.register(self._record, self._ttl_s))
        self.beat()
        self._thread.start()

    def beat(self) -> bool:
        """Report now, registering again if nobody knows this actor; False: Redis is away."""

        def report() -> None:
            status = self._status()
            if not self._coordination.heartbeat(self._record.actor_id, status, self._ttl_s):
                self._coordination.register(self._record, self._ttl_s)
                self._coordination.heartbeat(self._record.actor_id, status, self._ttl_s)

        return self._attempt(report)

    def stop(self) -> None:
        """Stop reporting and leave: what was dealt to this actor goes back at once."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._attempt(lambda: self._coordination.leave(self._record.actor_id))

    def check(self) -> None:
        """Raise what ended the heartbeat: an actor that works on is lost to everybody else."""
        if self._refusal is not None:
            raise self._refusal

    def _run(self) -> None:
        while not self._clock.wait(self._stopped, self._ttl_s / BEATS_PER_TTL):
            try:
                self.beat()
            except Exception as err:  # noqa: BLE001 - raised by `check`, on the actor's own thread
                self._refusal = err
                return

    def _attempt(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except CoordinationError as err:
            if not is_outage(err):
                raise
            if not self._away:
                _LOG.warning("Redis is away, going on without it: %s", err)
            self._away = True
            return False
        if self._away:
            _LOG.warning("Redis is back")
        self._away = False
        return True
