"""A fleet that looks at fixed times hits a bucket as one, and a down bucket as hard as a live one.

How long until the next look, as numbers: whoever waits does it on a Clock. Longer while nothing
comes, doubled after each failure, never twice the same.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from deltastore.pipeline.copying import Backoff

if TYPE_CHECKING:
    from deltastore.config import FollowerSettings

RETRY_CAP_S = 30.0
"""The longest wait after failures, before its jitter: a bucket that is back is soon noticed."""


class Pace:
    """When to look for the next version.

    Without hints after an eighth of the interval between versions, at least `poll_min_s`; while
    nothing comes that interval is as long as nothing came. With hints, and at most,
    `poll_hinted_s`.

    Args:
        hinted: whether somebody says when there is something new.
        seed: of the jitter, which spreads looks and protects nothing; None: the system's.
    """

    def __init__(
        self, settings: FollowerSettings, *, hinted: bool, now_s: float, seed: int | None
    ) -> None:
        self._min_s = settings.poll_min_s
        self._max_s = settings.poll_hinted_s
        self._hinted = hinted
        self._jitter = random.Random(seed)
        self._interval_s = 8 * settings.poll_min_s
        self._arrived = False
        self._last_s = now_s

    def arrived(self, now_s: float) -> None:
        """Something new was found."""
        if self._arrived:  # else the time since the start says nothing of intervals
            self._interval_s = 0.5 * self._interval_s + 0.5 * (now_s - self._last_s)
        self._arrived, self._last_s = True, now_s

    def idle_s(self, now_s: float) -> float:
        """The wait after a look that found nothing."""
        base_s = self._max_s
        if not self._hinted:
            interval_s = max(self._interval_s, now_s - self._last_s)
            base_s = min(self._max_s, max(self._min_s, interval_s / 8))
        return base_s * self._jitter.uniform(0.75, 1.25)

    def backoff(self) -> Backoff:
        """For the failures of one who looks."""
        return Backoff(first_s=self._min_s, cap_s=max(self._min_s, RETRY_CAP_S))

    def failed_s(self, backoff: Backoff, now_s: float) -> float:
        """The wait after a look that failed: at least the backoff's, which then is over."""
        backoff.failed(now_s)
        return backoff.left_s(now_s) * self._jitter.uniform(1.0, 1.5)
