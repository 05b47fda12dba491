"""Faults that a seed chose, on real processes and servers: nothing comes of them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from deltastore.clock import SystemClock
from workers.chaos.engine import STOP, scripted_sample
from workers.chaos.play import play
from workers.chaos.schedule import ON_ACTORS, Fault, plan
from workers.sampling import Sampling

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _servers(s3_server: object, redis_server: object) -> None:
    """Skip, or fail in CI, where the servers are not installed."""


def test_a_run_survives_every_fault(tmp_path: Path) -> None:
    """Two minutes, each kind of fault twice: all recovered from, no result wrong, same bits.

    `play` proves that every fault happened and was noticed, provenance, the weights of the same
    learning undisturbed, flat memory, both regions' buckets and the janitor's work, and raises what
    does not hold. Who fell behind is tried again only 40 steps later: the end is quiet, and the
    seed is one that stops, slows and kills early, so that the test seldom waits for that.
    """
    faults: list[str] = []
    outcome = play(
        tmp_path, seed=54506, duration_s=120.0, every_s=4.0, quiet_s=32.0, actors=4,
        clock=SystemClock(), say=faults.append,
    )  # fmt: skip
    assert {row.fault for row in outcome.rows} == set(Fault)
    assert all(row.survived == row.injected == 2 for row in outcome.rows)
    assert "trainer.1" in outcome.memory_growth
    assert outcome.restarts >= 1
    assert outcome.steps >= 10
    assert outcome.results >= outcome.steps


def test_a_seed_is_a_schedule() -> None:
    """The same seed gives the same faults; each kind comes once a round, on its own targets."""
    actors, regions = ["a", "b", "c"], ["r", "s"]
    duration_s = 5.0 * 2 * len(Fault)
    schedule = plan(7, duration_s, 5.0, actors, regions)
    assert schedule == plan(7, duration_s, 5.0, actors, regions)
    assert schedule != plan(8, duration_s, 5.0, actors, regions)
    assert Counter(one.fault for one in schedule) == dict.fromkeys(Fault, 2)
    for one in schedule:
        wanted = actors if one.fault in ON_ACTORS else [*regions, ""]
        assert one.target in wanted
    gaps = [b.at_s - a.at_s for a, b in pairwise(schedule)]
    assert gaps == [5.0] * (2 * len(Fault) - 1)


def test_tokens_betray_their_weights() -> None:
    """A sample follows from fingerprint, seed and number; any other gives another."""
    sampling = Sampling(4, 16, STOP, seed=3)
    rows = [scripted_sample("00ff", sampling, sample, 128) for sample in range(4)]
    assert rows == [scripted_sample("00ff", sampling, sample, 128) for sample in range(4)]
    assert len({tuple(row) for row in rows}) == 4
    assert rows[0] != scripted_sample("00fe", sampling, 0, 128)
    assert rows[0] != scripted_sample("00ff", Sampling(4, 16, STOP, seed=4), 0, 128)
    for row in rows:
        assert 1 <= len(row) <= 16
        assert all(token < 128 for token in row)
        assert STOP not in row[:-1]
        assert (row[-1] == STOP) == (len(row) < 16)
