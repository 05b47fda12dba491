"""A fault that somebody picked by hand is the one that works: a seed picks what happens when.

Every kind of fault comes once in each round, in an order and on targets that the seed decides, one
every `every_s`. The same seed gives the same schedule.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Fault(StrEnum):
    """What can go wrong."""

    KILL_ACTOR = "actor killed and restarted"
    FREEZE_ACTOR = "actor stopped past its lease"
    SLOW_ACTOR = "actor ten times slower"
    FLIP_RESULT = "result stored with a flipped bit"
    CUT_RESULT = "result stored cut short"
    FLIP_READ = "delta read with a flipped bit"
    STEP_CLOCK = "actor's clock stepped by hours"
    JUMP_CLOCK = "actor's monotonic clock an hour ahead"
    KILL_REDIS = "Redis killed, back with nothing"
    KILL_REGION = "region's store killed and restarted"
    HANG_REGION = "region's store hangs"


ON_ACTORS = frozenset(
    {
        Fault.KILL_ACTOR,
        Fault.FREEZE_ACTOR,
        Fault.SLOW_ACTOR,
        Fault.FLIP_RESULT,
        Fault.CUT_RESULT,
        Fault.FLIP_READ,
        Fault.STEP_CLOCK,
        Fault.JUMP_CLOCK,
    }
)
ON_REGIONS = frozenset({Fault.KILL_REGION, Fault.HANG_REGION})
LASTS_S = {
    Fault.KILL_ACTOR: 1.0,
    Fault.FREEZE_ACTOR: 9.0,  # longer than the leases here
    Fault.SLOW_ACTOR: 12.0,
    Fault.KILL_REDIS: 2.0,
    Fault.KILL_REGION: 4.0,
    Fault.HANG_REGION: 6.0,
}


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault of a schedule.

    Args:
        at_s: from the start of the chaos.
        target: an actor or a region; empty for Redis.
        lasts_s: how long until it is taken back; 0 where there is nothing to take back.
    """

    at_s: float
    fault: Fault
    target: str
    lasts_s: float


def plan(
    seed: int, duration_s: float, every_s: float, actors: Sequence[str], regions: Sequence[str]
) -> list[Planned]:
    """The schedule of a seed."""
    numbers = random.Random(seed)
    schedule: list[Planned] = []
    at_s = every_s / 2
    while at_s < duration_s:
        kinds = list(Fault)
        numbers.shuffle(kinds)
        for fault in kinds:
            if at_s >= duration_s:
                break
            target = ""
            if fault in ON_ACTORS:
                target = numbers.choice(actors)
            elif fault in ON_REGIONS:
                target = numbers.choice(regions)
            schedule.append(Planned(at_s, fault, target, LASTS_S.get(fault, 0.0)))
            at_s += every_s
    return schedule
