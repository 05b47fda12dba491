"""Without an injected clock, tests sleep and a stepped wall clock ends leases: time is an argument.

This is the only module that calls `time`. Lease expiry is decided by Redis TIME, object ages by
the store's own dates; `utc_s` is for stamps that people read, `monotonic_s` for every deadline.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import threading


class Clock(Protocol):
    """A source of time and the only way to wait."""

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back; only differences mean anything."""
        ...

    def utc_s(self) -> float:
        """Seconds since the Unix epoch, for stamps that people read."""
        ...

    def sleep_s(self, seconds: float) -> None:
        """Wait for `seconds`."""
        ...

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until `event` is set or `timeout_s` has passed; return whether it is set."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back; only differences mean anything."""
        return time.monotonic()

    def utc_s(self) -> float:
        """Seconds since the Unix epoch, for stamps that people read."""
        return time.time()

    def sleep_s(self, seconds: float) -> None:
        """Wait for `seconds`."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until `event` is set or `timeout_s` has passed; return whether it is set."""
        return event.wait(timeout_s)
