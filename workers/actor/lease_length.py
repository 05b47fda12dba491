"""A lease of one length for all starves the slow and strands the work of the dead: it is measured.

An actor asks for as long as it needs by its own speed: what it knows of t = a + b n, applied to the
most tokens its next batch can have, times a slack (`scheduling/pace.py`). Within the bounds of its
settings, and the longest of them while nothing is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.coordination.backend import ThroughputSample
from deltastore.scheduling.pace import Pace, lease_s_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.actor.rollout import HeldLease
    from workers.config import ActorConfig


class LeaseLength:
    """What one actor has learned of how long its batches take."""

    def __init__(self, settings: ActorConfig) -> None:
        self._most_s = settings.lease_s
        self._least_s = min(settings.min_lease_s, settings.lease_s)
        self._pace = Pace()
        self._batch_tokens: int | None = None

    def ask_s(self) -> float:
        """How long the next lease should run without renewal."""
        if self._batch_tokens is None:
            return self._most_s
        return lease_s_for(self._pace, self._batch_tokens, min_s=self._least_s, max_s=self._most_s)

    def note(self, held: Sequence[HeldLease], tokens: int, elapsed_s: float, at_s: float) -> None:
        """Learn from a batch that ended; the first after a join says little of the next."""
        self._batch_tokens = max(
            self._batch_tokens or 0, sum(item.payload.most_tokens for item in held)
        )
        counts = all(item.lease.counts_as_sample for item in held)
        self._pace = self._pace.fold([ThroughputSample(at_s, elapsed_s, tokens, counts)])
