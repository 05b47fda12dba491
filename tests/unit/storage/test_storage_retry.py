"""Retries: how often, how long, and never on what cannot pass."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import DeltastoreError, InvalidInputError, Kind, NotFoundError, StorageError
from deltastore.storage.retry import Retrier, RetrySchedule, impatient, is_retryable
from deltastore.testing.clock import FakeClock


def _unavailable() -> StorageError:
    return StorageError("down", kind=Kind.UNAVAILABLE)


@given(
    attempts=st.integers(1, 40),
    base_s=st.floats(0, 10),
    more_s=st.floats(0, 100),
    draw=st.floats(0, 1, exclude_max=True),
)
def test_waits_stay_below_the_cap(attempts: int, base_s: float, more_s: float, draw: float) -> None:
    """What never succeeds makes `attempts` tries with waits between them, each bounded."""
    schedule = RetrySchedule(attempts, base_s, base_s + more_s)
    clock, tries = FakeClock(), []

    def attempt() -> None:
        tries.append(1)
        raise _unavailable()

    with pytest.raises(StorageError):
        Retrier(schedule, clock, lambda: draw).run(attempt)
    assert len(tries) == attempts
    assert len(clock.slept_s) == attempts - 1
    for number, slept_s in enumerate(clock.slept_s):
        assert 0 <= slept_s <= min(schedule.cap_s, schedule.base_s * 2**number)


def test_a_success_after_failures_is_returned() -> None:
    """The first success ends the schedule."""
    left = [1, 2, 3]

    def attempt() -> str:
        if left.pop():
            if not left:
                return "done"
            raise _unavailable()
        return "never"

    assert Retrier(RetrySchedule(), FakeClock(), lambda: 0.5).run(attempt) == "done"


@pytest.mark.parametrize(
    "error",
    [
        NotFoundError("absent", kind=Kind.OBJECT_MISSING),
        StorageError("wrong key", kind=Kind.CREDENTIALS),
        StorageError("full", kind=Kind.DISK_FULL),
        StorageError("refused", kind=Kind.REFUSED),
        InvalidInputError("bad", kind=Kind.NAME),
    ],
)
def test_what_cannot_pass_is_not_tried_again(error: DeltastoreError) -> None:
    """Absence, wrong credentials, a full disk and bad input are raised at the first try."""
    clock, tries = FakeClock(), []

    def attempt() -> None:
        tries.append(1)
        raise error

    with pytest.raises(type(error)):
        Retrier(RetrySchedule(), clock, lambda: 0.5).run(attempt)
    assert len(tries) == 1
    assert clock.slept_s == []
    assert not is_retryable(error)


def test_progress_starts_the_count_again() -> None:
    """Tries that got further do not add up to a failure; standing still does."""
    reached, tries = 0, 0

    def attempt() -> None:
        nonlocal reached, tries
        tries += 1
        reached = min(reached + 1, 10)
        raise _unavailable()

    with pytest.raises(StorageError):
        Retrier(RetrySchedule(attempts=3, base_s=0), FakeClock(), lambda: 0.0).run(
            attempt, lambda: reached
        )
    assert tries == 10 + 2


def test_an_impatient_block_tries_for_so_long_and_no_other_thread() -> None:
    """In the block tries end before the time is up, each request by itself; elsewhere, and
    afterwards, the schedule holds."""

    def throttled() -> None:
        raise StorageError("slow down", kind=Kind.THROTTLED)

    def waited_s() -> float:
        clock = FakeClock()
        with pytest.raises(StorageError):
            Retrier(RetrySchedule(), clock, lambda: 0.5).run(throttled)
        return sum(clock.slept_s)

    with impatient(2.0), ThreadPoolExecutor(1) as pool:
        assert 1.0 < waited_s() <= 2.0
        assert 1.0 < waited_s() <= 2.0
        assert pool.submit(waited_s).result() > 50
        with impatient(0.0):
            assert waited_s() == 0
    assert waited_s() > 50


@pytest.mark.parametrize(
    ("attempts", "base_s", "cap_s"),
    [(0, 1, 1), (-1, 1, 1), (1, -1, 1), (1, 2, 1), (1, 1, float("inf")), (1, float("nan"), 1)],
)
def test_an_impossible_schedule_is_refused(attempts: int, base_s: float, cap_s: float) -> None:
    """No tries, negative, endless or NaN waits are refused at configuration."""
    with pytest.raises(InvalidInputError) as caught:
        RetrySchedule(attempts, base_s, cap_s)
    assert caught.value.kind is Kind.SETTING
