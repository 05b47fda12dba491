"""t = a + b n is found where the leases tell it, and not guessed where they do not."""

from __future__ import annotations

import math

import pytest

from deltastore.scheduling.fit import TimeFit, fit_time


def test_a_line_is_found() -> None:
    """Leases on a line give its overhead and its slope."""
    fit = fit_time([(n, 5 + 0.01 * n) for n in (100, 200, 300, 400, 600, 800)])
    assert fit is not None
    assert (fit.overhead_s, fit.s_per_token) == (pytest.approx(5.0), pytest.approx(0.01))
    assert fit.time_s(1000) == pytest.approx(15.0)


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(100, 1), (200, 2), (300, 3), (400, 4), (500, 5)],
        [(100, 1)] * 10,
        [(100 + i, 10 + i) for i in range(10)],
        [(100 * i, 10 - i) for i in range(1, 10)],
        [(100 * i, 5 + 4 * (i % 2) + 0.1 * i) for i in range(1, 10)],
        [(math.nan, 1), (200, math.inf), (300, 3), (400, 4), (500, 5), (600, 6), (-1, 2), (0, 3)],
    ],
)
def test_no_line_no_fit(points: list[tuple[float, float]]) -> None:
    """Few, equal, close, falling, noisy or impossible points give no fit."""
    assert fit_time(points) is None


def test_a_negative_overhead_is_none() -> None:
    """Noise that makes the overhead negative gives a line through the origin."""
    fit = fit_time([(100 * i, 2 * i - 1) for i in range(1, 7)])
    assert fit == TimeFit(0.0, pytest.approx(6 / 350))
