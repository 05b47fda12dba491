"""An actor's speed does not depend on how many leases it runs side by side."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.coordination.backend import ThroughputSample
from deltastore.scheduling.busy import BusyPeriod, busy_periods
from deltastore.scheduling.pace import Pace


def _lease(
    start_s: float, end_s: float, tokens: int = 100, counts: bool = True
) -> ThroughputSample:
    return ThroughputSample(end_s, end_s - start_s, tokens, counts)


def test_leases_side_by_side_are_one_period() -> None:
    """A batch of leases is all their tokens over the time of the batch."""
    batch = [_lease(100, 110 + i / 1000) for i in range(8)]
    (period,) = busy_periods(batch)
    assert period == BusyPeriod(110.007, pytest.approx(10.007), 800, 8, 8, True)


def test_work_without_a_pause_is_one_period() -> None:
    """Batches that follow each other at once are one period; a pause ends it."""
    leases = [_lease(100, 110), _lease(110.2, 120), _lease(130, 140, 0)]
    first, second = busy_periods(leases)
    assert (first.elapsed_s, first.tokens, first.leases) == (20, 200, 2)
    assert (second.elapsed_s, second.tokens, second.kept) == (10, 0, 0)


def test_time_is_counted_once() -> None:
    """A period that began before what was folded already counts from there."""
    (period,) = busy_periods([_lease(100, 120)], after_s=115.0)
    assert (period.elapsed_s, period.tokens) == (5, 100)


def test_a_cold_start_spoils_its_period_only() -> None:
    """The period that holds the first lease after a join does not count; the next does."""
    leases = [_lease(100, 140, counts=False), _lease(100, 141), _lease(200, 210)]
    assert [period.counts for period in busy_periods(leases)] == [False, True]


@pytest.mark.parametrize("width", [1, 2, 8, 60])
def test_width_does_not_change_the_speed(width: int) -> None:
    """One actor at 80 tokens/s measures 80 tokens/s with 1 or with 60 leases at once."""
    pace = Pace()
    for turn in range(1, 6):
        seconds = width * 100 / 80
        start_s = 1000.0 * turn
        pace = pace.fold([_lease(start_s, start_s + seconds) for _ in range(width)])
    assert pace.ema.tokens_per_s == pytest.approx(80.0)


@given(
    leases=st.lists(
        st.tuples(st.integers(0, 500), st.integers(0, 100), st.integers(0, 50)), max_size=30
    )
)
def test_no_token_is_lost_and_no_second_counted_twice(leases: list[tuple[int, int, int]]) -> None:
    """Periods hold all tokens and leases, do not overlap, and are no longer than all leases."""
    samples = sorted(
        (_lease(start, start + length, tokens) for start, length, tokens in leases),
        key=lambda sample: sample.at_s,
    )
    periods = busy_periods(samples)
    assert sum(period.tokens for period in periods) == sum(sample.tokens for sample in samples)
    assert sum(period.leases for period in periods) == len(samples)
    ends = [-math.inf, *(period.at_s for period in periods)]
    for before_s, period in zip(ends, periods, strict=False):
        assert period.at_s - period.elapsed_s > before_s
