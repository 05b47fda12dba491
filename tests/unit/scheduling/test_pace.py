"""Samples are folded once each, and a returning actor earns its share back."""

from __future__ import annotations

import pytest

from deltastore.coordination.backend import ThroughputSample
from deltastore.scheduling.pace import ALPHA, RECOVERY_LEASES, Pace, lease_s_for, shares


def _sample(turn: float, tokens: int = 100, *, counts: bool = True) -> ThroughputSample:
    """A lease of ten seconds, one per turn of 100 seconds."""
    return ThroughputSample(100.0 * turn, 10.0, tokens, counts)


def test_each_sample_once() -> None:
    """Folding an overlapping window again changes nothing."""
    window = [_sample(1.0), _sample(2.0, 200)]
    pace = Pace().fold(window)
    assert pace.fold(window) == pace
    assert pace.fold([*window, _sample(3.0)]) == pace.fold([_sample(3.0)])
    assert pace.fold([]) == pace


def test_a_backend_that_restarts_in_the_past() -> None:
    """After a failover to a clock an hour behind, new samples still count."""
    pace = Pace().fold([_sample(40.0)])
    assert pace.fold([_sample(4.0, 200)]).ema.tokens_per_s == pytest.approx(12.0)
    assert pace.fold([_sample(4.0, 200)]).fold([_sample(4.0, 200)]).cursor_s == 400.0


def test_the_first_lease_after_a_join_does_not_count() -> None:
    """A sample marked as not counting moves the cursor and nothing of the speed."""
    pace = Pace().fold([_sample(1.0, 1, counts=False)])
    assert pace.ema == Pace().ema
    assert pace.points == ()
    assert pace.cursor_s == 100.0


def test_a_returning_actor_earns_its_share_back() -> None:
    """ALPHA at the return, the whole share after RECOVERY_LEASES kept leases."""
    pace = Pace().rejoined()
    assert pace.factor == ALPHA
    assert pace.fold([_sample(1.0, 0)]).factor == ALPHA
    factors = []
    for i in range(RECOVERY_LEASES + 1):
        pace = pace.fold([_sample(2.0 + i)])
        factors.append(pace.factor)
    assert factors == sorted(factors)
    assert factors[-3] < 1.0
    assert factors[-2:] == [1.0, 1.0]
    assert pace.rejoined().rejoined().factor == ALPHA


def test_the_new_start_at_their_peers_median() -> None:
    """CASE L12: an actor without samples is planned at the median of the others."""
    paces = {f"a{i}": Pace().fold([_sample(1.0, 100 * i)]) for i in (1, 2, 4)} | {"new": Pace()}
    planned = {share.actor_id: share.tokens_per_s for share in shares(paces, 100.0)}
    assert planned == {"a1": 10.0, "a2": 20.0, "a4": 40.0, "new": 20.0}


def _line(times: range, slowdown: float = 1.0) -> list[ThroughputSample]:
    """Leases of 100, 200, ... tokens on an engine with t = 5 s + 10 ms per token."""
    return [
        ThroughputSample(100.0 * i, slowdown * (5.0 + n), 100 * n, True)
        for i, n in ((i, 1 + i % 8) for i in times)
    ]


def test_the_overhead_is_known_from_the_line() -> None:
    """Planned speed and overhead are the line's, whatever shares it was measured with."""
    (share,) = shares({"a": Pace().fold(_line(range(8)))}, 800.0)
    assert share.tokens_per_s == pytest.approx(100.0, rel=0.05)
    assert share.overhead_s == pytest.approx(5.0, rel=0.05)


def test_the_engine_of_one_tells_of_all() -> None:
    """An actor whose own line cannot be seen is planned with its peers' overhead."""
    steady = [ThroughputSample(100.0 * i, 18.0, 400, True) for i in range(1, 9)]
    paces = {"line": Pace().fold(_line(range(8))), "steady": Pace().fold(steady)}
    planned = {share.actor_id: share for share in shares(paces, 800.0)}
    assert planned["steady"].tokens_per_s == pytest.approx(50.0, rel=0.05)
    assert planned["steady"].overhead_s == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize("slowdown", [0.2, 3.0, 10.0])
def test_a_change_of_speed_shows_at_once(slowdown: float) -> None:
    """One busy period at another speed ends the past; the engine's overhead is kept."""
    pace = Pace().fold(_line(range(8)))
    changed = pace.fold(_line(range(8, 9), slowdown))
    (share,) = shares({"a": changed}, 900.0)
    assert share.tokens_per_s == pytest.approx(100.0 / slowdown, rel=0.05)
    assert share.overhead_s == pytest.approx(5.0 * slowdown, rel=0.05)


def test_expired_leases_slow_an_actor_down() -> None:
    """Time that ended without a result counts as time."""
    pace = Pace().fold(_line(range(8)))
    (before,) = shares({"a": pace}, 900.0)
    (after,) = shares({"a": pace.fold([ThroughputSample(900.0, 60.0, 0, True)])}, 900.0)
    assert after.tokens_per_s < before.tokens_per_s / 1.5


def test_lease_length_follows_speed_and_work() -> None:
    """Three times the expected time, within bounds; an unknown actor gets the longest."""
    pace = Pace().fold([_sample(1.0)])
    assert lease_s_for(pace, 200, min_s=5.0, max_s=300.0) == pytest.approx(60.0)
    assert lease_s_for(pace, 1, min_s=5.0, max_s=300.0) == 5.0
    assert lease_s_for(pace, 10**9, min_s=5.0, max_s=300.0) == 300.0
    assert lease_s_for(Pace(), 1, min_s=5.0, max_s=300.0) == 300.0
