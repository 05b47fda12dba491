"""A lease that was renewed runs to its new end: an actor that forgets that throws work away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deltastore.coordination.backend import Settled
from tests.unit.workers.test_actor_parts import ACTIVE, SETTINGS, Bench, Flaky, StubEngine
from workers.actor.engine import GenerationStopped
from workers.actor.rollout import HAND_BACK_S, RETRY_S, RolloutWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.actor.engine import Completions, Progress, Prompt
    from workers.actor.rollout import HeldLease

STEP_S = 25.0  # two of them outlive a lease of 30 s that is not renewed


class Steps(StubEngine):
    """Makes two-token samples in a number of decoding steps."""

    def __init__(self, steps: int, during: Callable[[int], None]) -> None:
        super().__init__()
        self._steps = steps
        self._at = during

    def generate(self, prompts: Sequence[Prompt], progress: Progress) -> list[Completions]:
        """As long as progress says go on."""
        for step in range(1, self._steps + 1):
            self._at(step)
            if not progress(step):
                raise GenerationStopped
        return super().generate(prompts, lambda tokens: True)


def bench_of(steps: int, step_s: float, *, call: str = "", times: int = 0) -> Bench:
    """One job whose generation takes that many steps; a call is away `times` times."""
    bench = Bench(wrap=lambda memory: Flaky(memory, call, times))
    bench.engine = Steps(steps, lambda step: bench.clock.advance_s(step_s))
    bench.offer("j1")
    return bench


def learned(worker: RolloutWorker) -> list[int]:
    """The tokens of every batch that the worker learns its speed from, as they come."""
    tokens: list[int] = []
    note = worker._length.note

    def noted(held: object, count: int, *rest: float) -> None:
        tokens.append(count)
        note(held, count, *rest)  # type: ignore[arg-type]

    worker._length.note = noted  # type: ignore[method-assign,assignment]
    return tokens


def test_an_outage_while_settling_a_renewed_lease_is_waited_for() -> None:
    """Work done at 50 s under a lease renewed to 80 s is settled after two errors of Redis."""
    bench = bench_of(2, STEP_S, call="settle", times=2)
    worker = bench.worker()
    assert worker.work(worker.take(ACTIVE)) == [Settled.ADMITTED]


def test_an_outage_while_settling_ends_with_the_renewed_lease() -> None:
    """Settling is tried until the lease that was renewed at 50 s for 30 s is over, no longer."""
    bench = bench_of(2, STEP_S, call="settle", times=10_000)
    worker = bench.worker()
    assert worker.work(worker.take(ACTIVE)) == []
    assert sum(bench.clock.slept_s) == pytest.approx(30.0, abs=RETRY_S)


def test_an_outage_while_handing_back_a_renewed_lease_is_waited_for() -> None:
    """Told to stop at 50 s, under a lease renewed at 25 s, an actor hands back at its third try."""
    bench = bench_of(2, STEP_S, call="hand_back", times=2)

    def step(number: int) -> None:
        bench.clock.advance_s(STEP_S)
        bench.go_on = number < 2

    bench.engine = Steps(2, step)
    worker = bench.worker()
    assert worker.work(worker.take(ACTIVE)) == []
    assert bench.memory.job_counts().open == 1


def test_handing_back_two_leases_keeps_a_leaving_actor_no_longer_than_one() -> None:
    """With Redis away for good, an actor that must leave tries for a stated time in all."""
    bench = bench_of(1, 1.0, call="hand_back", times=10_000)
    bench.offer("j2")
    worker = bench.worker()
    held = worker.take(ACTIVE)
    assert len(held) == 2
    bench.go_on = False
    assert worker.work(held) == []
    assert 0 < sum(bench.clock.slept_s) <= HAND_BACK_S


def test_draining_under_a_renewed_lease_says_nothing_of_speed() -> None:
    """Stopped at 50 s under a lease renewed to 55 s: it was told to stop, it was not too slow."""
    bench = bench_of(2, STEP_S)

    def step(number: int) -> None:
        bench.clock.advance_s(STEP_S)
        bench.go_on = number < 2

    bench.engine = Steps(2, step)
    worker = bench.worker()
    tokens = learned(worker)
    assert worker.work(worker.take(ACTIVE)) == []
    assert tokens == []


def test_a_batch_that_outlives_its_leases_says_that_it_was_too_slow() -> None:
    """One step longer than the lease: no tokens in that time is what the next lease learns."""
    bench = bench_of(1, SETTINGS.lease_s + 1)
    worker = bench.worker()
    tokens = learned(worker)
    assert worker.work(worker.take(ACTIVE)) == []
    assert tokens == [0]


@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_the_local_deadline_is_never_later_than_redis(attempt: int) -> None:
    """However often it is renewed, at every attempt: to the limit, and not beyond."""
    bench = bench_of(1, 0.0)
    for _ in range(attempt - 1):
        assert bench.memory.grant("a", 1, ACTIVE.policy_hash, 1.0, f"{_:032x}") is not None
        bench.clock.advance_s(10.0)
        bench.memory.reap()
    most_s = SETTINGS.max_lease_s * 2 ** (attempt - 1)
    held: list[HeldLease] = []

    def step(number: int) -> None:
        bench.clock.advance_s(7.0)  # so that a renewal would go beyond the limit
        for lease in bench.memory.running_leases():
            assert held[0].deadline_s <= lease.expires_at_s

    bench.engine = Steps(1_000, step)
    worker = bench.worker()
    held += worker.take(ACTIVE)
    (item,) = held
    assert item.lease.attempt == attempt
    started_s = bench.clock.monotonic_s()
    assert worker.work(held) == []
    assert item.deadline_s - started_s == most_s
    assert most_s < bench.clock.monotonic_s() - started_s <= most_s + 7.0


def test_a_batch_goes_on_while_one_of_its_leases_runs() -> None:
    """A lease that is lost does not end the work on another; the lost one's result is refused."""
    bench = bench_of(1, 0.0)
    bench.offer("j2")

    def step(number: int) -> None:
        bench.clock.advance_s(STEP_S)
        if number == 1:
            bench.memory.withdraw(["j1"])

    bench.engine = Steps(2, step)
    worker = bench.worker()
    assert worker.work(worker.take(ACTIVE)) == [Settled.LATE, Settled.ADMITTED]
