"""Fifty clients that a store sends away must not all come back at once, nor give up too early."""

from __future__ import annotations

import random
import threading
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from deltastore.errors import DeltastoreError, Kind
from deltastore.storage.retry import Retrier, RetrySchedule
from deltastore.storage.s3_reader import S3Reader
from deltastore.storage.s3_uploads import LiveUploads
from deltastore.storage.s3_writer import S3Writer
from deltastore.storage.store import PutMode, PutOutcome
from deltastore.testing.clock import FakeClock
from deltastore.testing.s3_proxy import Choose, Reply, S3Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deltastore.storage.s3 import S3Store

CLIENTS = 50
OUTAGE_S = 30.0
START_S = 1000.0


@dataclass
class Storm:
    """A store that answers 503 until `ends_s`, and clients that each have their own clock."""

    store: S3Store
    ends_s: float = START_S + OUTAGE_S
    schedule: RetrySchedule = field(default_factory=RetrySchedule)
    seed: int = 1

    def __post_init__(self) -> None:
        self.clocks = [FakeClock(START_S) for _ in range(CLIENTS)]
        self.instants_s: list[float] = []
        self.done_s: list[float] = []
        self.outcomes: list[PutOutcome | DeltastoreError | None] = [None] * CLIENTS
        self._lock = threading.Lock()

    def answer(self, target: str) -> Reply | None:
        """503 while the storm lasts, by the clock of the client that asks."""
        now_s = self.clocks[int(target.rpartition("-")[2])].monotonic_s()
        with self._lock:
            self.instants_s.append(now_s - START_S)
            if now_s < self.ends_s:
                return Reply(503, "SlowDown", "Please reduce your request rate.")
            self.done_s.append(now_s - START_S)
        return None

    def client(self, number: int) -> None:
        """One client's put of its own object."""
        jitter = random.Random(self.seed * 1000 + number).random
        calls = replace(
            self.store._calls, retrier=Retrier(self.schedule, self.clocks[number], jitter)
        )
        writer = S3Writer(calls, S3Reader(calls), LiveUploads())
        try:
            self.outcomes[number] = writer.put(f"c-{number}", b"x", PutMode.CREATE)
        except DeltastoreError as err:
            self.outcomes[number] = err

    def run(self) -> None:
        """All clients at once."""
        threads = [threading.Thread(target=self.client, args=(n,)) for n in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _most_within(instants_s: Sequence[float], window_s: float) -> int:
    """The most of these instants that any window of that length has."""
    ordered = sorted(instants_s)
    return max(
        bisect_right(ordered, start_s + window_s) - bisect_left(ordered, start_s)
        for start_s in ordered
    )


@pytest.fixture
def line(open_s3: Callable[..., S3Store], proxy: S3Proxy) -> Callable[..., Storm]:
    """Makes storms over the line to the real server."""

    def make(**options: object) -> Storm:
        storm = Storm(open_s3(), **options)  # type: ignore[arg-type]
        proxy.add("PUT", "/c-", Choose(storm.answer), times=10**6)
        return storm

    return make


def test_half_a_minute_of_slow_down_is_sat_out_without_a_herd(
    line: Callable[..., Storm],
) -> None:
    """CASE S11: fifty clients, 30 s of 503: every put succeeds, and they come back apart."""
    storm = line()
    storm.run()
    assert storm.outcomes == [PutOutcome.WRITTEN] * CLIENTS
    assert len(list(storm.store.list("c-"))) == CLIENTS
    # On average a client waits half the cap between two tries: 2.5 s.
    late = [s for s in storm.instants_s if 10.0 <= s < OUTAGE_S]
    assert len(late) <= CLIENTS * 20 / 2.5 * 1.5

    assert sum(s == 0.0 for s in storm.instants_s) == CLIENTS, "all began in one instant"
    assert _most_within([s for s in storm.instants_s if s >= 5.0], 0.1) <= CLIENTS / 4
    # When the store is well again they arrive over seconds, not in the first tenth of one.
    assert max(storm.done_s) - min(storm.done_s) >= 2.0
    assert _most_within(storm.done_s, 0.1) <= CLIENTS / 4


def test_without_jitter_they_would_be_a_herd(
    line: Callable[..., Storm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASE S11: the same clients with one and the same wait do what the other test forbids."""
    storm = line(ends_s=START_S + 8.0)
    monkeypatch.setattr(random.Random, "random", lambda _: 0.99)
    storm.run()
    assert _most_within([s for s in storm.instants_s if s >= 5.0], 0.1) == CLIENTS
    assert _most_within(storm.done_s, 0.1) == CLIENTS


def test_a_storm_that_does_not_end_is_left_in_time(line: Callable[..., Storm]) -> None:
    """CASE S11: after its last try every client hears `throttled`; none waits for ever."""
    schedule = RetrySchedule(attempts=2, throttled_attempts=5)
    storm = line(ends_s=float("inf"), schedule=schedule)
    storm.run()
    assert all(getattr(outcome, "kind", None) is Kind.THROTTLED for outcome in storm.outcomes)
    assert len(storm.instants_s) == CLIENTS * schedule.throttled_attempts
    assert max(storm.instants_s) <= 0.1 + 0.2 + 0.4 + 0.8
