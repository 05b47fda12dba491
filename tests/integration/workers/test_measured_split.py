"""The split that the benchmark praises, held to its promise in every test run."""

from __future__ import annotations

import pytest

from benchmarks.schedule import Pool, play_even, play_measured, play_oracle, settled


@pytest.mark.parametrize("speeds", [(1.0,) * 4, (1.0, 1.0, 3.0, 3.0), (1.0, 1.0, 10.0, 10.0)])
def test_the_measured_split_is_near_the_oracle(speeds: tuple[float, ...]) -> None:
    """Five steps after a change of speed a step takes at most 1/0.95 of the best split's time."""
    pool = Pool("pool", speeds)
    measured, oracle, even = (
        sum(settled(play(pool))) for play in (play_measured, play_oracle, play_even)
    )
    assert oracle / measured >= 0.95
    assert measured < even


def test_small_hands_do_not_starve_the_fast() -> None:
    """A slow actor with free hands takes nothing that a fast one would have finished sooner."""
    pool = Pool("pool", (1.0, 1.0, 10.0, 10.0), hand=8)
    assert sum(settled(play_oracle(pool))) / sum(settled(play_measured(pool))) >= 0.9
