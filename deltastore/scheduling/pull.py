"""An open pool without limits goes to whoever asks first: a slow actor's handful ends a step late.

Every actor may take its own part of the pool at once, beside what was dealt to it. When it runs
out of work, only actors near the fastest share the rest, a handful at a time: a job that a slow one
would begin now, a fast one finishes sooner. The limits end after `LEASE_SLACK` times the expected
length of the step, so that nothing waits for a fast actor that does not come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.scheduling.pace import LEASE_SLACK, finish_s, near_fastest
from deltastore.scheduling.split import split_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltastore.scheduling.split import ActorShare, Deal

MIN_FOR_S = 1.0
MAX_FOR_S = 600.0  # whatever the averages say


@dataclass(frozen=True, slots=True)
class PullLimits:
    """What each actor of a split may take of the open pool."""

    left: dict[str, int]
    """Groups per actor: its part of the pool."""
    sharers: frozenset[str]
    """Who shares the rest."""
    for_s: float
    """How long the limits hold."""

    def sharers_of(self, actor_id: str) -> int:
        """How many share the rest, if this actor is one of them, else 0."""
        return len(self.sharers) if actor_id in self.sharers else 0


def pull_limits(
    total_groups: int, actors: Sequence[ActorShare], dealt: Deal, *, tokens_per_group: float = 1.0
) -> PullLimits:
    """The limits that go with a deal of `total_groups` to `actors`."""
    if not actors:
        return PullLimits({}, frozenset(), MIN_FOR_S)
    fair = split_batch(total_groups, actors, tokens_per_group=tokens_per_group)
    left = {a: max(0, share - dealt.dealt.get(a, 0)) for a, share in fair.items()}
    step_s = max(finish_s(actor, fair[actor.actor_id] * tokens_per_group) for actor in actors)
    for_s = min(max(LEASE_SLACK * step_s, MIN_FOR_S), MAX_FOR_S)
    return PullLimits(left, frozenset(near_fastest(actors)), for_s)
