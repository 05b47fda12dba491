"""Faults nobody timed teach nothing: each is begun, taken back, and watched until work goes on.

Recovered means: an actor that failed had a result admitted again; after Redis or a region failed,
the trainer has made another step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from deltastore.events import ResultSettled, StepTrained
from deltastore.observability.jsonl import EventTail
from workers.chaos.schedule import ON_ACTORS
from workers.chaos.world import TRAINER_NAME
from workers.demo.fleet import DemoError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.chaos.schedule import Planned
    from workers.chaos.world import World

LOOK_S = 0.2
RECOVERS_WITHIN_S = 120.0
MEMORY_EVERY_S = 2.0
START_WITHIN_S = 240.0


@dataclass(slots=True)
class Injected:
    """A fault that happened.

    Args:
        over_s: when it was taken back, by the director's clock.
        recovery_s: from then until work went on; None: not yet.
    """

    planned: Planned
    begun_s: float
    over_s: float | None = None
    recovery_s: float | None = None


@dataclass
class Director:
    """Runs a schedule on a world."""

    world: World
    say: Callable[[str], None]
    injected: list[Injected] = field(default_factory=list)
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    steps: int = 0

    def __post_init__(self) -> None:
        self._clock = self.world.clock
        self._tail = EventTail(self.world.folder.events(TRAINER_NAME))
        self._started_s = self._clock.monotonic_s()
        self._memory_at_s = 0.0

    def warm_up(self) -> None:
        """Wait for the first steps: what starts is not yet there to be broken."""
        self._until(lambda: self.steps >= 2, START_WITHIN_S, "no step was made")

    def play(self, schedule: Sequence[Planned]) -> None:
        """Let everything happen at its time, then wait until the last of it is recovered."""
        self._started_s = self._clock.monotonic_s()
        left = list(schedule)
        while left or any(one.over_s is None for one in self.injected):
            now_s = self._clock.monotonic_s() - self._started_s
            if left and now_s >= left[0].at_s:
                self._begin(left.pop(0))
            for one in self.injected:
                if one.over_s is None and now_s >= one.begun_s + one.planned.lasts_s:
                    self.world.end(one.planned)
                    one.over_s = self._clock.monotonic_s() - self._started_s
            self._turn()
        self._until(
            lambda: all(one.recovery_s is not None for one in self.injected),
            RECOVERS_WITHIN_S,
            "not everything recovered",
        )

    def _begin(self, planned: Planned) -> None:
        """Begin a fault, unless its target has not got over the same one yet."""
        for one in self.injected:
            same = (one.planned.target, one.planned.fault) == (planned.target, planned.fault)
            if same and one.over_s is None:
                return
        self.world.begin(planned)
        begun_s = self._clock.monotonic_s() - self._started_s
        self.injected.append(Injected(planned, begun_s))
        self.say(f"{begun_s:6.1f} s  {planned.fault.value} {planned.target}")

    def _until(self, true: Callable[[], bool], within_s: float, otherwise: str) -> None:
        deadline_s = self._clock.monotonic_s() + within_s
        while not true():
            if self._clock.monotonic_s() > deadline_s:
                late = [
                    f"{one.planned.fault.value} {one.planned.target}"
                    for one in self.injected
                    if one.recovery_s is None
                ]
                raise DemoError(f"{otherwise} within {within_s:.0f} s: {', '.join(late)}")
            self._turn()

    def _turn(self) -> None:
        self.world.supervise()
        for stamped in self._tail.read_new():
            event = stamped.event
            if isinstance(event, StepTrained):
                self.steps += 1
                self._recovered(lambda one: one.fault not in ON_ACTORS)
            elif isinstance(event, ResultSettled) and event.outcome == "admitted":
                self._recovered(partial(_is_of, event.actor))
        now_s = self._clock.monotonic_s()
        if now_s - self._memory_at_s >= MEMORY_EVERY_S:
            self._memory_at_s = now_s
            for name, size_bytes in self.world.memory_bytes().items():
                self.memory[name].append((now_s, size_bytes))
        self._clock.sleep_s(LOOK_S)

    def _recovered(self, hit: Callable[[Planned], bool]) -> None:
        now_s = self._clock.monotonic_s() - self._started_s
        for one in self.injected:
            open_still = one.over_s is not None and one.recovery_s is None
            if open_still and hit(one.planned):
                assert one.over_s is not None
                one.recovery_s = now_s - one.over_s


def _is_of(actor_id: str, planned: Planned) -> bool:
    return planned.fault in ON_ACTORS and planned.target == actor_id
