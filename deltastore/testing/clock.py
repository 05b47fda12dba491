"""A test that sleeps is slow and flaky; one that advances a FakeClock is neither."""

from __future__ import annotations

import threading


class FakeClock:
    """A clock that moves only when told to, or when somebody waits on it.

    `sleep_s` and a `wait` on an unset event advance the clock at once instead of blocking, so
    retry schedules and polls run at full speed and their waits can be read off `slept_s`.
    """

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now_s = start_s
        self._lock = threading.Lock()
        self.slept_s: list[float] = []

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start."""
        with self._lock:
            return self._now_s

    def utc_s(self) -> float:
        """The same seconds, taken as Unix time."""
        return self.monotonic_s()

    def advance_s(self, seconds: float) -> None:
        """Move the clock forward."""
        with self._lock:
            self._now_s += seconds

    def sleep_s(self, seconds: float) -> None:
        """Advance by `seconds` and note it."""
        with self._lock:
            self._now_s += max(0.0, seconds)
            self.slept_s.append(seconds)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Return at once if `event` is set, else advance by `timeout_s`."""
        if not event.is_set():
            self.sleep_s(timeout_s)
        return event.is_set()
