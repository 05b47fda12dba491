"""What processes did is read from the files they write, so a killed one's last words count too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deltastore.errors import CoordinationError
from deltastore.events import ActorJoined
from deltastore.observability.jsonl import EventTail
from deltastore.observability.view import ActorLive, RunView

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.clock import Clock
    from deltastore.coordination.backend import Coordination, Member
    from deltastore.observability.jsonl import StampedEvent

_MEMBERS_EVERY_S = 1.0


class Watch:
    """Folds every process's events into one view and asks membership who is there."""

    def __init__(self, events_dir: Path, coordination: Coordination, clock: Clock) -> None:
        self.view = RunView()
        self._events_dir = events_dir
        self._coordination = coordination
        self._clock = clock
        self._tails: dict[Path, EventTail] = {}
        self._members_at_s = float("-inf")
        self._actors: dict[str, ActorLive] = {}

    @property
    def actors(self) -> list[ActorLive]:
        """Everybody that took part and was not ended by the demo, by name."""
        rows = self.view.actors
        ended = {name for name, row in rows.items() if row.ended_at_ms is not None}
        return [actor for name, actor in sorted(self._actors.items()) if name not in ended]

    @property
    def steps_trained(self) -> int:
        """How many optimizer steps have been reported."""
        return len(self.view.steps)

    def poll(self) -> None:
        """Read what is new."""
        stamped: list[StampedEvent] = []
        for path in self._events_dir.glob("*.jsonl"):
            stamped += self._tails.setdefault(path, EventTail(path)).read_new()
        self.view.fold(stamped)
        for one in stamped:
            if isinstance(one.event, ActorJoined):
                join = one.event
                self.view.mark(
                    one.at_ms,
                    f"{join.actor} joined at version {join.version} from {join.via}: "
                    f"{join.size_bytes:,} bytes in {join.seconds:.1f} s",
                )
        now_s = self._clock.monotonic_s()
        if now_s - self._members_at_s >= _MEMBERS_EVERY_S:
            self._members_at_s = now_s
            self._ask_members()

    def note(self, text: str) -> None:
        """Put something the demo did itself on the time line."""
        self.view.mark(self._now_ms(), text)

    def end_actor(self, actor: str) -> None:
        """Say that an actor is gone for good."""
        self.view.end_actor(actor, self._now_ms())

    def _now_ms(self) -> int:
        return round(self._clock.utc_s() * 1000)

    def _ask_members(self) -> None:
        try:
            members = self._coordination.members()
        except CoordinationError as err:
            # The display goes on without it; the workers say by themselves what it means to them.
            self.view.mark(self._now_ms(), f"membership is not known: {err.message}")
            return
        there = {member.actor_id: _live(member) for member in members}
        for name, actor in self._actors.items():
            # It said goodbye: show where it was when it left.
            there.setdefault(name, replace(actor, state="left"))
        self._actors = there


def _live(member: Member) -> ActorLive:
    return ActorLive(
        member.actor_id,
        member.record.region,
        member.state.value,
        member.status.active_version,
        member.status.staleness,
        member.status.tokens_per_s,
    )
