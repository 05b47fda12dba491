"""A split that loses a group to rounding trains on less than it paid for: shares sum exactly.

Groups are whole. Every eligible actor gets at least one where the batch allows, so that a slow or
new one keeps being measured; but nobody waits for an actor's only group if a faster one would be
done with it sooner: what was measured of the slow one fades until it is tried again. No weight
counts for more than `MAX_OVER_MEDIAN` medians, so that one absurd average cannot take the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from deltastore.errors import InvalidInputError, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

DEALT_FRACTION = 0.7  # the rest is pulled as slots free: it absorbs what the averages get wrong
MAX_OVER_MEDIAN = 16.0  # the widest real mix of GPUs in one pool is about 10
MIN_OVER_MEDIAN = 1e-3
_SMALLEST, _LARGEST = 1e-9, 1e12  # of rates, overheads and amounts of work that can be meant
_BISECTIONS = 200


@dataclass(frozen=True, slots=True)
class ActorShare:
    """What a split knows of one eligible actor."""

    actor_id: str
    tokens_per_s: float
    overhead_s: float = 0.0
    """What its work costs before the first token; 0 is the plain proportional rule."""
    factor: float = 1.0
    """Below 1 for an actor that has just come back."""


@dataclass(frozen=True, slots=True)
class Deal:
    """How a batch is handed out."""

    dealt: dict[str, int]
    """Groups per actor."""
    open_pool: int
    """Groups for whoever has a free slot."""


def split_batch(
    total_groups: int, actors: Sequence[ActorShare], *, tokens_per_group: float = 1.0
) -> dict[str, int]:
    """Whole groups per actor, summing to `total_groups`, so that all should end together.

    With no overheads that is B_a = floor(B tau_a / sum tau), the remainder by largest fraction.
    """
    if total_groups < 0:
        raise InvalidInputError(
            f"a batch of {total_groups} groups cannot be split", kind=Kind.SETTING
        )
    if not _SMALLEST <= tokens_per_group <= _LARGEST:
        raise InvalidInputError(
            f"tokens_per_group {tokens_per_group!r} is not allowed", kind=Kind.SETTING
        )
    if not actors:
        if total_groups:
            raise InvalidInputError(
                f"nobody is eligible for {total_groups} groups",
                kind=Kind.SETTING,
                hint="put them into the open pool until an actor is at v or v - 1",
            )
        return {}
    if len({actor.actor_id for actor in actors}) != len(actors):
        raise InvalidInputError("an actor is in the split twice", kind=Kind.NAME)
    weights = _weights(total_groups * tokens_per_group, actors)
    total = math.fsum(weights)
    quotas = [total_groups * weight / total for weight in weights]
    shares = [math.floor(quota) for quota in quotas]
    # By largest fraction; of equal ones the faster actor, then the name: the same on every machine.
    fastest_first = sorted(
        range(len(actors)),
        key=lambda i: (-weights[i], -_finite(actors[i].tokens_per_s), actors[i].actor_id),
    )
    order = sorted(fastest_first, key=lambda i: shares[i] - quotas[i])
    for i in range(total_groups - sum(shares)):
        shares[order[i % len(order)]] += 1
    times_s = [_times_s(actor, tokens_per_group) for actor in actors]
    _no_stragglers(shares, times_s, fastest_first, MAX_OVER_MEDIAN * median(quotas))
    step_s = max(_ends_s(shares, times_s).values(), default=0.0)
    worth = [a + b <= step_s for a, b in times_s]
    _at_least_one(shares, [i for i in fastest_first if worth[i] or shares[i]])
    return {actor.actor_id: share for actor, share in zip(actors, shares, strict=True)}


def _no_stragglers(
    shares: list[int],
    times_s: Sequence[tuple[float, float]],
    fastest_first: Sequence[int],
    most: float,
) -> None:
    """Take the only group from those who would end last, where somebody else ends it sooner.

    Rounding up gives a slow actor a group that ends after everybody else, with all its jitter.
    Nobody comes to more than `most`: an absurdly fast one would relieve all others.
    """
    for i in reversed(fastest_first):
        alone_s = sum(times_s[i])
        ends_s = _ends_s(shares, times_s)
        others_s = max((end_s for j, end_s in ends_s.items() if j != i), default=math.inf)
        if shares[i] != 1 or alone_s <= others_s:
            continue
        sooner_s, j = min((end_s + times_s[j][1], j) for j, end_s in ends_s.items() if j != i)
        if sooner_s < alone_s and shares[j] + 1 <= most:
            shares[i] = 0
            shares[j] += 1


def _ends_s(shares: Sequence[int], times_s: Sequence[tuple[float, float]]) -> dict[int, float]:
    """When everybody ends who has something to do and whose speed is known."""
    rows = enumerate(zip(shares, times_s, strict=True))
    return {i: a + b * share for i, (share, (a, b)) in rows if share and b}


def _at_least_one(shares: list[int], fastest_first: Sequence[int]) -> None:
    """Give to those without, fastest first, from those with most, slowest first."""
    for i in fastest_first:
        if shares[i]:
            continue
        richest = max(reversed(fastest_first), key=lambda j: shares[j])
        if shares[richest] <= 1:
            return
        shares[richest] -= 1
        shares[i] = 1


def _times_s(actor: ActorShare, tokens_per_group: float) -> tuple[float, float]:
    """The (overhead, seconds per group) of an actor; no seconds where its speed is unknown."""
    known = _SMALLEST <= actor.tokens_per_s <= _LARGEST
    overhead_s = actor.overhead_s if 0 < actor.overhead_s <= _LARGEST else 0.0
    return (overhead_s, tokens_per_group / actor.tokens_per_s) if known else (0.0, 0.0)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _weights(total_tokens: float, actors: Sequence[ActorShare]) -> list[float]:
    """Tokens each would make until all end together, times its factor; positive and bounded."""
    rates = _bounded([actor.tokens_per_s for actor in actors])
    overheads = [actor.overhead_s if 0 < actor.overhead_s <= _LARGEST else 0.0 for actor in actors]
    # The moment T at which sum of (T - overhead) * rate is the batch. Those whose overhead alone
    # is longer than that get nothing here and one group in the end.
    low, high = 0.0, max(overheads) + total_tokens / min(rates) + 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        made = math.fsum(
            max(0.0, middle - a) * rate for a, rate in zip(overheads, rates, strict=True)
        )
        low, high = (middle, high) if made < total_tokens else (low, middle)
    made_each = [max(0.0, high - a) * rate for a, rate in zip(overheads, rates, strict=True)]
    factors = [
        max(actor.factor, MIN_OVER_MEDIAN) if 0 < actor.factor < 1 else 1.0 for actor in actors
    ]
    return [weight * factor for weight, factor in zip(_bounded(made_each), factors, strict=True)]


def _bounded(values: Sequence[float]) -> list[float]:
    """Each between `MIN_OVER_MEDIAN` and `MAX_OVER_MEDIAN` medians; no number: the median."""
    known = [value for value in values if _SMALLEST <= value <= _LARGEST]
    middle = median(known) if known else 1.0
    return [
        min(max(value, MIN_OVER_MEDIAN * middle), MAX_OVER_MEDIAN * middle)
        if 0 <= value < math.inf
        else middle
        for value in values
    ]


def deal(
    total_groups: int,
    actors: Sequence[ActorShare],
    *,
    dealt_fraction: float = DEALT_FRACTION,
    tokens_per_group: float = 1.0,
) -> Deal:
    """Deal a fraction of the batch and leave the rest to be pulled; everybody is dealt one first.

    With nobody eligible everything waits in the open pool.
    """
    if not 0 <= dealt_fraction <= 1:
        raise InvalidInputError(
            f"dealt_fraction {dealt_fraction!r} is not allowed",
            kind=Kind.SETTING,
            hint="use 0 (all pulled) to 1 (all dealt)",
        )
    if not actors:
        return Deal({}, total_groups)
    dealt_groups = math.floor(total_groups * dealt_fraction)
    if dealt_groups:
        dealt_groups = max(dealt_groups, min(total_groups, len(actors)))
    shares = split_batch(dealt_groups, actors, tokens_per_group=tokens_per_group)
    return Deal(shares, total_groups - dealt_groups)
