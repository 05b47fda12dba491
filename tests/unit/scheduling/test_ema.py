"""Averages follow what actors do, and nothing else."""

from __future__ import annotations

import math

import pytest

from deltastore.scheduling.ema import (
    BETA,
    DEFAULT_RATE_TOKENS_PER_S,
    HALF_LIFE_S,
    MAX_GROWTH,
    STEADY_S,
    Ema,
    median_rate,
    usable,
)

BAD = [math.nan, math.inf, -math.inf, -1.0]


def test_plain_rule() -> None:
    """With leases of one length the average is tau <- b tau + (1 - b) tokens / elapsed."""
    ema = Ema().fold(100, 10.0, 1.0)
    assert ema.tokens_per_s == 10.0
    assert ema.fold(200, 10.0, 2.0).tokens_per_s == pytest.approx(BETA * 10 + (1 - BETA) * 20)


def test_longer_leases_weigh_more() -> None:
    """A lease twice as long stands for two usual ones."""
    once = Ema(10.0, 10.0, 0.0).fold(400, 20.0, 1.0)
    twice = Ema(10.0, 10.0, 0.0).fold(200, 10.0, 1.0).fold(200, 10.0, 2.0)
    assert once.tokens_per_s == pytest.approx(twice.tokens_per_s)


def test_an_expired_lease_lowers_the_average() -> None:
    """0 tokens are a sample; before anything was ever finished they are none."""
    assert Ema(10.0, 10.0, 0.0).fold(0, 10.0, 1.0).tokens_per_s == pytest.approx(BETA * 10)
    assert Ema().fold(0, 10.0, 1.0) == Ema()


@pytest.mark.parametrize("bad", BAD)
def test_impossible_samples_change_nothing(bad: float) -> None:
    """CASE L12: NaN, infinite and negative samples leave the average as it was."""
    ema = Ema(10.0, 10.0, 5.0)
    assert ema.fold(bad, 10.0, 6.0) == ema
    assert ema.fold(10, bad, 6.0) == ema
    assert ema.fold(10, 10.0, math.nan) == ema


def test_one_absurd_sample_is_bounded() -> None:
    """CASE L12: one absurd sample counts as MAX_GROWTH times the average at most."""
    ema = Ema(10.0, 10.0, 0.0).fold(10**12, 10.0, 1.0)
    assert ema.tokens_per_s == pytest.approx(BETA * 10 + (1 - BETA) * MAX_GROWTH * 10)
    assert Ema().fold(10, 0.0, 1.0).tokens_per_s == pytest.approx(10_000.0)


def test_the_new_and_the_stale_are_like_their_peers() -> None:
    """CASE L12: no average means the peers' median; an hour without samples nearly so."""
    assert Ema().at(0.0, 30.0) == 30.0
    ema = Ema(10.0, 10.0, 1000.0)
    assert ema.at(1000.0, 30.0) == 10.0
    assert ema.at(1000.0 + STEADY_S + HALF_LIFE_S, 30.0) == pytest.approx(20.0)
    assert ema.at(1000.0 + 3600.0, 30.0) == pytest.approx(27.5)
    assert ema.at(0.0, 30.0) == 10.0  # a clock that went back makes nothing stale
    assert ema.at(math.nan, 30.0) == 10.0
    assert Ema().at(0.0, math.nan) == DEFAULT_RATE_TOKENS_PER_S


def test_the_median_ignores_the_unusable() -> None:
    """CASE L12: 0, NaN, infinite, negative, missing and absurd rates are not peers."""
    assert median_rate([None, 0.0, *BAD, 1e300, 5.0, 7.0]) == 6.0
    assert median_rate([None, math.nan]) == DEFAULT_RATE_TOKENS_PER_S
    assert [usable(bad) for bad in BAD] == [None] * 4


def test_a_stored_average_is_taken_over() -> None:
    """A usable stored average becomes the start, an unusable one changes nothing."""
    assert Ema().restored(12.0, 5.0) == Ema(12.0, 0.0, 5.0)
    assert Ema().restored(math.nan, 5.0) == Ema()
