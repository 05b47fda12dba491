"""A forward pass that meets half-written weights answers for no version: the two never overlap.

Any thread may run forward passes, one at a time writes weights. A write that is wanted keeps new
forward passes out, lets those in flight finish for `finish_within_s`, then asks them to stop (they
see it between two decoding steps), and gives up after `stop_within_s` more: then nothing was
written, and whoever waited goes on. A pause keeps forward passes out as well; ending it while a
write is wanted or runs lets nobody in before the write is over.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from deltastore.errors import ApplyError, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deltastore.clock import Clock

FINISH_WITHIN_S = 30.0
STOP_WITHIN_S = 10.0
_LOOK_S = 0.05  # a condition knows real time only; deadlines are the clock's


class SafePoint:
    """Lets forward passes and weight writes exclude each other.

    Args:
        finish_within_s: how long passes in flight may go on once a write is wanted.
        stop_within_s: how long they may take to stop when asked to.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        finish_within_s: float = FINISH_WITHIN_S,
        stop_within_s: float = STOP_WITHIN_S,
    ) -> None:
        self._clock = clock
        self._finish_within_s = finish_within_s
        self._stop_within_s = stop_within_s
        self._changed = threading.Condition()
        self._forwards = 0
        self._wanted = 0
        self._writing = False
        self._pauses = 0
        self._stop = False

    @property
    def stop_wanted(self) -> bool:
        """Whether passes in flight should stop now: a write has waited long enough."""
        return self._stop

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Inside, no weight changes. Waits while a write is wanted or runs, or while paused."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._writing or self._wanted or self._pauses))
            self._forwards += 1
        try:
            yield
        finally:
            with self._changed:
                self._forwards -= 1
                self._changed.notify_all()

    @contextmanager
    def write(self) -> Iterator[None]:
        """Inside, no forward pass runs; ApplyError(rolled_back) if they do not end in time."""
        with self._changed:
            self._wanted += 1
            try:
                self._await_turn()
                self._writing = True
            finally:
                self._wanted -= 1
                self._stop = self._stop and self._wanted > 0
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def pause(self) -> None:
        """Keep new forward passes out until `resume`, called as often."""
        with self._changed:
            self._pauses += 1

    def resume(self) -> None:
        """End one pause. Lets forward passes in only once no write is wanted."""
        with self._changed:
            if not self._pauses:
                raise ApplyError(
                    "resume without a pause", kind=Kind.NOT_STAGED, hint="call pause first"
                )
            self._pauses -= 1
            self._changed.notify_all()

    def _await_turn(self) -> None:
        def free() -> bool:
            return not (self._writing or self._forwards)

        if self._wait_for(free, self._finish_within_s):
            return
        self._stop = True
        if self._wait_for(free, self._stop_within_s):
            return
        raise ApplyError(
            f"{self._forwards} forward passes did not stop within"
            f" {self._finish_within_s + self._stop_within_s:.0f} s: nothing was written",
            kind=Kind.ROLLED_BACK,
            hint="the engine must look at its progress between two steps",
        )

    def _wait_for(self, true: Callable[[], bool], within_s: float) -> bool:
        deadline_s = self._clock.monotonic_s() + within_s
        while not true():
            left_s = deadline_s - self._clock.monotonic_s()
            if left_s <= 0:
                return False
            self._changed.wait(min(left_s, _LOOK_S))
        return True
