"""Speed is known only by leases that ended: this folds them, each once, into what a split needs.

A `Pace` is a value: the trainer keeps one per actor, folds the new samples in, and asks for
shares. An actor that comes back after a loss gets `ALPHA` of its share, and earns the rest back
with each lease it keeps.

A slow machine is slow in all it does, so t = a + b n scales as a whole while r = a / b, what an
actor's work costs before its first token counted in tokens, belongs to the engine: it is taken from
whoever's line is known, for all. An actor's speed is then (r + n) / t over its last busy periods,
whatever shares they were measured with; one off by more than `MAX_CHANGE` begins a new past.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING

from deltastore.scheduling.busy import BusyPeriod, SampleLike, busy_periods
from deltastore.scheduling.ema import BETA, MIN_ELAPSED_S, Ema, median_rate, usable
from deltastore.scheduling.fit import TimeFit, fit_time
from deltastore.scheduling.split import ActorShare

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ALPHA = 0.5
RECOVERY_LEASES = 4  # kept leases from ALPHA back to the whole share
MAX_POINTS = 16  # for the fit: recent enough to follow a change, enough to see the slope
LEASE_SLACK = 3.0  # a lease lasts this many times the expected time
MAX_CHANGE = 1.5  # a busy period off by more than this is of another speed, and the past is past
_ALL_OVERHEAD = 1e9  # tokens: beside it no work counts
MAX_OVERHEAD_SHARES = 64.0  # times the work measured so far: more is a line through noise


@dataclass(frozen=True, slots=True)
class Pace:
    """All that is known of one actor's speed."""

    ema: Ema = field(default_factory=Ema)
    points: tuple[tuple[float, float], ...] = ()
    """(tokens, busy seconds), newest last; 0 tokens where leases only expired."""
    overhead_tokens: float | None = None
    """r of the last line that could be seen through its points."""
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
        fresh = [sample for sample in known if sample.at_s > pace.cursor_s]
        for period in busy_periods(fresh, pace.cursor_s):
            pace = pace._fold_one(period)
        return replace(pace, cursor_s=fresh[-1].at_s) if fresh else pace

    def _fold_one(self, period: BusyPeriod) -> Pace:
        factor = min(1.0, self.factor + period.kept * (1 - ALPHA) / RECOVERY_LEASES)
        pace = replace(self, factor=factor)
        if not period.counts:
            # The first lease after a join, of an actor whose speed is known: it was away, and so
            # briefly that nobody saw it missing.
            been_here = self.ema.tokens_per_s is not None and self.factor >= 1.0
            return self.rejoined() if been_here else pace
        point = (float(period.tokens), max(period.elapsed_s, MIN_ELAPSED_S))
        points = (*self._points_like(point), point)[-MAX_POINTS:]
        line = fit_time(points)
        ema = self.ema.fold(period.tokens, period.elapsed_s, period.at_s, count=period.leases)
        overhead_tokens = self.overhead_tokens
        if line is not None:
            most = MAX_OVERHEAD_SHARES * max(tokens for tokens, _ in points)
            overhead_tokens = min(line.overhead_s / line.s_per_token, most)
        return replace(pace, ema=ema, points=points, overhead_tokens=overhead_tokens)

    def _points_like(self, point: tuple[float, float]) -> tuple[tuple[float, float], ...]:
        """The points so far, or none when this one shows that the machine's speed has changed.

        While r is unknown that is certain only if it holds both without any overhead and with
        nothing but overhead.
        """
        r = self.overhead_tokens
        ratios = []
        for overhead_tokens in (0.0, _ALL_OVERHEAD) if r is None else (r,):
            before = self.speed(overhead_tokens)
            now = replace(self, points=(point,)).speed(overhead_tokens)
            if before is None or now is None:
                return self.points
            ratios.append(now / before)
        changed = min(ratios) > MAX_CHANGE or max(ratios) < 1 / MAX_CHANGE
        return () if changed else self.points

    def rejoined(self) -> Pace:
        """The pace of an actor that was lost and is back."""
        return replace(self, factor=min(self.factor, ALPHA))

    def fitted(self) -> TimeFit | None:
        """t = a + b n of its recent work, where it tells one."""
        return fit_time(self.points)

    def speed(self, overhead_tokens: float) -> float | None:
        """Tokens per second, overheads counted as tokens; the newest periods count most."""
        done = spent_s = 0.0
        weight = 1.0
        for tokens, elapsed_s in reversed(self.points):
            done += weight * (tokens + overhead_tokens if tokens > 0 else 0.0)
            spent_s += weight * elapsed_s
            weight *= BETA
        return usable(done / spent_s) if spent_s > 0 else None


def shares(paces: Mapping[str, Pace], now_s: float) -> list[ActorShare]:
    """What a split needs of the eligible actors, whose paces these are.

    An actor that is new, or whose leases all expired, starts at its peers' median; one that was not
    heard of for long drifts there.
    """
    known = [p.overhead_tokens for p in paces.values() if p.overhead_tokens is not None]
    overhead_tokens = median(known) if known else 0.0
    speeds = {actor_id: _speed(pace, overhead_tokens) for actor_id, pace in paces.items()}
    peers = median_rate(speeds.values())
    out = []
    for actor_id, pace in sorted(paces.items()):
        planned = replace(pace.ema, tokens_per_s=speeds[actor_id]).at(now_s, peers)
        out.append(ActorShare(actor_id, planned, overhead_tokens / planned, pace.factor))
    return out


def _speed(pace: Pace, overhead_tokens: float) -> float | None:
    """From its busy periods; from its average where that was taken over from elsewhere."""
    return pace.speed(overhead_tokens) if pace.points else usable(pace.ema.tokens_per_s)


def lease_s_for(pace: Pace, expected_tokens: int, *, min_s: float, max_s: float) -> float:
    """How long a lease on `expected_tokens` should run on this actor, within min_s..max_s.

    Nothing known: `max_s`, so that an unknown actor is not failed for being unknown.
    """
    overhead_tokens = pace.overhead_tokens or 0.0
    speed = _speed(pace, overhead_tokens)
    if speed is None:
        return max_s
    expected_s = (overhead_tokens + expected_tokens) / speed
    return min(max(LEASE_SLACK * expected_s, min_s), max_s)


def finish_s(share: ActorShare, tokens: float) -> float:
    """When an actor should be done with so many tokens."""
    return share.overhead_s + tokens / share.tokens_per_s if tokens > 0 else 0.0


def near_fastest(actors: Sequence[ActorShare]) -> list[str]:
    """The actors that are at least half as fast as the fastest: worth waiting for at the end."""
    speeds = {actor.actor_id: actor.tokens_per_s * actor.factor for actor in actors}
    most = max(speeds.values(), default=0.0)
    return [actor_id for actor_id, speed in speeds.items() if 2 * speed >= most]
