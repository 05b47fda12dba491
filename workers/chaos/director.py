"""Faults nobody timed teach nothing: each is begun, taken back, and watched until work goes on.

Recovered means: an actor that failed had a result admitted again; after Redis or a region failed,
the trainer has made another step. What was ordered and never done, or done and never noticed, is
not recovered from.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deltastore.events import ResultSettled, StepTrained
from deltastore.observability.jsonl import EventTail
from workers.chaos.deeds import STORED, DeedLog
from workers.chaos.injected import Injected
from workers.chaos.world import TRAINER_NAME
from workers.demo.fleet import DemoError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.chaos.deeds import Deed
    from workers.chaos.schedule import Planned
    from workers.chaos.world import World

LOOK_S = 0.2
RECOVERS_WITHIN_S = 180.0  # who fell behind is dealt nothing for 40 steps, then tried again
MEMORY_EVERY_S = 1.0
START_WITHIN_S = 240.0


@dataclass
class Director:
    """Runs a schedule on a world."""

    world: World
    say: Callable[[str], None]
    injected: list[Injected] = field(default_factory=list)
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    steps: int = 0
    results: list[ResultSettled] = field(default_factory=list)
    """The trainer's answers, as they came."""
    deeds: dict[str, list[Deed]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self._clock = self.world.clock
        self._tail = EventTail(self.world.folder.events(TRAINER_NAME))
        self._logs = {actor: DeedLog(self.world.deeds(actor)) for actor in self.world.actors}
        self._lines: Counter[str] = Counter()
        self._stored: dict[tuple[str, str], int] = {}
        self._at_work: set[str] = set()
        self._waiting: list[Planned] = []
        self._started_s = self._clock.monotonic_s()
        self._memory_at_s = self._started_s

    def warm_up(self) -> None:
        """Wait for the first steps: what starts is not yet there to be broken."""
        self._until(lambda: self.steps >= 2, START_WITHIN_S, "no step was made")

    def play(self, schedule: Sequence[Planned], duration_s: float) -> None:
        """Let everything happen at its time, then wait until the last of it is recovered."""
        self._started_s = self._clock.monotonic_s()
        left = list(schedule)
        while left or self._now_s() < duration_s:
            while left and self._now_s() >= left[0].at_s:
                self._waiting.append(left.pop(0))
            self._turn()
        self._until(
            lambda: not self._waiting and all(one.recovery_s is not None for one in self.injected),
            RECOVERS_WITHIN_S,
            "not everything recovered",
        )

    def _now_s(self) -> float:
        return self._clock.monotonic_s() - self._started_s

    def _begin(self, planned: Planned) -> bool:
        """Begin a fault, once its target has got over the same one."""
        for one in self.injected:
            same = (one.planned.target, one.planned.fault) == (planned.target, planned.fault)
            if same and one.recovery_s is None:
                return False
        number = self.world.begin(planned)
        if number is None:
            return False
        line = self._lines[planned.target]
        self.injected.append(Injected.begin(planned, self._now_s(), number=number, line=line))
        self.say(f"{self._now_s():6.1f} s  {planned.fault.value} {planned.target}")
        return True

    def _until(self, true: Callable[[], bool], within_s: float, otherwise: str) -> None:
        deadline_s = self._clock.monotonic_s() + within_s
        while not true():
            if self._clock.monotonic_s() > deadline_s:
                late = [
                    f"{one.planned.fault.value} {one.planned.target} ({one.state()})"
                    for one in self.injected
                    if one.recovery_s is None
                ]
                late += [f"{one.fault.value} {one.target} (waits)" for one in self._waiting]
                raise DemoError(f"{otherwise} within {within_s:.0f} s: {', '.join(late)}")
            self._turn()

    def _turn(self) -> None:
        self.world.supervise()
        self._look()
        for one in self.injected:
            if one.is_due(self._now_s()):
                self.world.end(one.planned)
                one.end(self._now_s(), self._lines[one.planned.target])
            elif one.is_lost(self._now_s()):
                number = self.world.begin(one.planned)
                assert number is not None  # only what is ordered can be lost
                one.order_again(self._now_s(), number)
        self._waiting = [planned for planned in self._waiting if not self._begin(planned)]
        self._measure()
        self._clock.sleep_s(LOOK_S)

    def _look(self) -> None:
        """Read what happened: deeds after events, whose causes are then all there."""
        events = [stamped.event for stamped in self._tail.read_new()]
        now_s = self._now_s()
        for actor, log in self._logs.items():
            for deed in log.read_new():
                self._lines[actor] += 1
                self.deeds[actor].append(deed)
                self._at_work.add(self.world.life(actor))
                if deed.what == STORED:
                    self._stored[actor, deed.about] = self._lines[actor]
                for one in self._of(actor):
                    one.see_deed(deed, self._lines[actor], now_s)
        for event in events:
            if isinstance(event, StepTrained):
                self.steps += 1
                self._at_work.add(self.world.life(TRAINER_NAME))
                for one in self.injected:
                    one.see_step(now_s)
            elif isinstance(event, ResultSettled):
                self.results.append(event)
                stored_line = self._stored.get((event.actor, event.job), 0)
                for one in self._of(event.actor):
                    one.see_verdict(event, stored_line, now_s)

    def _of(self, actor_id: str) -> list[Injected]:
        return [one for one in self.injected if one.planned.target == actor_id]

    def _measure(self) -> None:
        """Note the memory of those at work: a process that starts is importing what it needs."""
        now_s = self._clock.monotonic_s()
        if now_s - self._memory_at_s >= MEMORY_EVERY_S:
            self._memory_at_s = now_s
            for life, size_bytes in self.world.memory_bytes(self._at_work).items():
                self.memory[life].append((now_s, size_bytes))
