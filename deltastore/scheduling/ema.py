"""One bad measurement must not take the batch: averages here are finite, bounded and slow to lie.

The rule is tau <- b tau + (1 - b) tokens / elapsed. Leases differ in length, so a sample that
lasted k times the usual length stands for k usual ones, and one of k leases side by side for k:
b = BETA ** k, with k held between 1/4 and 4. With single leases of one length this is the plain
rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

BETA = 0.8  # a change of speed is 2/3 seen after five leases
MAX_RATE_TOKENS_PER_S = 1e9  # no engine makes more; a larger figure is a broken clock
MAX_GROWTH = 4.0  # one sample counts as at most this many times the average so far
MIN_ELAPSED_S = 1e-3  # the resolution of the backend's clock
STEADY_S = 1800.0  # an average stands so long: to try a slow actor again costs a slow step
HALF_LIFE_S = 600.0  # then, if nobody refreshed it, it drifts to the peers' median
DEFAULT_RATE_TOKENS_PER_S = 1.0  # only ratios matter while nothing is known of anybody
MAX_COUNT = 4.0  # one measurement counts as at most this many leases


@dataclass(frozen=True, slots=True)
class Ema:
    """An actor's average speed; `tokens_per_s` is None until there was a sample."""

    tokens_per_s: float | None = None
    usual_s: float = 0.0
    """The average length of its leases."""
    updated_at_s: float = 0.0

    def fold(
        self, tokens: float, elapsed_s: float, at_s: float, beta: float = BETA, *, count: int = 1
    ) -> Ema:
        """The average after one more measurement, of `count` leases that ran side by side.

        Impossible samples change nothing.
        """
        if not (math.isfinite(tokens) and math.isfinite(elapsed_s) and math.isfinite(at_s)):
            return self
        if tokens < 0 or elapsed_s < 0:
            return self
        elapsed_s = max(elapsed_s, MIN_ELAPSED_S)
        rate = min(tokens / elapsed_s, MAX_RATE_TOKENS_PER_S)
        old = self.tokens_per_s
        if old is None:
            if tokens == 0:  # nothing finished yet: stay at the peers' median, not at zero
                return self
            return Ema(rate, elapsed_s, at_s)
        if old > 0:
            rate = min(rate, MAX_GROWTH * old)
        stretch = elapsed_s / self.usual_s if self.usual_s > 0 else 1.0
        stretch = max(1, count) * max(stretch, 1 / MAX_COUNT)
        keep = math.pow(beta, min(stretch, MAX_COUNT))
        return Ema(
            keep * old + (1 - keep) * rate,
            beta * self.usual_s + (1 - beta) * elapsed_s,
            max(at_s, self.updated_at_s),
        )

    def at(self, now_s: float, peers_tokens_per_s: float) -> float:
        """The rate to plan with: its own while fresh, its peers' median when new or stale."""
        own, peers = self.tokens_per_s, usable(peers_tokens_per_s)
        if peers is None:
            peers = DEFAULT_RATE_TOKENS_PER_S
        if own is None:
            return peers
        age_s = max(0.0, now_s - self.updated_at_s - STEADY_S) if math.isfinite(now_s) else 0.0
        weight = math.exp2(-age_s / HALF_LIFE_S)
        return weight * own + (1 - weight) * peers

    def restored(self, tokens_per_s: float, at_s: float) -> Ema:
        """The average taken over from a stored one; an unusable one changes nothing."""
        rate = usable(tokens_per_s)
        return self if rate is None else replace(self, tokens_per_s=rate, updated_at_s=at_s)


def usable(tokens_per_s: float | None) -> float | None:
    """`tokens_per_s` if it can be planned with (finite, positive, possible), else None."""
    if tokens_per_s is None or not 0 < tokens_per_s <= MAX_RATE_TOKENS_PER_S:
        return None
    return tokens_per_s


def median_rate(rates: Iterable[float | None]) -> float:
    """The median of the usable rates: where a new actor starts."""
    known = [rate for rate in map(usable, rates) if rate is not None]
    return median(known) if known else DEFAULT_RATE_TOKENS_PER_S
