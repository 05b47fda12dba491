"""Whatever the measurements, plans are whole, bounded and fair."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from deltastore.scheduling.ema import MAX_RATE_TOKENS_PER_S, Ema
from deltastore.scheduling.fit import fit_time
from deltastore.scheduling.pace import Pace, shares
from deltastore.scheduling.split import ActorShare, deal, split_batch

anything = st.floats(allow_nan=True, allow_infinity=True)
rates = st.floats(min_value=1e-3, max_value=1e6)


@st.composite
def fleets(draw: st.DrawFn, values: st.SearchStrategy[float] = anything) -> list[ActorShare]:
    """Actors with any measurements."""
    count = draw(st.integers(1, 12))
    return [
        ActorShare(f"a{i}", draw(values), draw(values), draw(values | st.floats(0.1, 1.0)))
        for i in range(count)
    ]


@given(total=st.integers(0, 100_000), actors=fleets(), tokens=rates)
def test_shares_sum_to_the_batch(total: int, actors: list[ActorShare], tokens: float) -> None:
    """CASE L12: for any measurements shares are whole, sum exactly, leave out only the slow."""
    split = split_batch(total, actors, tokens_per_group=tokens)
    assert set(split) == {actor.actor_id for actor in actors}
    assert sum(split.values()) == total
    assert min(split.values()) >= 0
    unknown = [actor.actor_id for actor in actors if not 1e-9 <= actor.tokens_per_s <= 1e12]
    if total >= len(actors):
        assert all(split[actor_id] >= 1 for actor_id in unknown)  # else never known


@given(total=st.integers(0, 10_000), speeds=st.lists(rates, min_size=1, max_size=12))
def test_the_faster_never_gets_less(total: int, speeds: list[float]) -> None:
    """Among actors alike in all else, a higher speed never means a smaller share."""
    actors = [ActorShare(f"a{i:02}", speed) for i, speed in enumerate(speeds)]
    split = split_batch(total, actors)
    ordered = sorted(actors, key=lambda actor: actor.tokens_per_s)
    for slow, fast in itertools.pairwise(ordered):
        if fast.tokens_per_s > slow.tokens_per_s:
            assert split[slow.actor_id] <= split[fast.actor_id]


@given(total=st.integers(1, 10_000), speed=rates, peers=st.integers(4, 12))
def test_no_average_takes_the_batch(total: int, speed: float, peers: int) -> None:
    """CASE L12: one absurd average among equals gets 16 shares of one at most."""
    actors = [ActorShare(f"a{i}", speed) for i in range(peers)]
    split = split_batch(total, [*actors, ActorShare("absurd", speed * 1e12)])
    assert split["absurd"] <= math.ceil(total * 16 / (16 + peers))


@given(total=st.integers(0, 10_000), actors=fleets(), fraction=st.floats(0, 1))
def test_a_deal_keeps_every_group(total: int, actors: list[ActorShare], fraction: float) -> None:
    """Dealt and pulled groups together are the batch."""
    dealt = deal(total, actors, dealt_fraction=fraction)
    assert sum(dealt.dealt.values()) + dealt.open_pool == total
    assert dealt.open_pool >= 0


class _Lease:
    """A sample with any numbers in it."""

    def __init__(self, at_s: float, elapsed_s: float, tokens: int, counts: bool) -> None:
        self.at_s, self.elapsed_s, self.tokens, self.counts = at_s, elapsed_s, tokens, counts


leases = st.builds(_Lease, anything, anything, st.integers(-(10**15), 10**15), st.booleans())


@given(samples=st.lists(st.tuples(anything, anything, anything), max_size=20), now=anything)
def test_averages_stay_numbers(samples: list[tuple[float, float, float]], now: float) -> None:
    """CASE L12: no sequence of samples makes an average NaN, infinite or negative."""
    ema = Ema()
    for sample in samples:
        ema = ema.fold(*sample)
        rate = ema.at(now, 1.0)
        assert 0 <= rate <= MAX_RATE_TOKENS_PER_S


@given(fleet=st.lists(st.lists(leases, max_size=12), min_size=1, max_size=6), now=anything)
def test_any_history_can_be_split(fleet: list[list[_Lease]], now: float) -> None:
    """CASE L12: whatever leases did, the plan made from them splits the batch exactly."""
    paces = {f"a{i}": Pace().fold(samples) for i, samples in enumerate(fleet)}
    planned = shares(paces, now)
    assert all(math.isfinite(share.tokens_per_s) for share in planned)
    assert sum(split_batch(64, planned).values()) == 64


@given(points=st.lists(st.tuples(anything, anything), max_size=16))
def test_fits_are_possible_engines(points: list[tuple[float, float]]) -> None:
    """A fit, where there is one, has a positive slope and no negative overhead."""
    fit = fit_time(points)
    if fit is not None:
        assert 0 < fit.s_per_token < math.inf
        assert 0 <= fit.overhead_s < math.inf
