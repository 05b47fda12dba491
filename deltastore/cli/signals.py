"""A handler that sets an Event can hang for ever: the thread it interrupts may hold its lock.

Python runs signal handlers in the main thread, between any two of its instructions, those inside
`Event.wait` among them. So a handler only rings: it puts into a SimpleQueue, which it may do even
while it interrupts another put. A thread of the bell's own does what is to be done.
"""

from __future__ import annotations

import signal
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class SignalBell:
    """Calls `act` in a thread of its own, once for every `ring`."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self._rings: SimpleQueue[bool] = SimpleQueue()
        self._thread = Thread(target=self._answer, name="signals", daemon=True)
        self._thread.start()

    def ring(self) -> None:
        """Have it done soon. Takes no lock: this is all that a signal handler may call."""
        self._rings.put(True)

    def close(self) -> None:
        """Do what was rung for, then end the thread."""
        self._rings.put(False)
        self._thread.join()

    def _answer(self) -> None:
        while self._rings.get():
            self._act()


def ring_on_sigterm(act: Callable[[], object]) -> None:
    """From now on SIGTERM has `act` called, in another thread than the main one."""
    bell = SignalBell(act)
    signal.signal(signal.SIGTERM, lambda *_signal: bell.ring())
