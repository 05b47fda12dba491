"""What measured splits are worth: steps per minute against an even split, and against an oracle.

Run by `make bench-schedule`. A simulation on a clock of its own, of the real scheduling code: the
trainer's `Fleet` (averages, fits, splits, limits on pulls) and the job table that Redis is tested
against. Engines are memory-bound: all that an actor holds is decoded together, in t = a + b n of
its tokens, with a as much as four groups. Every step is 64 groups, over when the last is settled.
One of the fast actors runs at a third of its speed from step 20 to 40.

even      every actor the same number of groups
plain     B_a by largest remainders of tau, tau the average (beta 0.8) of tokens / elapsed per step
measured  what this library does
oracle    the best split there is, by the true lines, told of every change but blind to jitter
"""

from __future__ import annotations

import heapq
import io
import random
import sys
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from benchmarks.report import Report, Target
from deltastore.coordination.backend import ActorRecord, JobOffer
from deltastore.coordination.memory import MemoryCoordination
from deltastore.scheduling.ema import Ema
from deltastore.scheduling.split import ActorShare, split_batch
from deltastore.testing.clock import FakeClock
from deltastore.testing.fleet import active, claim_of, gate_of, policy_hash_of
from workers.trainer.fleet import Fleet

if TYPE_CHECKING:
    from collections.abc import Sequence

GROUPS = 64
TOKENS = 100  # per group
OVERHEAD_GROUPS = 4.0
GROUP_S = 10.0  # steps of the slowest pool take minutes, of the fastest 40 s
DEALT = 0.7
FOREVER_S = 86_400.0
CHANGE, BACK, END = 20, 40, 60
SETTLING = 5  # steps that a change may take to be followed


@dataclass(frozen=True, slots=True)
class Pool:
    """Actors by speed: 1 decodes a group in `GROUP_S`, beside the overhead.

    Args:
        hand: how many leases an actor holds at once; they are decoded together.
        jitter: standard deviation of the logarithm of each actor's speed in each step.
    """

    name: str
    speeds: tuple[float, ...]
    hand: int = GROUPS
    jitter: float = 0.0
    seed: int = 0

    def at(self, step: int) -> list[float]:
        """The speeds of a step: the last actor is slow for a while."""
        slowed = CHANGE <= step < BACK
        return [*self.speeds[:-1], self.speeds[-1] / (3 if slowed else 1)]

    def noise(self, step: int) -> list[float]:
        """How each actor's speed differs from what it should be, in a step."""
        numbers = random.Random(f"{self.seed}/{step}")
        return [numbers.lognormvariate(0.0, self.jitter) for _ in self.speeds]

    def time_s(self, groups: int, speed: float) -> float:
        """How long an actor takes for its groups, a hand at a time."""
        hands = -(-groups // self.hand)
        return GROUP_S * (OVERHEAD_GROUPS * hands + groups) / speed

    def step_s(self, split: Sequence[int], speeds: Sequence[float]) -> float:
        """How long a step takes whose groups are all dealt."""
        return max(self.time_s(n, v) for n, v in zip(split, speeds, strict=True))

    def ideal(self, speeds: Sequence[float]) -> list[int]:
        """The split that ends first, by trying every moment at which some actor ends."""
        ends = sorted({self.time_s(n, v) for v in speeds for n in range(1, GROUPS + 1)})

        def most(end_s: float) -> list[int]:
            return [
                max(n for n in range(GROUPS + 1) if self.time_s(n, v) <= end_s + 1e-9)
                for v in speeds
            ]

        low, high = 0, len(ends) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if sum(most(ends[middle])) >= GROUPS else (middle + 1, high)
        split = most(ends[low])
        while sum(split) > GROUPS:  # from whoever ends last: nobody ends later for it
            worst = max(range(len(split)), key=lambda i: self.time_s(split[i], speeds[i]))
            split[worst] -= 1
        return split

    def true_speeds(self, step: int) -> list[float]:
        """What the actors do in a step, jitter and all."""
        return [v * e for v, e in zip(self.at(step), self.noise(step), strict=True)]


def play_oracle(pool: Pool) -> list[float]:
    """Seconds per step of the best split."""
    return [pool.step_s(pool.ideal(pool.at(step)), pool.true_speeds(step)) for step in range(END)]


def play_even(pool: Pool) -> list[float]:
    """Seconds per step of the even split."""
    actors = [ActorShare(str(i), 1.0) for i in range(len(pool.speeds))]
    split = list(split_batch(GROUPS, actors).values())
    return [pool.step_s(split, pool.true_speeds(step)) for step in range(END)]


def play_plain(pool: Pool) -> list[float]:
    """Seconds per step when shares follow the average speed."""
    averages = [Ema() for _ in pool.speeds]
    now_s, times_s = 0.0, []
    for step in range(END):
        speeds = pool.true_speeds(step)
        known = [average.tokens_per_s or 1.0 for average in averages]
        actors = [ActorShare(str(i), rate) for i, rate in enumerate(known)]
        split = list(split_batch(GROUPS, actors).values())
        took_s = [pool.time_s(n, v) for n, v in zip(split, speeds, strict=True)]
        now_s += max(took_s)
        averages = [
            average.fold(n * TOKENS, seconds, now_s) if n else average
            for average, n, seconds in zip(averages, split, took_s, strict=True)
        ]
        times_s.append(max(took_s))
    return times_s


def play_measured(pool: Pool) -> list[float]:
    """Seconds per step of the real code: leases, samples, fits, deals and pulls."""
    clock = FakeClock()
    table = MemoryCoordination(clock)
    fleet = Fleet(table)
    names = [f"actor{i}" for i in range(len(pool.speeds))]
    for name in names:
        table.register(ActorRecord(name, "eu", "simulated", 1), FOREVER_S)
        table.heartbeat(name, active(1), FOREVER_S)
    times_s = []
    for step in range(END):
        deal = fleet.split(
            GROUPS,
            head_version=1,
            hashes={1: policy_hash_of(1)},
            dealt_fraction=DEALT,
            tokens_per_group=float(TOKENS),
        )
        holders = [a for a, share in deal.dealt.items() for _ in range(share)]
        holders += [None] * deal.open_pool
        ids = [f"{step}-{i}" for i in range(GROUPS)]
        rows = zip(ids, holders, strict=True)
        table.offer([JobOffer(job, b"", gate_of(1), TOKENS, holder) for job, holder in rows])
        times_s.append(_run_step(pool, step, table, clock, names))
        table.take_settled(GROUPS, 0.0)
        for name in names:
            table.heartbeat(name, active(1), FOREVER_S)
    return times_s


def _run_step(
    pool: Pool, step: int, table: MemoryCoordination, clock: FakeClock, names: Sequence[str]
) -> float:
    """Let the actors take, decode and settle until nothing is left; how long that took."""
    speeds = pool.true_speeds(step)
    started_s, left, order = clock.utc_s(), GROUPS, count()
    idle, busy = list(range(len(names))), []
    while left:
        for i in list(idle):
            asked = (
                table.grant(names[i], 1, policy_hash_of(1), FOREVER_S) for _ in range(pool.hand)
            )
            leases = []
            for lease in asked:
                if lease is None:
                    break
                leases.append(lease)
            if leases:
                idle.remove(i)
                end_s = clock.utc_s() + pool.time_s(len(leases), speeds[i])
                heapq.heappush(busy, (end_s, next(order), i, leases))
        end_s, _, i, leases = heapq.heappop(busy)
        clock.advance_s(end_s - clock.utc_s())
        for lease in leases:
            table.settle(claim_of(lease, names[i], tokens=TOKENS))
        left -= len(leases)
        idle.append(i)
    return clock.utc_s() - started_s


def settled(times_s: Sequence[float]) -> list[float]:
    """The steps by which every change must have been followed."""
    starts = (0, CHANGE, BACK)
    return [t for s, t in enumerate(times_s) if all(not 0 <= s - c < SETTLING for c in starts)]


def steps_per_minute(times_s: Sequence[float]) -> float:
    """Steps per minute over all these steps."""
    return 60 * len(times_s) / sum(times_s)


PLAYS = {"plain": play_plain, "measured": play_measured}


def measure(report: Report, pool: Pool, *, seeds: int) -> None:
    """The rows of one pool, over several seeds."""
    pools = [Pool(pool.name, pool.speeds, pool.hand, pool.jitter, seed) for seed in range(seeds)]
    even = steps_per_minute([t for p in pools for t in settled(play_even(p))])
    oracle = steps_per_minute([t for p in pools for t in settled(play_oracle(p))])
    facts = {"jitter": f"{pool.jitter:.0%}", "leases at once": pool.hand}
    report.add(f"{pool.name}: even", even, "steps/min", **facts)
    for name, play in PLAYS.items():
        value = steps_per_minute([t for p in pools for t in settled(play(p))])
        report.add(f"{pool.name}: {name}, against even", value, "steps/min", baseline=even, **facts)
        target = Target(least=0.95, of_ratio=True) if name == "measured" else None
        report.add(
            f"{pool.name}: {name}, against the oracle", value, "steps/min",
            baseline=oracle, target=target, **facts,
        )  # fmt: skip


POOLS = (
    ("1:1", (1.0, 1.0, 1.0, 1.0)),
    ("1:3", (1.0, 1.0, 3.0, 3.0)),
    ("1:10", (1.0, 1.0, 10.0, 10.0)),
)


def main() -> int:
    """Play everything; 0 when all targets hold."""
    report = Report("schedule", groups=GROUPS, overhead_groups=OVERHEAD_GROUPS, steps=END)
    for name, speeds in POOLS:
        for jitter, seeds in ((0.0, 1), (0.1, 5)):
            measure(report, Pool(name, speeds, jitter=jitter), seeds=seeds)
    for name, speeds in POOLS:  # small hands: the line has steps in it, pulls even out the jitter
        measure(report, Pool(name, speeds, hand=8, jitter=0.1), seeds=5)
    return report.finish()


if __name__ == "__main__":
    sys.stdout = io.TextIOWrapper(sys.stdout.buffer, line_buffering=True)
    raise SystemExit(main())
