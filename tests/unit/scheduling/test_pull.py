"""The open pool goes to whoever finishes it soonest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deltastore.scheduling.pull import MAX_FOR_S, MIN_FOR_S, pull_limits
from deltastore.scheduling.split import ActorShare, Deal, deal, split_batch

POOL = [ActorShare("s", 1.0), ActorShare("f", 10.0), ActorShare("g", 9.0)]


def test_everybody_may_take_its_part_and_the_fast_share_the_rest() -> None:
    """Dealt and pulled together make the fair split; the slow take nothing beyond."""
    dealt = deal(40, POOL)
    limits = pull_limits(40, POOL, dealt)
    fair = split_batch(40, POOL)
    assert {a: dealt.dealt[a] + limits.left[a] for a in fair} == fair
    assert sum(limits.left.values()) == dealt.open_pool
    assert {a: limits.sharers_of(a) for a in fair} == {"s": 0, "f": 2, "g": 2}


def test_the_limits_last_three_steps() -> None:
    """They hold three times as long as the step should take, within bounds."""
    assert pull_limits(40, POOL, deal(40, POOL), tokens_per_group=10.0).for_s == 3 * 20.0
    assert pull_limits(40, POOL, deal(40, POOL), tokens_per_group=1e-3).for_s == MIN_FOR_S
    assert pull_limits(40, POOL, deal(40, POOL), tokens_per_group=1e9).for_s == MAX_FOR_S


def test_nobody_is_limited_when_nobody_is_known() -> None:
    """Without eligible actors there is nobody to limit."""
    assert pull_limits(40, [], Deal({}, 40)).left == {}


@given(
    total=st.integers(0, 500),
    speeds=st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=10),
    fraction=st.floats(0, 1),
)
def test_somebody_may_always_take_the_rest(
    total: int, speeds: list[float], fraction: float
) -> None:
    """Whatever the speeds, the fastest is among the sharers: no job waits for the limits' end."""
    actors = [ActorShare(f"a{i}", speed) for i, speed in enumerate(speeds)]
    limits = pull_limits(total, actors, deal(total, actors, dealt_fraction=fraction))
    fastest = max(actors, key=lambda actor: actor.tokens_per_s)
    assert limits.sharers_of(fastest.actor_id) >= 1
    assert min(limits.left.values()) >= 0
