"""A split from yesterday's speeds starves whoever recovered: every batch is split from fresh ones.

What the trainer knows of its actors between two batches: their speed by ended leases, who is near
enough to work, and who came back after a loss.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deltastore.coordination.backend import MAX_ACTORS, ActorState, Pull
from deltastore.scheduling.gate import eligible
from deltastore.scheduling.pace import Pace, shares
from deltastore.scheduling.pull import pull_limits
from deltastore.scheduling.split import Deal, deal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deltastore.coordination.backend import Coordination, Member, Throughput
    from workers.trainer.rates import RateSnapshot

_WORKING = (ActorState.ACTIVE, ActorState.JOINING)
TRY_AGAIN_SPLITS = 40  # trying a slow actor costs 1 % then, a cured one idles no longer
MAX_REMEMBERED = 2 * MAX_ACTORS  # paces of actors that are here or may come back
AVERAGE_TTL_S = 3600.0  # an older average says nothing of today's machine


class Fleet:
    """The speeds of the actors of one run. Used from the trainer's loop only.

    Args:
        snapshot: speeds that outlive Redis and this process; None: they do not.
    """

    def __init__(self, coordination: Coordination, snapshot: RateSnapshot | None = None) -> None:
        self._coordination = coordination
        self._snapshot = snapshot
        self._paces: dict[str, Pace] = {}
        """Of everybody seen so far; who was here last comes last."""
        self._away: set[str] = set()
        self._left_out: dict[str, int] = {}
        """For how many splits in a row each actor was eligible and dealt nothing."""

    def split(
        self,
        groups: int,
        *,
        head_version: int,
        hashes: Mapping[int, str],
        dealt_fraction: float,
        tokens_per_group: float,
    ) -> Deal:
        """How to hand out a batch now: groups per eligible actor, and the open pool."""
        members = self._coordination.members()
        self._observe(members)
        near = [m.actor_id for m in members if eligible(m, head_version, hashes) is not None]
        now_s = self._coordination.now_s()
        paces = {actor_id: self._paces[actor_id] for actor_id in near}
        actors = shares(paces, now_s)
        dealt = deal(
            groups, actors, dealt_fraction=dealt_fraction, tokens_per_group=tokens_per_group
        )
        dealt = self._tried_again(dealt)
        limits = pull_limits(groups, actors, dealt, tokens_per_group=tokens_per_group)
        known = any(pace.ema.tokens_per_s is not None for pace in paces.values())
        pulls = {a: Pull(left, limits.sharers_of(a)) for a, left in limits.left.items()}
        self._coordination.limit_pulls(pulls if known else {}, limits.for_s)
        return dealt

    def _tried_again(self, dealt: Deal) -> Deal:
        """The deal, with a group for each actor that was left out for `TRY_AGAIN_SPLITS` splits.

        All who are left out are tried in the same step: the slowest of them is its cost.
        """
        left_out = {actor_id for actor_id, share in dealt.dealt.items() if not share}
        self._left_out = {a: self._left_out.get(a, 0) + 1 for a in left_out}
        if max(self._left_out.values(), default=0) < TRY_AGAIN_SPLITS:
            return dealt
        self._left_out = {}
        tried = sorted(left_out)[: dealt.open_pool]
        return Deal(dealt.dealt | dict.fromkeys(tried, 1), dealt.open_pool - len(tried))

    def eligible_count(self, *, head_version: int, hashes: Mapping[int, str]) -> int:
        """How many actors may work now."""
        members = self._coordination.members()
        return sum(eligible(m, head_version, hashes) is not None for m in members)

    def can_serve(self, gate: Sequence[tuple[int, str]]) -> bool:
        """Whether some working actor is at a version of `gate`, or has yet to reach one."""
        newest = max(version for version, _ in gate)
        for member in self._coordination.members():
            version = member.status.active_version
            if member.state in _WORKING and (version is None or version <= newest):
                return True
        return False

    def _observe(self, members: Sequence[Member]) -> None:
        throughput = self._coordination.throughput()
        now_s = self._coordination.now_s()
        here = {m.actor_id for m in members if m.state is not ActorState.LOST}
        for actor_id in here:
            pace = self._paces.pop(actor_id, None)
            if pace is not None and actor_id in self._away:
                pace = pace.rejoined()
            known = throughput.get(actor_id)
            pace = self._restored(actor_id, pace or Pace(), known, now_s)
            self._paces[actor_id] = pace if known is None else pace.fold(known.samples)
        while len(self._paces) > MAX_REMEMBERED:
            del self._paces[next(iter(self._paces))]
        self._away = self._paces.keys() - here
        averages = {
            actor_id: rate
            for actor_id in here
            if (rate := self._paces[actor_id].ema.tokens_per_s) is not None
        }
        if averages:
            self._coordination.set_throughput(averages, AVERAGE_TTL_S)
            if self._snapshot is not None:
                self._snapshot.keep(averages)

    def _restored(self, actor_id: str, pace: Pace, known: Throughput | None, now_s: float) -> Pace:
        """The pace, started from a stored average where this trainer has measured nothing yet."""
        if pace.ema.tokens_per_s is not None:
            return pace
        stored = None if known is None else known.tokens_per_s
        if stored is None and self._snapshot is not None:
            stored = self._snapshot.recall(actor_id)
        return pace if stored is None else replace(pace, ema=pace.ema.restored(stored, now_s))
