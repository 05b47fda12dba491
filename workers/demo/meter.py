"""Resident sizes added up count shared pages many times: here proportional sets are."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

import psutil

if TYPE_CHECKING:
    from deltastore.clock import Clock

_EVERY_S = 1.0


class MemoryMeter:
    """Samples the memory of this process and all its descendants in a thread of its own."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-meter", daemon=True)
        self.now_bytes = 0
        self.peak_bytes = 0

    def _sample(self) -> None:
        while True:
            self.now_bytes = total_bytes()
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)
            if self._clock.wait(self._done, _EVERY_S):
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()


def total_bytes() -> int:
    """Proportional set size of this process and all its descendants, in bytes."""
    this = psutil.Process()
    total = 0
    for process in (this, *this.children(recursive=True)):
        try:
            total += int(process.memory_full_info().pss)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it ended between being listed and being asked
    return total
