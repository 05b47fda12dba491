"""A watcher that waits for Redis alone is blind when Redis is: hints are advice, never an error."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from deltastore.coordination.outage import is_outage
from deltastore.errors import CoordinationError

if TYPE_CHECKING:
    from deltastore.clock import Clock
    from deltastore.coordination.backend import Coordination

REPEATED_HINT_WAIT_S = 0.5  # a region behind home has not what the hint names yet


class HeadHints:
    """Redis' word that a newer version exists, as the follower wants it: advice, never an error."""

    def __init__(self, coordination: Coordination, clock: Clock) -> None:
        self._coordination = coordination
        self._clock = clock
        self._stopped = threading.Event()
        self._told = -1

    def wait(self, known: int, timeout_s: float) -> int | None:
        """Wait up to `timeout_s` for a version above `known`; the same one again only slowly."""
        try:
            hint = self._coordination.wait_head_hint(known, timeout_s)
        except CoordinationError as err:
            if not is_outage(err):
                raise
            self._clock.wait(self._stopped, timeout_s)
            return None
        if hint is None:
            return None
        if hint.version == self._told:
            self._clock.wait(self._stopped, REPEATED_HINT_WAIT_S)
        self._told = hint.version
        return hint.version

    def stop(self) -> None:
        """End a wait in progress."""
        self._stopped.set()
