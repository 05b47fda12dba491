"""A fault is not survived because work goes on: first it must have happened, and been noticed.

What is ordered from an actor has happened when the actor has written down that it did it. A damaged
result was noticed when the trainer called it corrupt, a damaged read when the object was read again
and was right. Only then does an admitted result prove that work goes on: one stored after the fault
was over, not one that was on its way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from workers.chaos.deeds import (
    CLOCK_AHEAD,
    CLOCK_STEP,
    CUT_RESULTS,
    FLIP_READS,
    FLIP_RESULTS,
    READ_AGAIN,
    SLOW,
    Deed,
)
from workers.chaos.schedule import ON_ACTORS, Fault
from workers.trainer.jobs import Verdict

if TYPE_CHECKING:
    from deltastore.events import ResultSettled
    from workers.chaos.schedule import Planned

DEED_OF = {
    Fault.SLOW_ACTOR: SLOW,
    Fault.FLIP_RESULT: FLIP_RESULTS,
    Fault.CUT_RESULT: CUT_RESULTS,
    Fault.FLIP_READ: FLIP_READS,
    Fault.STEP_CLOCK: CLOCK_STEP,
    Fault.JUMP_CLOCK: CLOCK_AHEAD,
}
"""The faults that an actor is ordered to do to itself, and what it writes down then."""
ON_RESULTS = frozenset({Fault.FLIP_RESULT, Fault.CUT_RESULT})
ON_CLOCKS = frozenset({Fault.STEP_CLOCK, Fault.JUMP_CLOCK})
NOTICED = ON_RESULTS | {Fault.FLIP_READ}
AGAIN_AFTER_S = 20.0  # a damaged result may be late, its actor killed: what nobody saw is no fault


@dataclass(slots=True)
class Injected:
    """A fault on its way from begun to survived. Times are the director's.

    Args:
        number: of the order; 0 for what the director does itself.
        line: how many of the target's deeds had been read when it began, and then, when it was
            over: a result stored later is work that went on.
        happened_s: when it took effect; None: not yet.
        about: the job or the key that was damaged.
        noticed: whether somebody saw the damage, where there is some to see.
        missed: whether it is known that nobody will.
        over_s: when it was taken back.
        recovery_s: from `over_s` until work went on; None: not yet.
    """

    planned: Planned
    begun_s: float
    number: int = 0
    line: int = 0
    happened_s: float | None = None
    about: str = ""
    noticed: bool = False
    missed: bool = False
    over_s: float | None = None
    recovery_s: float | None = None

    @classmethod
    def begin(cls, planned: Planned, now_s: float, *, number: int, line: int) -> Injected:
        """A fault that was begun: what is not ordered has happened by that."""
        ordered = planned.fault in DEED_OF
        return cls(planned, now_s, number, line, None if ordered else now_s)

    def see_deed(self, deed: Deed, line: int, now_s: float) -> None:
        """Take note of the target's deed number `line`."""
        fault = self.planned.fault
        if self.happened_s is None:
            if deed.what == DEED_OF[fault] and deed.number >= self.number:
                self.happened_s, self.about, self.line = now_s, deed.about, line
        elif fault is Fault.FLIP_READ and deed.what == READ_AGAIN and deed.about == self.about:
            self.noticed = True

    def see_verdict(self, event: ResultSettled, stored_line: int, now_s: float) -> None:
        """Take note of the trainer's answer to a result of the target.

        Args:
            stored_line: the number of the deed of storing it; 0 if there was none.
        """
        if self.planned.fault in ON_RESULTS and self.about and event.job == self.about:
            if event.outcome == Verdict.CORRUPT:
                self.noticed = True
            else:
                self.missed = not self.noticed  # late, or no longer known: nobody looked at it
        elif event.outcome == Verdict.ADMITTED and stored_line > self.line:
            self._recover(now_s)

    def see_step(self, now_s: float) -> None:
        """Take note of a step that the trainer made."""
        if self.planned.fault not in ON_ACTORS:
            self._recover(now_s)

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to take it back."""
        if self.over_s is not None or self.happened_s is None:
            return False
        return now_s >= self.happened_s + self.planned.lasts_s

    def end(self, now_s: float, line: int) -> None:
        """It was taken back, with so many of the target's deeds read."""
        self.over_s = now_s
        if self.planned.lasts_s:
            self.line = line

    def is_lost(self, now_s: float) -> bool:
        """Whether nothing can come of it any more: it is to be ordered again."""
        if self.planned.fault in NOTICED:
            if self.noticed or self.happened_s is None:
                return False
            return self.missed or now_s > self.happened_s + AGAIN_AFTER_S
        unseen = self.planned.fault in ON_CLOCKS and self.happened_s is None
        return unseen and now_s > self.begun_s + AGAIN_AFTER_S  # a new process is born with it

    def order_again(self, now_s: float, number: int) -> None:
        """It was ordered again, under a new number."""
        self.begun_s, self.number = now_s, number
        self.happened_s, self.about, self.over_s = None, "", None
        self.noticed = self.missed = False

    def state(self) -> str:
        """What it waits for, for people."""
        if self.happened_s is None:
            return "did not happen"
        if self.planned.fault in NOTICED and not self.noticed:
            return "was not noticed"
        return "no work after it"

    def _recover(self, now_s: float) -> None:
        unnoticed = self.planned.fault in NOTICED and not self.noticed
        if self.over_s is not None and self.recovery_s is None and not unnoticed:
            self.recovery_s = now_s - self.over_s
