"""Batches are split as measured, whole, and without feeding back on themselves."""

from __future__ import annotations

import random

import pytest

from deltastore.errors import InvalidInputError
from deltastore.scheduling.pace import Pace, shares
from deltastore.scheduling.split import ActorShare, Deal, deal, split_batch


def test_proportional_with_largest_remainders() -> None:
    """B_a = floor(B tau_a / sum tau), the remainder by largest fraction."""
    actors = [ActorShare("a", 1.0), ActorShare("b", 2.0), ActorShare("c", 4.0)]
    assert split_batch(10, actors) == {"a": 1, "b": 3, "c": 6}


def test_everybody_gets_one() -> None:
    """A slow or unknown actor is dealt a group where the batch allows, so that it is measured."""
    actors = [ActorShare("fast", 10.0), ActorShare("slow", 2.0), ActorShare("zero", 0.0)]
    assert split_batch(7, actors) == {"fast": 5, "slow": 1, "zero": 1}
    assert sorted(split_batch(2, actors).values()) == [0, 1, 1]


def test_nobody_waits_for_one_group() -> None:
    """An actor whose single group would make the step longer gets none, nor by rounding up; one
    that nobody could relieve sooner keeps it."""
    fast = [ActorShare("f1", 10.0), ActorShare("f2", 10.0)]
    assert split_batch(20, [*fast, ActorShare("slow", 1.0)])["slow"] == 1
    assert split_batch(20, [*fast, ActorShare("slow", 0.95)]) == {"f1": 10, "f2": 10, "slow": 0}
    near = [ActorShare("a", 1.0), ActorShare("b", 1.0), ActorShare("slow", 0.6)]
    assert split_batch(3, near) == {"a": 1, "b": 1, "slow": 1}
    assert split_batch(20, [*fast, ActorShare("slow", 0.5)]) == {"f1": 10, "f2": 10, "slow": 0}
    costly = ActorShare("costly", 10.0, overhead_s=2.0)
    assert split_batch(20, [*fast, costly]) == {"f1": 10, "f2": 10, "costly": 0}


def test_overheads_equalise_the_end() -> None:
    """Shares from t = a + b n end together: the one with less overhead does more."""
    actors = [ActorShare("a", 1.0, overhead_s=0.0), ActorShare("b", 1.0, overhead_s=4.0)]
    assert split_batch(10, actors) == {"a": 7, "b": 3}


def test_an_actor_that_is_back_gets_less() -> None:
    """The rejoin factor multiplies the share."""
    actors = [ActorShare("a", 1.0), ActorShare("b", 1.0, factor=0.5)]
    assert split_batch(9, actors) == {"a": 6, "b": 3}


def test_one_absurd_average_does_not_take_the_batch() -> None:
    """CASE L12: a weight counts for 16 medians at most, NaN and infinity for the median."""
    actors = [ActorShare(f"a{i}", 1.0) for i in range(4)]
    split = split_batch(200, [*actors, ActorShare("absurd", 1e308)])
    assert split["absurd"] == 160
    uneven = [ActorShare(f"a{i}", 1.0 - i / 100) for i in range(4)]
    assert split_batch(20, [*uneven, ActorShare("absurd", 1e9)])["absurd"] == 16
    odd = [ActorShare("nan", float("nan")), ActorShare("inf", float("inf"))]
    assert set(split_batch(60, [*actors, *odd]).values()) == {10}


def test_nothing_known_is_an_even_split() -> None:
    """CASE L12: without any average (Redis lost) the batch is split evenly."""
    assert set(split_batch(12, shares({a: Pace() for a in "abcd"}, 0.0)).values()) == {3}


def test_deal_leaves_a_pool() -> None:
    """70 % is dealt, 30 % pulled; everybody is dealt one first; nobody there: all is pulled."""
    actors = [ActorShare("a", 1.0), ActorShare("b", 1.0)]
    assert deal(10, actors) == Deal({"a": 4, "b": 3}, 3)
    assert deal(2, actors) == Deal({"a": 1, "b": 1}, 0)
    assert deal(10, actors, dealt_fraction=0.0) == Deal({"a": 0, "b": 0}, 10)
    assert deal(10, []) == Deal({}, 10)


def test_impossible_splits_are_refused() -> None:
    """Negative batches, doubled actors, nobody to split among, fractions outside 0..1."""
    a = ActorShare("a", 1.0)
    for call in (
        lambda: split_batch(-1, [a]),
        lambda: split_batch(1, []),
        lambda: split_batch(1, [a, a]),
        lambda: deal(1, [a], dealt_fraction=1.5),
        lambda: deal(1, [a], dealt_fraction=float("nan")),
    ):
        with pytest.raises(InvalidInputError):
            call()
    assert split_batch(0, []) == {}


class _Lease:
    """A sample as the backend gives it."""

    def __init__(self, at_s: float, elapsed_s: float, tokens: int, *, counts: bool = True) -> None:
        self.at_s, self.elapsed_s, self.tokens, self.counts = at_s, elapsed_s, tokens, counts


def _play(*, fitted: bool, seed: int, steps: int) -> tuple[list[int], float]:
    """Two fast and two slow actors, t = speed (a + b n): the last shares, and all time over ideal.

    The ideal is the split by the true lines; a step lasts as long as its slowest actor.
    """
    rng = random.Random(seed)
    speeds = {"a1": 1.0, "a2": 1.0, "b1": 3.0, "b2": 3.0}
    true = [ActorShare(a, 1 / (0.01 * k), 10.0 * k) for a, k in speeds.items()]
    ideal = split_batch(64, true, tokens_per_group=100.0)
    paces = {actor: Pace() for actor in speeds}
    groups = dict.fromkeys(speeds, 16)
    spent_s = ideal_s = now_s = 0.0
    for _ in range(steps):
        noise = {actor: rng.uniform(0.95, 1.05) for actor in speeds}
        took_s = {a: k * (10 + groups[a]) * noise[a] for a, k in speeds.items()}
        spent_s += max(took_s.values())
        ideal_s += max(k * (10 + ideal[a]) * noise[a] for a, k in speeds.items())
        for actor, pace in paces.items():
            lease = _Lease(now_s + took_s[actor], took_s[actor], 100 * groups[actor])
            paces[actor] = pace.fold([lease])
        now_s += max(took_s.values())
        planned = shares(paces, now_s)
        if not fitted:
            planned = [ActorShare(share.actor_id, _average(paces, share)) for share in planned]
        groups = split_batch(64, planned, tokens_per_group=100.0)
    off = [groups[actor] - ideal[actor] for actor in speeds]
    return off, spent_s / ideal_s


def _average(paces: dict[str, Pace], share: ActorShare) -> float:
    rate = paces[share.actor_id].ema.tokens_per_s
    assert rate is not None
    return rate


@pytest.mark.parametrize("seed", range(5))
def test_the_fit_reaches_the_ideal_where_the_average_creeps(seed: int) -> None:
    """Memory-bound 1:3 pool: planned by t = a + b n the split is ideal after ten steps."""
    off, fitted = _play(fitted=True, seed=seed, steps=10)
    assert max(map(abs, off)) <= 1
    _, plain = _play(fitted=False, seed=seed, steps=10)
    assert fitted < plain
    _, fitted = _play(fitted=True, seed=seed, steps=40)
    assert fitted < 1.1
