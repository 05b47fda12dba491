"""Speed is known only by leases that ended: this folds them, each once, into what a split needs.

A `Pace` is a value: the trainer keeps one per actor, folds the new samples in, and asks for
shares. An actor that comes back after a loss gets `ALPHA` of its share, and earns the rest back
with each lease it keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from deltastore.scheduling.ema import MIN_ELAPSED_S, Ema, median_rate, usable
from deltastore.scheduling.fit import TimeFit, fit_time
from deltastore.scheduling.split import ActorShare

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ALPHA = 0.5
RECOVERY_LEASES = 4  # kept leases from ALPHA back to the whole share
MAX_POINTS = 16  # for the fit: recent enough to follow a change, enough to see the slope
MAX_DISAGREEMENT = 1.5  # average against fit; beyond it the fit describes a past speed
LEASE_SLACK = 3.0  # a lease lasts this many times the expected time


class SampleLike(Protocol):
    """One ended lease, as `coordination.backend.ThroughputSample` is."""

    @property
    def at_s(self) -> float:
        """When it ended; strictly increasing per actor."""
        ...

    @property
    def elapsed_s(self) -> float:
        """From grant to settlement, or to expiry."""
        ...

    @property
    def tokens(self) -> int:
        """How many tokens it made; 0 when it expired."""
        ...

    @property
    def counts(self) -> bool:
        """False for the first lease after a join."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """All that is known of one actor's speed."""

    ema: Ema = field(default_factory=Ema)
    points: tuple[tuple[float, float], ...] = ()
    factor: float = 1.0
    cursor_s: float = -math.inf
    """`at_s` of the newest sample folded in."""

    def fold(self, samples: Iterable[SampleLike]) -> Pace:
        """The pace after the samples that are newer than the last one folded in.

        The backend keeps the newest samples, so the last of them is never older than the cursor,
        unless it lost its data and its clock went back: then the cursor means nothing any more.
        """
        known = list(samples)
        pace = self
        if known and known[-1].at_s < self.cursor_s:
            pace = replace(self, cursor_s=-math.inf)
        for sample in known:
            if sample.at_s > pace.cursor_s:
                pace = pace._fold_one(sample)
        return pace

    def _fold_one(self, sample: SampleLike) -> Pace:
        kept = sample.tokens > 0
        factor = min(1.0, self.factor + (1 - ALPHA) / RECOVERY_LEASES) if kept else self.factor
        pace = replace(self, factor=factor, cursor_s=sample.at_s)
        if not sample.counts:
            # The first lease after a join, of an actor whose speed is known: it was away, and so
            # briefly that nobody saw it missing.
            been_here = self.ema.tokens_per_s is not None and self.factor >= 1.0
            return pace.rejoined() if been_here else pace
        points = self.points
        if kept and math.isfinite(sample.elapsed_s):
            point = (float(sample.tokens), max(sample.elapsed_s, MIN_ELAPSED_S))
            points = (*points, point)[-MAX_POINTS:]
        ema = self.ema.fold(sample.tokens, sample.elapsed_s, sample.at_s)
        return replace(pace, ema=ema, points=points)

    def rejoined(self) -> Pace:
        """The pace of an actor that was lost and is back."""
        return replace(self, factor=min(self.factor, ALPHA))

    def fitted(self) -> TimeFit | None:
        """t = a + b n of its recent leases, where they tell one."""
        return fit_time(self.points)


def shares(paces: Mapping[str, Pace], now_s: float) -> list[ActorShare]:
    """What a split needs of the eligible actors, whose paces these are.

    An actor that is new, or whose leases all expired, starts at its peers' median. Where a fit
    exists and agrees with the average, its slope is the speed and its intercept the overhead; else
    the average is the speed.
    """
    peers = median_rate(pace.ema.tokens_per_s for pace in paces.values())
    out = []
    for actor_id, pace in sorted(paces.items()):
        rate = pace.ema.at(now_s, peers)
        fit = pace.fitted()
        planned, overhead_s = rate, 0.0
        if fit is not None:
            # Expired leases lower the average but are no points; a change of speed moves it first.
            mean_tokens = math.fsum(n for n, _ in pace.points) / len(pace.points)
            ratio = rate * fit.time_s(mean_tokens) / mean_tokens
            if 1 / MAX_DISAGREEMENT <= ratio <= MAX_DISAGREEMENT:
                planned, overhead_s = ratio / fit.s_per_token, fit.overhead_s
        out.append(ActorShare(actor_id, planned, overhead_s, pace.factor))
    return out


def lease_s_for(pace: Pace, expected_tokens: int, *, min_s: float, max_s: float) -> float:
    """How long a lease on `expected_tokens` should run on this actor, within min_s..max_s.

    Nothing known: `max_s`, so that an unknown actor is not failed for being unknown.
    """
    rate = usable(pace.ema.tokens_per_s)
    if rate is None:
        return max_s
    fit = pace.fitted()
    expected_s = expected_tokens / rate if fit is None else fit.time_s(expected_tokens)
    return min(max(LEASE_SLACK * expected_s, min_s), max_s)
