"""Clients that retry at once, together and without end turn a slow store into a dead one (S11).

How often and how long is data; the waiting goes through a Clock and the jitter is passed in, so a
test reads the schedule off instead of sitting through it. Only failures that may pass are retried.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from deltastore.errors import DeltastoreError, InvalidInputError, Kind, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.clock import Clock

T = TypeVar("T")
OnRetry: TypeAlias = Callable[[DeltastoreError], None]
"""Is told of the error each time something is tried again."""
Jitter: TypeAlias = Callable[[], float]
"""Random numbers in [0, 1)."""

RETRYABLE = frozenset({Kind.UNAVAILABLE, Kind.THROTTLED, Kind.TIMEOUT})


@dataclass(frozen=True, slots=True)
class RetrySchedule:
    """Exponential backoff with full jitter: a wait is anything up to min(cap, base * 2^n)."""

    attempts: int = 8
    """Tries in all: with the other defaults about 6 s of waiting on average, 11 s at most."""
    base_s: float = 0.1
    cap_s: float = 5.0
    throttled_attempts: int = 32
    """Tries in all while the store answers "slow down": it lives, and half a minute is usual.

    With the other defaults 65 s of waiting on average; one client in a million has less than 30 s.
    """

    def __post_init__(self) -> None:
        waits = 0 <= self.base_s <= self.cap_s < float("inf")
        if not waits or min(self.attempts, self.throttled_attempts) < 1:
            raise InvalidInputError(
                f"retry schedule {self} is not possible",
                kind=Kind.SETTING,
                hint="attempts and throttled_attempts >= 1, and 0 <= base_s <= cap_s",
            )

    def allowed(self, err: DeltastoreError) -> int:
        """How many tries there are in all while they fail like this."""
        if err.kind is Kind.THROTTLED:
            return max(self.attempts, self.throttled_attempts)
        return self.attempts

    def delay_s(self, failures: int, jitter: Jitter) -> float:
        """The wait after that many failures in a row (1 for the first)."""
        # The exponent is bounded so that a huge `attempts` cannot overflow a float.
        return float(jitter() * min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, 60)))


def is_retryable(err: DeltastoreError) -> bool:
    """Whether the same request may succeed later without anybody doing anything."""
    return isinstance(err, StorageError) and err.kind in RETRYABLE


_patience_s: ContextVar[float] = ContextVar("patience_s", default=math.inf)


@contextmanager
def impatient(within_s: float) -> Iterator[None]:
    """Let no request that this thread makes in the block be tried again after `within_s` of it.

    For what is worth a try and no delay: a hint that waits as long as a version would keeps the
    next version waiting.
    """
    token = _patience_s.set(within_s)
    try:
        yield
    finally:
        _patience_s.reset(token)


@dataclass(frozen=True, slots=True)
class Retrier:
    """A schedule with the clock and the jitter that it runs on; `impatient` shortens it.

    `on_retry` is told of the error each time something is tried again.
    """

    schedule: RetrySchedule
    clock: Clock
    jitter: Jitter
    on_retry: OnRetry | None = None

    def run(self, attempt: Callable[[], T], progress: Callable[[], int] | None = None) -> T:
        """Call `attempt` until it returns, raises something final, or the schedule ends.

        Args:
            attempt: one try; raises DeltastoreError.
            progress: how far the attempts have come. Tries that got further do not count as
                failures in a row, so a long transfer over a bad line ends, in bounded steps.
        """
        failures = 0
        reached = progress() if progress else 0
        ends_s = self.clock.monotonic_s() + _patience_s.get()
        while True:
            try:
                return attempt()
            except DeltastoreError as err:
                if progress and progress() > reached:
                    reached, failures = progress(), 0
                failures += 1
                if not is_retryable(err) or failures >= self.schedule.allowed(err):
                    raise
                delay_s = self.schedule.delay_s(failures, self.jitter)
                if self.clock.monotonic_s() + delay_s > ends_s:
                    raise
                if self.on_retry is not None:
                    self.on_retry(err)
            self.clock.sleep_s(delay_s)
