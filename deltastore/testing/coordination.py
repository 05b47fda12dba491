"""Two backends that differ in one answer admit a wrong result: each passes this one suite.

Subclass `CoordinationTests` with a `fleet` fixture that gives a fresh backend and the way to move
its time (`deltastore.testing.fleet`). One class, so that no backend can pass half of it.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.coordination.backend import (
    MAX_ATTEMPTS,
    MAX_JOBS,
    MAX_LEASES_PER_ACTOR,
    MAX_PAYLOAD_BYTES,
    MAX_SAMPLES,
    MAX_SEGMENT_HINTS,
    ActorRecord,
    ActorState,
    ActorStatus,
    HeadHint,
    JobCounts,
    JobOffer,
    Pull,
    ReapedJob,
    ReapOutcome,
    RunningLease,
    SegmentHint,
    Settled,
    Throughput,
)
from deltastore.coordination.limits import FORGET_AFTER_S
from deltastore.errors import InvalidInputError, Kind
from deltastore.ids import new_token
from deltastore.testing.fleet import (
    LEASE_S,
    TTL_S,
    Fleet,
    StandingRedisTime,
    active,
    claim_of,
    gate_of,
    policy_hash_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "CoordinationTests",
    "Fleet",
    "StandingRedisTime",
    "active",
    "claim_of",
    "gate_of",
    "policy_hash_of",
]


class CoordinationTests:
    """What every backend promises. Subclasses give `fleet`."""

    @pytest.fixture
    def fleet(self) -> Fleet:
        """A fresh backend for each test."""
        raise NotImplementedError

    # membership

    def test_join_and_heartbeat(self, fleet: Fleet) -> None:
        """An actor is JOINING until it reports, then what it reported."""
        record = ActorRecord("a1", "eu", "test", 4, "from anchor 0")
        fleet.coordination.register(record, TTL_S)
        (member,) = fleet.coordination.members()
        assert (member.record, member.state) == (record, ActorState.JOINING)
        status = ActorStatus(ActorState.ACTIVE, 7, policy_hash_of(7), 8, 12.5, 1, "ok")
        assert fleet.coordination.heartbeat("a1", status, TTL_S)
        (member,) = fleet.coordination.members()
        assert (member.status, member.state) == (status, ActorState.ACTIVE)
        assert member.last_heartbeat_s == fleet.coordination.now_s()

    def test_silence_is_loss(self, fleet: Fleet) -> None:
        """A member whose heartbeat expired is LOST, and back with its next heartbeat."""
        fleet.join("a1", "a2")
        fleet.advance_s(TTL_S)
        assert fleet.coordination.heartbeat("a2", active(), TTL_S)
        fleet.advance_s(0.001)
        states = {member.actor_id: member.state for member in fleet.coordination.members()}
        assert states == {"a1": ActorState.LOST, "a2": ActorState.ACTIVE}
        assert fleet.coordination.heartbeat("a1", active(), TTL_S)
        assert {member.state for member in fleet.coordination.members()} == {ActorState.ACTIVE}

    def test_unknown_actor_registers_again(self, fleet: Fleet) -> None:
        """A heartbeat of an actor nobody knows says so, and registers nothing."""
        assert not fleet.coordination.heartbeat("a1", active(), TTL_S)
        assert fleet.coordination.members() == []

    def test_leave_gives_everything_back(self, fleet: Fleet) -> None:
        """Leaving returns share and leases to the open pool at once, attempts unchanged."""
        fleet.join("a1", "a2")
        fleet.offer("j1", "j2", assigned_to="a1")
        first = fleet.lease("a1")
        fleet.coordination.leave("a1")
        assert [member.actor_id for member in fleet.coordination.members()] == ["a2"]
        assert fleet.coordination.job_counts() == JobCounts(2, 0, 0, 0, 0)
        assert fleet.settle(first, "a1") is Settled.NOT_HOLDER
        assert [fleet.lease("a2").attempt for _ in range(2)] == [1, 1]
        fleet.coordination.leave("a1")

    def test_leaving_takes_the_samples_along(self, fleet: Fleet) -> None:
        """The samples of an actor that left are gone; the stored average is kept for its return."""
        fleet.join("a1")
        fleet.offer("j1")
        assert fleet.settle(fleet.lease("a1"), "a1") is Settled.ADMITTED
        fleet.coordination.set_throughput({"a1": 5.0}, TTL_S)
        fleet.coordination.leave("a1")
        assert fleet.coordination.throughput() == {"a1": Throughput((), 5.0)}

    def test_the_long_lost_are_forgotten(self, fleet: Fleet) -> None:
        """An actor lost for an hour disappears with the next reap; before, it is listed."""
        fleet.join("a1")
        fleet.advance_s(TTL_S + FORGET_AFTER_S - 1)
        fleet.coordination.reap()
        assert len(fleet.coordination.members()) == 1
        fleet.advance_s(1)
        fleet.coordination.reap()
        assert fleet.coordination.members() == []

    # the head hint

    def test_head_hint(self, fleet: Fleet) -> None:
        """The newest (generation, version) stands; older announcements are ignored."""
        assert fleet.coordination.head_hint() is None
        hints = [HeadHint(v, policy_hash_of(v), g) for v, g in ((5, 1), (4, 1), (3, 2))]
        for hint in hints:
            fleet.coordination.announce_head(hint)
        assert fleet.coordination.head_hint() == hints[2]

    def test_waiting_for_a_head(self, fleet: Fleet) -> None:
        """A wait returns a newer version, and None when time is up."""
        hint = HeadHint(5, policy_hash_of(5), 1)
        fleet.coordination.announce_head(hint)
        assert fleet.coordination.wait_head_hint(4, 1.0) == hint
        assert fleet.coordination.wait_head_hint(5, 0.25) is None

    def test_announced_segments(self, fleet: Fleet) -> None:
        """The newest announcements stand, oldest first; they end by themselves."""
        assert fleet.coordination.announced_segments() == []
        hints = [
            SegmentHint(7, number, policy_hash_of(number), 1 + number)
            for number in range(MAX_SEGMENT_HINTS + 3)
        ]
        for hint in hints[:3]:
            fleet.coordination.announce_segment(hint)
        assert fleet.coordination.announced_segments() == hints[:3]
        for hint in hints[3:]:
            fleet.coordination.announce_segment(hint)
        assert fleet.coordination.announced_segments() == hints[3:]

    # offers

    def test_repeated_offers_change_nothing(self, fleet: Fleet) -> None:
        """CASE L5: an offer whose answer was lost is repeated without a second effect."""
        assert fleet.offer("j1", "j2") == 2
        assert fleet.offer("j1", "j2", "j3", assigned_to="a1") == 1
        assert fleet.coordination.job_counts() == JobCounts(2, 1, 0, 0, 0)
        assert fleet.coordination.offer([]) == 0

    def test_offers_are_bounded(self, fleet: Fleet) -> None:
        """More live jobs than the limit are refused before anything is stored."""
        jobs = [JobOffer(f"j{i}", b"", gate_of(1), 1) for i in range(MAX_JOBS + 1)]
        with pytest.raises(InvalidInputError) as refused:
            fleet.coordination.offer(jobs)
        assert refused.value.kind is Kind.BACKLOG
        assert fleet.coordination.job_counts().open == 0

    def test_large_payloads_survive(self, fleet: Fleet) -> None:
        """Payloads are bytes, any bytes, up to the limit, in as many calls as needed."""
        payload = bytes(range(256)) * (MAX_PAYLOAD_BYTES // 256)
        jobs = [JobOffer(f"j{i}", payload, gate_of(1), 1) for i in range(20)]
        fleet.join("a1")
        assert fleet.coordination.offer(jobs) == 20
        assert all(fleet.lease("a1").payload == payload for _ in range(20))

    # grants

    def test_own_share_first_then_the_pool(self, fleet: Fleet) -> None:
        """An actor gets its share in order, then the pool in order, never another's share."""
        fleet.join("a1", "a2")
        fleet.offer("p1", "p2")
        fleet.offer("s1", "s2", assigned_to="a1")
        fleet.offer("t1", assigned_to="a2")
        assert [fleet.lease("a1").job_id for _ in range(4)] == ["s1", "s2", "p1", "p2"]
        assert fleet.grant("a1") is None
        assert fleet.lease("a2").payload == b"do t1"
        assert fleet.coordination.job_counts() == JobCounts(0, 0, 5, 0, 0)

    def test_grants_bind_version_and_hash(self, fleet: Fleet) -> None:
        """Only a (version, hash) in the gate is granted, and the lease is bound to it."""
        fleet.join("a1", version=2)
        fleet.offer("j1", gate=gate_of(1, 2))
        fleet.offer("j2", gate=gate_of(3))
        assert fleet.grant("a1", version=0) is None
        assert fleet.grant("a1", version=2, policy_hash=policy_hash_of(1)) is None
        lease = fleet.lease("a1", version=2)
        assert (lease.job_id, lease.version, lease.policy_hash) == ("j1", 2, policy_hash_of(2))
        assert fleet.lease("a1", version=3).job_id == "j2"

    def test_jobs_of_another_gate_are_stepped_over(self, fleet: Fleet) -> None:
        """Work of another version in front of the pool does not starve an actor."""
        fleet.join("a1")
        fleet.offer(*(f"n{i}" for i in range(200)), gate=gate_of(2))
        fleet.offer("j1")
        assert fleet.lease("a1").job_id == "j1"

    @pytest.mark.parametrize("state", [ActorState.DRAINING, ActorState.POISONED])
    def test_the_unwilling_get_nothing(self, fleet: Fleet, state: ActorState) -> None:
        """Draining and poisoned actors get no lease."""
        fleet.join("a1")
        fleet.offer("j1")
        assert fleet.coordination.heartbeat("a1", ActorStatus(state), TTL_S)
        assert fleet.grant("a1") is None

    def test_strangers_and_the_lost_get_nothing(self, fleet: Fleet) -> None:
        """Neither an unregistered actor nor one whose heartbeat expired gets a lease."""
        fleet.offer("j1", "j2")
        assert fleet.grant("a1") is None
        fleet.join("a1")
        fleet.advance_s(TTL_S)
        assert fleet.lease("a1").job_id == "j1"
        fleet.advance_s(0.001)
        assert fleet.grant("a1") is None

    def test_the_same_token_is_the_same_lease(self, fleet: Fleet) -> None:
        """CASE L5: asking again with the token of a running lease returns that lease."""
        fleet.join("a1", "a2")
        fleet.offer("j1", "j2")
        token = new_token()
        lease = fleet.lease("a1", token=token)
        assert lease.token == token
        assert fleet.grant("a1", token=token) == lease
        assert fleet.grant("a2", token=token) is None
        fleet.advance_s(LEASE_S + 0.001)
        assert fleet.grant("a1", token=token) is None
        assert fleet.coordination.job_counts() == JobCounts(1, 0, 1, 0, 0)

    def test_leases_per_actor_are_bounded(self, fleet: Fleet) -> None:
        """One actor cannot hold the whole pool."""
        fleet.join("a1")
        fleet.offer(*(f"j{i}" for i in range(MAX_LEASES_PER_ACTOR + 1)))
        for _ in range(MAX_LEASES_PER_ACTOR):
            fleet.lease("a1")
        assert fleet.grant("a1") is None

    def test_pulls_are_limited(self, fleet: Fleet) -> None:
        """A limited actor takes its own share and `left` of the pool; empty-handed, a handful."""
        fleet.join("slow", "fast", "free")
        fleet.offer("s1", "s2", assigned_to="slow")
        fleet.offer(*(f"p{i}" for i in range(12)))
        fleet.coordination.limit_pulls({"slow": Pull(1, 0), "fast": Pull(0, 2)}, 60.0)
        taken = [fleet.lease("slow") for _ in range(3)]
        assert [lease.job_id for lease in taken] == ["s1", "s2", "p0"]
        assert fleet.grant("slow") is None
        handful = [fleet.lease("fast") for _ in range(2)]  # half of 11 over two sharers
        assert fleet.grant("fast") is None
        assert fleet.lease("free").job_id == "p3"
        for lease in taken:
            assert fleet.settle(lease, "slow") is Settled.ADMITTED
        assert fleet.grant("slow") is None
        for lease in handful:
            assert fleet.settle(lease, "fast") is Settled.ADMITTED
        assert [fleet.lease("fast").job_id for _ in range(2)] == ["p4", "p5"]
        assert fleet.grant("fast") is None

    def test_limits_on_pulls_end(self, fleet: Fleet) -> None:
        """Limits hold until their time, and are replaced as a whole."""
        fleet.join("a1", "a2")
        fleet.offer("p1", "p2", "p3", "p4")
        fleet.coordination.limit_pulls({"a1": Pull(0, 0), "a2": Pull(0, 0)}, 5.0)
        assert fleet.grant("a1") is None
        fleet.coordination.limit_pulls({"a2": Pull(0, 0)}, 5.0)
        assert fleet.lease("a1").job_id == "p1"
        fleet.advance_s(5)
        assert fleet.grant("a2") is None
        fleet.advance_s(0.001)
        assert fleet.lease("a2").job_id == "p2"
        fleet.coordination.limit_pulls({"a2": Pull(0, 1)}, 5.0)
        assert fleet.grant("a2") is None  # it holds something
        fleet.coordination.limit_pulls({}, 5.0)
        assert fleet.lease("a2").job_id == "p3"

    def test_each_job_has_one_holder(self, fleet: Fleet) -> None:
        """CASE L4: threads that grant at once get every job exactly once."""
        actors = [f"a{i}" for i in range(8)]
        fleet.join(*actors)
        fleet.offer(*(f"j{i}" for i in range(40)))
        start = threading.Barrier(len(actors))

        def pull(actor_id: str) -> list[str]:
            start.wait()
            leases = iter(lambda: fleet.grant(actor_id), None)
            return [lease.job_id for lease in leases]

        with ThreadPoolExecutor(len(actors)) as pool:
            pulled = [job_id for ids in pool.map(pull, actors) for job_id in ids]
        assert sorted(pulled) == sorted(f"j{i}" for i in range(40))

    # renewal and return

    def test_renewal_needs_progress(self, fleet: Fleet) -> None:
        """A lease is extended only when more tokens are done, and only by its holder."""
        fleet.join("a1")
        fleet.offer("j1")
        lease = fleet.lease("a1")
        renew = fleet.coordination.renew
        fleet.advance_s(6)
        assert not renew("j1", lease.token, 0, LEASE_S, 60.0)
        assert not renew("j1", new_token(), 10, LEASE_S, 60.0)
        assert not renew("j9", lease.token, 10, LEASE_S, 60.0)
        assert renew("j1", lease.token, 10, LEASE_S, 60.0)
        fleet.advance_s(6)
        assert not renew("j1", lease.token, 10, LEASE_S, 60.0)
        assert fleet.settle(lease, "a1") is Settled.ADMITTED

    def test_renewal_ends_at_the_maximum(self, fleet: Fleet) -> None:
        """No progress carries a lease past `max_lease_s` from its grant."""
        fleet.join("a1")
        fleet.offer("j1")
        lease = fleet.lease("a1")
        fleet.advance_s(9)
        assert fleet.coordination.renew("j1", lease.token, 1, LEASE_S, 12.0)
        fleet.advance_s(2)
        assert not fleet.coordination.renew("j1", lease.token, 2, LEASE_S, 12.0)
        fleet.advance_s(1.001)
        assert not fleet.coordination.renew("j1", lease.token, 3, LEASE_S, 60.0)
        assert fleet.settle(lease, "a1") is Settled.LATE

    def test_watching_running_leases(self, fleet: Fleet) -> None:
        """Who holds what until when can be seen: renewals move it, closings cap it, ends end it."""
        assert fleet.coordination.running_leases() == []
        fleet.join("a1", "a2")
        now_s = fleet.coordination.now_s()
        fleet.offer("j1", "j2")
        fleet.offer("j3", closes_at_s=now_s + 4)
        second, first = fleet.lease("a2"), fleet.lease("a1")
        fleet.lease("a1")
        fleet.advance_s(1)
        assert fleet.coordination.renew("j2", first.token, 1, LEASE_S, 60.0)
        assert fleet.coordination.running_leases() == [
            RunningLease("a1", "j2", now_s + 1 + LEASE_S),
            RunningLease("a1", "j3", now_s + 4),
            RunningLease("a2", "j1", now_s + LEASE_S),
        ]
        assert fleet.settle(second, "a2") is Settled.ADMITTED
        assert {lease.actor_id for lease in fleet.coordination.running_leases()} == {"a1"}
        fleet.coordination.leave("a1")
        assert fleet.coordination.running_leases() == []

    def test_hand_back(self, fleet: Fleet) -> None:
        """A job handed back is open at once, in its old place, with the same attempt."""
        fleet.join("a1", "a2")
        fleet.offer("j1", "j2", assigned_to="a1")
        lease = fleet.lease("a1")
        assert not fleet.coordination.hand_back("j1", new_token())
        assert fleet.coordination.hand_back("j1", lease.token)
        assert fleet.coordination.hand_back("j1", lease.token)  # CASE L5: the answer was lost
        assert not fleet.coordination.hand_back("j9", lease.token)
        assert fleet.settle(lease, "a1") is Settled.NOT_HOLDER
        again = fleet.lease("a2")
        assert (again.job_id, again.attempt) == ("j1", 1)
        assert not fleet.coordination.hand_back("j1", lease.token)
        assert fleet.coordination.throughput() == {}

    # settlement

    def test_admitted_once(self, fleet: Fleet) -> None:
        """A right settlement is admitted, the next one of the same job is a duplicate."""
        fleet.join("a1")
        fleet.offer("j1")
        lease = fleet.lease("a1")
        assert fleet.settle(lease, "a1") is Settled.ADMITTED
        assert fleet.settle(lease, "a1") is Settled.DUPLICATE
        assert fleet.coordination.job_counts() == JobCounts(0, 0, 0, 1, 0)

    def test_every_refusal_has_its_name(self, fleet: Fleet) -> None:
        """Each clause of the predicate has its answer, the lease stands, each is counted."""
        fleet.join("a1")
        fleet.offer("j1")
        lease = fleet.lease("a1")
        wrong: dict[Settled, dict[str, Any]] = {
            Settled.UNKNOWN: {"job_id": "j9"},
            Settled.NOT_HOLDER: {"token": new_token()},
            Settled.WRONG_VERSION: {"version": 2, "policy_hash": policy_hash_of(2)},
            Settled.WRONG_HASH: {"policy_hash": policy_hash_of(2)},
        }
        for answer, changes in wrong.items():
            assert fleet.settle(lease, "a1", **changes) is answer
        assert fleet.settle(lease, "a2") is Settled.NOT_HOLDER
        assert fleet.settle(lease, "a1") is Settled.ADMITTED
        expected = dict.fromkeys(Settled, 0) | dict.fromkeys(wrong, 1)
        expected |= {Settled.ADMITTED: 1, Settled.NOT_HOLDER: 2}
        assert fleet.coordination.outcome_counts() == expected

    def test_late_by_a_millisecond(self, fleet: Fleet) -> None:
        """CASE L1: t_r <= t_expire admits; a holder that wakes later is refused."""
        fleet.join("a1")
        fleet.offer("j1", "j2")
        first, second = fleet.lease("a1"), fleet.lease("a1")
        fleet.advance_s(LEASE_S)
        assert fleet.settle(first, "a1") is Settled.ADMITTED
        fleet.advance_s(0.001)
        assert fleet.settle(second, "a1") is Settled.LATE

    def test_late_even_if_reissued(self, fleet: Fleet) -> None:
        """CASE L1: after expiry the job is another's: the old holder is late, the new one not."""
        fleet.join("a1", "a2")
        fleet.offer("j1")
        old = fleet.lease("a1")
        fleet.advance_s(LEASE_S + 0.001)
        fleet.coordination.reap()
        assert fleet.settle(old, "a1") is Settled.LATE
        new = fleet.lease("a2")
        assert fleet.settle(old, "a1") is Settled.LATE
        assert fleet.settle(new, "a2") is Settled.ADMITTED

    def test_a_closed_step_is_late(self, fleet: Fleet) -> None:
        """Past its closing a job is neither granted nor admitted, though its lease would run."""
        fleet.join("a1")
        now_s = fleet.coordination.now_s()
        fleet.offer("j1", "j2", closes_at_s=now_s + 5)
        lease = fleet.lease("a1")
        assert lease.expires_at_s == pytest.approx(now_s + 5)
        fleet.advance_s(5.001)
        assert fleet.grant("a1") is None
        assert fleet.settle(lease, "a1") is Settled.LATE
        reaped = fleet.coordination.reap()
        assert {(job.job_id, job.actor_id, job.outcome) for job in reaped} == {
            ("j1", "a1", ReapOutcome.CLOSED),
            ("j2", None, ReapOutcome.CLOSED),
        }
        assert fleet.settle(lease, "a1") is Settled.LATE
        assert fleet.coordination.throughput() == {}

    def test_taking_results(self, fleet: Fleet) -> None:
        """Admitted results come oldest first, bounded, once, with the backend's times."""
        fleet.join("a1")
        fleet.offer("j1", "j2", "j3")
        start_s = fleet.coordination.now_s()
        for _ in range(3):
            lease = fleet.lease("a1")
            fleet.advance_s(1)
            assert fleet.settle(lease, "a1", tokens=7) is Settled.ADMITTED
        first = fleet.coordination.take_settled(2, 1.0)
        assert [result.settlement.job_id for result in first] == ["j1", "j2"]
        assert first[1].granted_at_s == pytest.approx(start_s + 1)
        assert first[1].settled_at_s == pytest.approx(start_s + 2)
        (last,) = fleet.coordination.take_settled(2, 0.0)
        assert last.settlement == claim_of(lease, "a1", tokens=7)
        assert fleet.coordination.take_settled(2, 0.25) == []

    # reaping

    def test_expired_work_is_reissued_then_parked(self, fleet: Fleet) -> None:
        """Each expiry doubles the time; after the last attempt the job is parked, and counted."""
        fleet.join("a1")
        fleet.offer("j1")
        times_s = []
        for attempt in range(1, MAX_ATTEMPTS + 1):
            lease = fleet.lease("a1")
            assert lease.attempt == attempt
            times_s.append(lease.lease_s)
            fleet.advance_s(lease.lease_s)
            assert fleet.coordination.reap() == []
            fleet.advance_s(0.001)
            assert fleet.coordination.heartbeat("a1", active(), TTL_S)
            parked = attempt == MAX_ATTEMPTS
            outcome = ReapOutcome.PARKED if parked else ReapOutcome.REOPENED
            now = ReapedJob("j1", "a1", min(attempt + 1, MAX_ATTEMPTS), outcome)
            assert fleet.coordination.reap() == [now]
        assert times_s == pytest.approx([LEASE_S, 2 * LEASE_S, 4 * LEASE_S])
        assert fleet.grant("a1") is None
        assert fleet.settle(lease, "a1") is Settled.LATE
        assert fleet.coordination.job_counts() == JobCounts(0, 0, 0, 0, 1)
        samples = fleet.coordination.throughput()["a1"].samples
        assert [(s.tokens, s.counts) for s in samples] == [(0, False), (0, True), (0, True)]

    def test_renewal_doubles_with_the_attempt(self, fleet: Fleet) -> None:
        """A re-issued job has twice the time in renewals and in their maximum too."""
        fleet.join("a1")
        fleet.offer("j1", attempt=2)
        lease = fleet.lease("a1")
        fleet.advance_s(15)
        assert fleet.coordination.renew("j1", lease.token, 1, LEASE_S, 17.0)
        fleet.advance_s(19)
        assert not fleet.coordination.renew("j1", lease.token, 2, LEASE_S, 17.0)
        assert fleet.settle(lease, "a1") is Settled.ADMITTED

    def test_shares_of_the_gone_return(self, fleet: Fleet) -> None:
        """What was dealt to a lost, draining, poisoned or unknown actor returns to the pool."""
        fleet.join("a1", "a2", "a3", "a4")
        for actor_id in ("a1", "a2", "a3", "a4", "nobody"):
            fleet.offer(f"of-{actor_id}", assigned_to=actor_id)
        fleet.advance_s(TTL_S)
        for actor_id, state in (
            ("a2", ActorState.DRAINING),
            ("a3", ActorState.POISONED),
            ("a4", ActorState.ACTIVE),
        ):
            assert fleet.coordination.heartbeat(actor_id, ActorStatus(state), TTL_S)
        fleet.advance_s(0.001)
        reaped = fleet.coordination.reap()
        assert {job.actor_id for job in reaped} == {"a1", "a2", "a3", "nobody"}
        assert {(job.outcome, job.attempt) for job in reaped} == {(ReapOutcome.RELEASED, 1)}
        assert fleet.coordination.job_counts() == JobCounts(4, 1, 0, 0, 0)

    def test_names_that_begin_alike_are_different_actors(self, fleet: Fleet) -> None:
        """Shares and leases of `a` are not those of `a-1`, `a.1`, `a1` or `a_`, nor in reverse."""
        names = ["a", "a-1", "a.1", "a1", "a_", "A"]
        fleet.join(*names)
        for name in names:
            fleet.offer(f"of-{name}", assigned_to=name)
        assert [fleet.lease(name).job_id for name in names] == [f"of-{name}" for name in names]
        for name in names:
            fleet.offer(f"more-{name}", assigned_to=name)
        fleet.coordination.leave("a")
        assert fleet.coordination.job_counts() == JobCounts(2, 5, 5, 0, 0)
        fleet.advance_s(TTL_S + 0.001)
        gone = [job.actor_id for job in fleet.coordination.reap() if job.actor_id]
        assert sorted(set(gone)) == sorted(names[1:])
        assert fleet.coordination.job_counts() == JobCounts(12, 0, 0, 0, 0)

    def test_withdrawn_jobs_are_closed(self, fleet: Fleet) -> None:
        """A step's end closes its jobs in every state, and results nobody took are dropped."""
        fleet.join("a1")
        fleet.offer("dealt", assigned_to="a2")
        fleet.offer("settled", "leased", "open")
        settled, leased = fleet.lease("a1"), fleet.lease("a1")
        assert fleet.settle(settled, "a1") is Settled.ADMITTED
        ids = ["dealt", "settled", "leased", "open", "unknown"]
        assert fleet.coordination.withdraw(ids) == 3
        assert fleet.coordination.withdraw(ids) == 0
        assert fleet.settle(leased, "a1") is Settled.LATE
        assert fleet.settle(settled, "a1") is Settled.DUPLICATE
        assert fleet.coordination.take_settled(10, 0.0) == []
        assert fleet.grant("a1") is None
        assert fleet.offer("open") == 0
        assert fleet.coordination.job_counts() == JobCounts(0, 0, 0, 1, 0)

    def test_a_bad_result_reopens_its_job(self, fleet: Fleet) -> None:
        """A settled job offered with a higher attempt is work again; its old holder is not."""
        fleet.join("a1", "a2")
        fleet.offer("j1")
        old = fleet.lease("a1")
        assert fleet.settle(old, "a1") is Settled.ADMITTED
        assert fleet.offer("j1") == 0
        assert fleet.offer("j1", attempt=2) == 1
        assert fleet.coordination.job_counts() == JobCounts(1, 0, 0, 0, 0)
        assert fleet.coordination.take_settled(10, 0.0) == []
        assert fleet.settle(old, "a1") is Settled.NOT_HOLDER
        assert fleet.settle(fleet.lease("a2"), "a2") is Settled.ADMITTED
        assert len(fleet.coordination.take_settled(10, 0.0)) == 1

    # throughput

    def test_samples(self, fleet: Fleet) -> None:
        """A lease is a sample of its tokens over grant to settlement; the first does not count."""
        fleet.join("a1")
        fleet.offer("j1", "j2", "j3")
        for tokens in (50, 100):
            lease = fleet.lease("a1")
            fleet.advance_s(4)
            assert fleet.settle(lease, "a1", tokens=tokens) is Settled.ADMITTED
        fleet.lease("a1")
        fleet.advance_s(LEASE_S + 5)
        fleet.coordination.reap()
        samples = fleet.coordination.throughput()["a1"].samples
        assert [(s.tokens, round(s.elapsed_s * 1000), s.counts) for s in samples] == [
            (50, 4000, False),
            (100, 4000, True),
            (0, round(LEASE_S * 1000), True),
        ]

    def test_sample_times_are_a_cursor(self, fleet: Fleet) -> None:
        """Samples of one actor in one millisecond still have increasing times; old ones go."""
        fleet.join("a1")
        fleet.offer(*(f"j{i}" for i in range(MAX_SAMPLES + 8)))
        for _ in range(MAX_SAMPLES + 8):
            assert fleet.settle(fleet.lease("a1"), "a1") is Settled.ADMITTED
        times_s = [s.at_s for s in fleet.coordination.throughput()["a1"].samples]
        assert len(times_s) == MAX_SAMPLES
        assert times_s == sorted(set(times_s))

    def test_averages_expire(self, fleet: Fleet) -> None:
        """CASE L2: a stored average is the same float until its TTL is over, then absent."""
        fleet.coordination.set_throughput({"a1": 0.1 + 0.2, "a2": 1e-7}, TTL_S)
        fleet.coordination.set_throughput({}, TTL_S)
        fleet.advance_s(TTL_S)
        fleet.coordination.set_throughput({"a2": 0.0}, TTL_S)
        rates = {a: t.tokens_per_s for a, t in fleet.coordination.throughput().items()}
        assert rates == {"a1": 0.1 + 0.2, "a2": 0.0}
        fleet.advance_s(0.001)
        assert list(fleet.coordination.throughput()) == ["a2"]

    # refusals

    @pytest.mark.parametrize("ttl_s", [0.0, -1.0, 0.0004, float("nan"), float("inf"), 1e9])
    def test_impossible_times_are_refused(self, fleet: Fleet, ttl_s: float) -> None:
        """CASE L1, L11: a TTL that is not positive, too short, endless or no number is refused."""
        fleet.join("a1")
        fleet.offer("j1")
        lease = fleet.lease("a1")
        c = fleet.coordination
        calls: list[Callable[[], object]] = [
            lambda: c.register(ActorRecord("a2", "eu", "test", 1), ttl_s),
            lambda: c.heartbeat("a1", active(), ttl_s),
            lambda: fleet.grant("a1", lease_s=ttl_s),
            lambda: c.renew("j1", lease.token, 1, ttl_s, 60.0),
            lambda: c.renew("j1", lease.token, 1, 60.0, ttl_s),
            lambda: c.set_throughput({"a1": 1.0}, ttl_s),
        ]
        for call in calls:
            with pytest.raises(InvalidInputError):
                call()
        assert [member.actor_id for member in c.members()] == ["a1"]

    def test_bad_arguments_are_refused(self, fleet: Fleet) -> None:
        """Names, tokens, hashes, counts and rates are checked before anything is asked."""
        c = fleet.coordination
        calls: list[Callable[[], object]] = [
            lambda: c.heartbeat("a/1", active(), TTL_S),
            lambda: c.leave(""),
            lambda: fleet.grant("a1", token="1"),
            lambda: fleet.grant("a1", policy_hash="x"),
            lambda: fleet.grant("a1", version=-1),
            lambda: c.renew("j1", new_token(), -1, 1.0, 1.0),
            lambda: c.hand_back("j:1", new_token()),
            lambda: c.hand_back("j1", "x" * 32),
            lambda: c.take_settled(0, 0.0),
            lambda: c.take_settled(1, -1.0),
            lambda: c.wait_head_hint(0, float("nan")),
            lambda: c.announce_segment(SegmentHint(1, -1, policy_hash_of(1), 1)),
            lambda: c.announce_segment(SegmentHint(1, 0, policy_hash_of(1), 0)),
            lambda: c.announce_segment(SegmentHint(1, 0, "../../x", 1)),
            lambda: c.withdraw(["j 1"]),
            lambda: c.set_throughput({"a1": float("nan")}, TTL_S),
            lambda: c.set_throughput({"a1": -1.0}, TTL_S),
        ]
        for call in calls:
            with pytest.raises(InvalidInputError):
                call()
