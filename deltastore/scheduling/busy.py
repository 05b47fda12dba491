"""Leases that run side by side each seem slow: speed is tokens per busy second, not per lease.

An engine decodes its leases as one batch, so each of k leases lasts as long as the whole batch. Per
lease the fastest actor of a pool, with the largest batch, measures like the slowest, and a split by
that is even. Here the leases of one actor that overlap become one busy period: all their tokens,
over the time from the first grant to the last end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

TOUCHING_S = 0.25  # an actor that asks again within this long was not idle in between


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
class BusyPeriod:
    """An unbroken stretch of work of one actor."""

    at_s: float
    """When it ended."""
    elapsed_s: float
    tokens: int
    leases: int
    kept: int
    """How many of its leases ended with a result."""
    counts: bool
    """False when its first lease was the first after a join."""


def busy_periods(samples: Iterable[SampleLike], after_s: float = -math.inf) -> list[BusyPeriod]:
    """The busy periods of one actor's samples, oldest first.

    Args:
        samples: ordered by `at_s`.
        after_s: time up to here has been accounted for already.
    """
    usable = [
        sample
        for sample in samples
        if math.isfinite(sample.at_s)
        and 0 <= sample.elapsed_s < math.inf
        and 0 <= sample.tokens < math.inf
    ]
    by_start = sorted(usable, key=lambda sample: sample.at_s - sample.elapsed_s)
    periods: list[BusyPeriod] = []
    together: list[SampleLike] = []
    end_s = -math.inf
    for sample in by_start:
        if together and sample.at_s - sample.elapsed_s > end_s + TOUCHING_S:
            periods.append(_period(together, after_s))
            together = []
        together.append(sample)
        end_s = max(end_s, sample.at_s) if len(together) > 1 else sample.at_s
    if together:
        periods.append(_period(together, after_s))
    return periods


def _period(samples: list[SampleLike], after_s: float) -> BusyPeriod:
    end_s = max(sample.at_s for sample in samples)
    start_s = max(after_s, min(sample.at_s - sample.elapsed_s for sample in samples))
    return BusyPeriod(
        at_s=end_s,
        elapsed_s=max(0.0, end_s - start_s),
        tokens=sum(sample.tokens for sample in samples),
        leases=len(samples),
        kept=sum(sample.tokens > 0 for sample in samples),
        counts=all(sample.counts for sample in samples),
    )
