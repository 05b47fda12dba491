"""A split from yesterday's speeds starves whoever recovered: every batch is split from fresh ones.

What the trainer knows of its actors between two batches: their speed by ended leases, who is near
enough to work, and who came back after a loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.coordination.backend import ActorState
from deltastore.scheduling.gate import eligible
from deltastore.scheduling.pace import Pace, shares
from deltastore.scheduling.split import Deal, deal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deltastore.coordination.backend import Coordination, Member

_WORKING = (ActorState.ACTIVE, ActorState.JOINING)
AVERAGE_TTL_S = 3600.0  # an older average says nothing of today's machine


class Fleet:
    """The speeds of the actors of one run. Used from the trainer's loop only."""

    def __init__(self, coordination: Coordination) -> None:
        self._coordination = coordination
        self._paces: dict[str, Pace] = {}
        self._lost: set[str] = set()

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
        return deal(
            groups,
            shares(paces, now_s),
            dealt_fraction=dealt_fraction,
            tokens_per_group=tokens_per_group,
        )

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
        paces: dict[str, Pace] = {}
        for member in members:
            actor_id = member.actor_id
            known = throughput.get(actor_id)
            pace = self._paces.get(actor_id, Pace())
            if known is not None:
                if pace.ema.tokens_per_s is None and known.tokens_per_s is not None:
                    restored = pace.ema.restored(known.tokens_per_s, now_s)
                    pace = Pace(restored, pace.points, pace.factor, pace.cursor_s)
                pace = pace.fold(known.samples)
            if member.state is ActorState.LOST:
                self._lost.add(actor_id)
            elif actor_id in self._lost:
                self._lost.discard(actor_id)
                pace = pace.rejoined()
            paces[actor_id] = pace
        self._paces = paces
        self._lost &= set(paces)
        averages = {
            actor_id: pace.ema.tokens_per_s
            for actor_id, pace in paces.items()
            if pace.ema.tokens_per_s is not None
        }
        if averages:
            self._coordination.set_throughput(averages, AVERAGE_TTL_S)
