"""Steps end in time with what was honestly done, whatever actors and Redis do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deltastore.coordination.backend import MAX_ATTEMPTS, Settled
from deltastore.coordination.memory import MemoryCoordination
from deltastore.errors import CoordinationError, Kind
from deltastore.events import BatchDealt, PromptParked, ResultSettled
from tests.unit.workers.kit import Desk, hash_of, honest
from workers.config import TrainerConfig


def nothing() -> None:
    """A tick without other work."""


def test_a_batch_is_dealt_collected_and_in_order() -> None:
    """Every group comes back once, in its place, with a reward per sample."""
    desk = Desk()
    desk.join("a")
    desk.join("b")
    desk.dispatcher.deal(1)
    assert desk.events == [BatchDealt(1, (("a", 1), ("b", 1), ("", 1)))]
    assert desk.serve("b") == 2
    assert desk.serve("a") == 1
    batch = desk.dispatcher.collect(1, nothing)
    assert [group.prompt[-1] for group in batch.groups] == [5, 6, 7]
    assert all(group.rewards == (0.25, 0.5) and group.lag == 0 for group in batch.groups)
    assert (batch.missing, batch.dropped) == (0, 0)
    settled = [event for event in desk.events if isinstance(event, ResultSettled)]
    assert [event.outcome for event in settled] == ["admitted"] * 3


def test_an_old_version_never_reaches_the_loss() -> None:
    """A result offered for an old version is wrong_version at the first gate; nobody learns it."""
    desk = Desk()
    desk.join("old")
    desk.publish(2, 1)
    desk.publish(3, 2)
    desk.dispatcher.deal(3)
    assert desk.lease("old", version=1) is None
    lease = desk.lease("old", version=3)
    assert lease is not None
    answer = desk.settle(lease, "old", version=1, policy_hash=hash_of(1))
    assert answer is Settled.WRONG_VERSION
    desk.serve("old", version=2)
    desk.clock.advance_s(40)  # the spoiled lease runs out
    batch = desk.dispatcher.collect(3, lambda: desk.serve("old", version=2) and None)
    assert {group.result.provenance.version for group in batch.groups} == {2}
    assert {group.lag for group in batch.groups} == {1}
    assert len(batch.groups) == 3


def test_a_forged_claim_past_redis_is_stopped_by_the_table() -> None:
    """A result of an old version that Redis was made to admit is stale, dropped, done again."""
    desk = Desk()
    desk.join("a")
    desk.dispatcher.deal(1)
    desk.publish(2, 1)
    desk.publish(3, 2)
    desk.dispatcher.collect(1, lambda: desk.serve("a") and None)
    forged = replace(desk.settings, max_policy_lag=9)
    desk.dispatcher._settings = forged  # Redis' gate lets version 1 pass from here on
    desk.dispatcher.deal(3)
    lease = desk.lease("a", version=1)
    assert lease is not None
    assert desk.settle(lease, "a") is Settled.ADMITTED
    desk.dispatcher._settings = desk.settings
    batch = desk.dispatcher.collect(3, lambda: desk.serve("a", version=2) and None)
    assert batch.dropped == 1
    assert {group.result.provenance.version for group in batch.groups} == {2}
    assert "stale" in [e.outcome for e in desk.events if isinstance(e, ResultSettled)]


@pytest.mark.parametrize(
    "spoil", [lambda body: body[:-1], lambda body: body[:-1] + b"x"], ids=["torn", "changed"]
)
def test_a_torn_or_changed_object_is_dropped_and_done_again(spoil: Any) -> None:
    """An object that is not what was claimed counts as corrupt; its job gets a new id."""
    desk = Desk()
    desk.join("a")
    desk.dispatcher.deal(1)
    lease = desk.lease("a")
    assert lease is not None
    assert desk.settle(lease, "a", spoil=spoil) is Settled.ADMITTED
    batch = desk.dispatcher.collect(1, lambda: desk.serve("a") and None)
    assert (len(batch.groups), batch.dropped) == (3, 1)
    assert lease.job_id not in {group.result.provenance.job_id for group in batch.groups}


def test_an_absent_object_or_a_foreign_region_is_corrupt() -> None:
    """The trainer computes the key itself: a claim cannot point it elsewhere."""
    desk = Desk()
    desk.join("a")
    desk.dispatcher.deal(1)
    lease = desk.lease("a")
    assert lease is not None
    assert desk.settle(lease, "a", region="moon") is Settled.ADMITTED
    other = desk.lease("a")
    assert other is not None
    assert desk.settle(other, "a", result_sha256="0" * 64) is Settled.ADMITTED
    batch = desk.dispatcher.collect(1, lambda: desk.serve("a") and None)
    assert (len(batch.groups), batch.dropped) == (3, 2)


def test_work_that_is_always_corrupt_is_given_up() -> None:
    """A job whose results cannot be used is tried MAX_ATTEMPTS times; a step of such jobs ends."""
    desk = Desk()
    desk.join("bad")
    desk.dispatcher.deal(1)
    turns = iter(range(20))  # a job that is tried for ever fails here, not after a night

    def spoil_all() -> None:
        next(turns)
        while (lease := desk.lease("bad")) is not None:
            desk.settle(lease, "bad", spoil=lambda body: b"?" * len(body))

    with pytest.raises(CoordinationError, match="given up after their attempts"):
        desk.dispatcher.collect(1, spoil_all)
    outcomes = [event.outcome for event in desk.events if isinstance(event, ResultSettled)]
    assert outcomes == ["corrupt"] * (3 * MAX_ATTEMPTS)


def test_a_group_that_expires_too_often_is_parked_and_missing() -> None:
    """A prompt nobody finishes in three leases is given up; the step goes on without it."""
    desk = Desk()
    desk.join("a")
    desk.dispatcher.deal(1)
    stuck = desk.lease("a", lease_s=5.0)
    assert stuck is not None
    desk.serve("a")

    def hold_again() -> None:
        desk.lease("a", lease_s=5.0)

    batch = desk.dispatcher.collect(1, hold_again)
    assert (len(batch.groups), batch.missing, batch.dropped) == (2, 1, 0)  # counted once
    assert [event for event in desk.events if isinstance(event, PromptParked)] == [
        PromptParked(stuck.job_id, MAX_ATTEMPTS)
    ]
    assert batch.wait_s < desk.settings.step_deadline_s


def test_work_issued_anew_keeps_its_attempts() -> None:
    """Three leases and no more, each twice as long, whatever ids and versions the work had."""
    desk = Desk(TrainerConfig(groups=1, group_size=2, max_new_tokens=4))
    desk.join("a", version=1)
    desk.dispatcher.deal(2)
    taken: list[tuple[int, int, float]] = []

    def hold() -> None:
        version = desk.ledger.newest.version
        if (lease := desk.lease("a", version, lease_s=5.0)) is not None:
            taken.append((version, lease.attempt, lease.lease_s))
        if len(taken) == 2 and desk.ledger.newest.version == 1:
            desk.publish(2, 1)
            desk.join("a", version=2)  # from here on nobody can do the work as it was put up

    with pytest.raises(CoordinationError, match="given up after their attempts"):
        desk.dispatcher.collect(2, hold)
    assert taken == [(1, 1, 5.0), (1, 2, 10.0), (2, 3, 20.0)]


def test_expired_leases_and_corrupt_results_share_the_attempts() -> None:
    """Work that expired twice and then came back corrupt is given up: that was the third try."""
    desk = Desk(TrainerConfig(groups=1, group_size=2, max_new_tokens=4))
    desk.join("a")
    desk.dispatcher.deal(1)
    attempts: list[int] = []

    def fail() -> None:
        if (lease := desk.lease("a", lease_s=5.0)) is None:
            return
        attempts.append(lease.attempt)
        if lease.attempt == MAX_ATTEMPTS:
            desk.settle(lease, "a", spoil=lambda body: b"?" * len(body))

    with pytest.raises(CoordinationError, match="given up after their attempts"):
        desk.dispatcher.collect(1, fail)
    assert attempts == [1, 2, 3]


def test_a_lost_actors_work_goes_to_the_others() -> None:
    """A lease that expires goes back and is done by somebody else; nothing is missing."""
    desk = Desk()
    desk.join("dies")
    desk.join("lives")
    desk.dispatcher.deal(1)
    assert desk.lease("dies", lease_s=5.0) is not None
    batch = desk.dispatcher.collect(1, lambda: desk.serve("lives") and None)
    assert len(batch.groups) == 3
    assert {group.result.provenance.actor_id for group in batch.groups} == {"lives"}


def test_work_that_nobody_is_at_any_more_is_issued_at_todays_gate() -> None:
    """When every living actor has moved past a job's version the job is put up anew."""
    desk = Desk()
    desk.join("a", version=1)
    desk.dispatcher.deal(2)  # at version 1, for the step that learns at version 2
    desk.publish(2, 1)
    desk.join("a", version=2)
    batch = desk.dispatcher.collect(2, lambda: desk.serve("a", version=2) and None)
    assert {group.result.provenance.version for group in batch.groups} == {2}
    assert {group.lag for group in batch.groups} == {0}


def test_a_step_at_its_deadline_goes_on_with_the_minimum() -> None:
    """The slowest actor is not waited for beyond the deadline; its late result is late."""
    desk = Desk()
    desk.join("quick")
    desk.join("slow")
    desk.dispatcher.deal(1)
    held = desk.lease("slow", lease_s=1000.0)
    assert held is not None
    desk.serve("quick")
    batch = desk.dispatcher.collect(1, nothing)
    assert (len(batch.groups), batch.missing) == (2, 1)
    assert desk.settings.step_deadline_s <= batch.wait_s < desk.settings.give_up_s
    assert desk.settle(held, "slow") is Settled.LATE


def test_a_step_below_its_minimum_ends_with_a_clear_error() -> None:
    """Without any actor the trainer says so after give_up_s instead of waiting for ever."""
    desk = Desk()
    desk.dispatcher.deal(1)
    with pytest.raises(CoordinationError, match="0 of 3 groups") as caught:
        desk.dispatcher.collect(1, nothing)
    assert caught.value.kind is Kind.TIMEOUT
    assert "start actors" in str(caught.value)


def test_redis_restarting_empty_repeats_work_and_loses_none() -> None:
    """After Redis forgot everything the wanted jobs are offered again and the step completes."""
    desk = Desk()
    desk.join("a")
    desk.dispatcher.deal(1)
    lease = desk.lease("a")
    assert lease is not None
    switch = Switch(desk.coordination)
    desk.coordination = switch
    desk.build()
    switch.inner = MemoryCoordination(desk.clock)
    assert desk.settle(lease, "a") is Settled.UNKNOWN
    desk.join("a")
    batch = desk.dispatcher.collect(1, lambda: desk.serve("a") and None)
    assert len(batch.groups) == 3


def test_results_that_somebody_else_took_are_done_again() -> None:
    """A second trainer that takes this one's results delays it; nothing hangs and none is lost."""
    desk = Desk()
    desk.join("a")
    desk.dispatcher.deal(1)
    desk.serve("a")
    assert len(desk.coordination.take_settled(9, 0.1)) == 3
    batch = desk.dispatcher.collect(1, lambda: desk.serve("a") and None)
    assert len(batch.groups) == 3
    assert batch.wait_s < desk.settings.step_deadline_s


def test_an_outage_within_the_limit_is_waited_out() -> None:
    """Redis away for less than outage_max_s delays the step and nothing else."""
    desk = Desk()
    desk.join("a")
    switch = Switch(desk.coordination)
    desk.coordination = switch
    desk.build()
    switch.away_until_s = desk.clock.monotonic_s() + desk.settings.outage_max_s / 2
    desk.dispatcher.deal(1)
    batch = desk.dispatcher.collect(1, lambda: desk.serve("a") and None)
    assert len(batch.groups) == 3


def test_an_outage_beyond_the_limit_is_a_clear_error() -> None:
    """Redis away for longer ends the trainer with what to do about it."""
    desk = Desk()
    switch = Switch(desk.coordination)
    desk.coordination = switch
    desk.build()
    switch.away_until_s = float("inf")
    with pytest.raises(CoordinationError, match="away for 60 s") as caught:
        desk.dispatcher.deal(1)
    assert caught.value.kind is Kind.REDIS_UNAVAILABLE


def test_an_honest_result_survives_the_trip() -> None:
    """What an actor packed is what the loss reads, token for token."""
    desk = Desk(TrainerConfig(groups=1, group_size=2, max_new_tokens=4))
    desk.join("a")
    desk.dispatcher.deal(1)
    lease = desk.lease("a")
    assert lease is not None
    sent = honest(lease, "a")
    desk.settle(lease, "a", result=sent)
    (group,) = desk.dispatcher.collect(1, nothing).groups
    assert (group.result.tokens == sent.tokens).all()
    assert (group.result.logprobs == sent.logprobs).all()


class Switch:
    """A coordination that can be away, or be another one from now on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.away_until_s = 0.0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)

        def call(*args: Any, **keywords: Any) -> Any:
            if self.inner._clock.monotonic_s() < self.away_until_s:
                raise CoordinationError("connection refused", kind=Kind.REDIS_UNAVAILABLE)
            return method(*args, **keywords)

        return call
