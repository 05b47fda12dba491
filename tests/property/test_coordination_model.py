"""Redis answers every interleaving exactly as the plain Python model does.

Ten actors join, work, stall, lie, leave and come back; time jumps both ways; Redis loses its
scripts and its data. After each call both backends must have given the same answer and be in the
same state, and what was admitted must satisfy the predicate by a record kept apart from both.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import redis
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deltastore.coordination.backend import (
    MAX_ATTEMPTS,
    ActorRecord,
    ActorState,
    ActorStatus,
    AdmittedResult,
    HeadHint,
    JobOffer,
    Lease,
    Settled,
    Settlement,
)
from deltastore.coordination.memory import MemoryCoordination
from deltastore.coordination.redis import RedisCoordination
from deltastore.testing.clock import FakeClock
from deltastore.testing.fleet import (
    StandingRedisTime,
    claim_of,
    gate_of,
    policy_hash_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.testing.servers import RedisServer

ACTORS = [f"a{i}" for i in range(10)]
JOBS = [f"j{i}" for i in range(12)]
START_S = 1_000_000.0

actors = st.sampled_from(ACTORS)
job_ids = st.sampled_from(JOBS)
versions = st.integers(1, 3)
foreign_tokens = st.integers(2**64, 2**128 - 1).map(lambda number: f"{number:032x}")
times_s = st.sampled_from([0.05, 1.0, 10.0, 30.0])


@st.composite
def offers(draw: st.DrawFn) -> dict[str, Any]:
    """An offer but for its closing, which depends on the time it is made."""
    gate = draw(st.lists(versions, min_size=1, max_size=3, unique=True))
    return {
        "job_id": draw(job_ids),
        "payload": draw(st.binary(max_size=8)),
        "gate": gate_of(*gate),
        "expected_tokens": 100,
        "assigned_to": draw(st.none() | actors),
        "attempt": draw(st.integers(1, 3)),
    }


@dataclass
class Books:
    """What the test itself wrote down, apart from both backends."""

    leases: dict[str, tuple[Lease, str]] = field(default_factory=dict)
    """Lease as granted and its actor, by token."""
    deadlines_s: dict[str, float] = field(default_factory=dict)
    """The latest moment at which each token may settle: raised by renewals."""
    settled_attempt: dict[str, int] = field(default_factory=dict)

    def note(self, lease: Lease, actor: str) -> None:
        """A lease as somebody was given it."""
        self.leases[lease.token] = (lease, actor)
        self.extend(lease.token, lease.expires_at_s)

    def extend(self, token: str, deadline_s: float) -> None:
        """A later moment until which a token may settle."""
        self.deadlines_s[token] = max(self.deadlines_s.get(token, 0.0), deadline_s)


class Both(RuleBasedStateMachine):
    """Every rule asks Redis and the model, and compares."""

    url = ""
    granted = Bundle("granted")

    @initialize()
    def start(self) -> None:
        """A run of its own on a standing clock, and a model on another."""
        self.run_name = f"run-{secrets.token_hex(6)}"
        self.client = redis.Redis.from_url(self.url)
        self.time = StandingRedisTime(self.client, f"test-time:{{{self.run_name}}}", START_S)
        self.redis = RedisCoordination(
            self.url, self.run_name, FakeClock(), scripts=self.time.scripts()
        )
        self.clock = FakeClock(START_S)
        self.model = MemoryCoordination(self.clock)
        self.books = Books()
        self.tokens_made = 0

    def teardown(self) -> None:
        """Leave nothing in the server."""
        if hasattr(self, "client"):
            self.redis.close()
            for key in self.client.scan_iter(f"*{{{self.run_name}}}*", count=1000):
                self.client.delete(key)
            self.client.close()

    def ask(self, call: Callable[[Any], Any]) -> Any:
        """The answer both give."""
        real, expected = call(self.redis), call(self.model)
        assert real == expected
        return real

    @rule(seconds=st.sampled_from([0.001, 0.05, 0.5, 5.0, 10.0, 31.0, 3700.0, -0.5, -40.0]))
    def time_passes(self, seconds: float) -> None:
        """Mostly forward; backwards as a stepped server clock does."""
        self.time.advance_s(seconds)
        self.clock.advance_s(seconds)

    @rule()
    def scripts_are_forgotten(self) -> None:
        """CASE L7: SCRIPT FLUSH between any two calls."""
        self.client.script_flush()

    @rule()
    def data_are_lost(self) -> None:
        """Redis restarts empty: nobody is known, nothing is admitted."""
        for key in self.client.scan_iter(f"deltastore:{{{self.run_name}}}:*", count=1000):
            self.client.delete(key)
        self.model = MemoryCoordination(self.clock)
        self.books = Books()

    @rule(actor=actors, ttl_s=times_s)
    def register(self, actor: str, ttl_s: float) -> None:
        """Join, or join again."""
        self.ask(lambda c: c.register(ActorRecord(actor, "eu", "test", 1), ttl_s))

    @rule(
        actor=actors,
        ttl_s=times_s,
        version=versions,
        state=st.sampled_from([s for s in ActorState if s is not ActorState.LOST]),
    )
    def heartbeat(self, actor: str, ttl_s: float, version: int, state: ActorState) -> None:
        """Report anything an actor can report."""
        status = ActorStatus(state, version, policy_hash_of(version))
        self.ask(lambda c: c.heartbeat(actor, status, ttl_s))

    @rule(ids=st.lists(actors, min_size=1, max_size=10, unique=True))
    def a_fleet_joins(self, ids: list[str]) -> None:
        """Many at once: the common case, so that work gets done."""
        for actor in ids:
            self.register(actor, 30.0)
            self.heartbeat(actor, 30.0, 1, ActorState.ACTIVE)

    @rule(actor=actors)
    def leave(self, actor: str) -> None:
        """Go."""
        self.ask(lambda c: c.leave(actor))

    @rule(version=versions, generation=st.integers(1, 2))
    def announce(self, version: int, generation: int) -> None:
        """Advertise a head."""
        hint = HeadHint(version, policy_hash_of(version), generation)
        self.ask(lambda c: c.announce_head(hint))

    @rule(batch=st.lists(offers(), min_size=1, max_size=6), closes_in_s=st.none() | times_s)
    def offer(self, batch: list[dict[str, Any]], closes_in_s: float | None) -> None:
        """Offer new, repeated, re-opened jobs."""
        closes_at_s = None if closes_in_s is None else self.clock.utc_s() + closes_in_s
        jobs = [JobOffer(**fields, closes_at_s=closes_at_s) for fields in batch]
        self.ask(lambda c: c.offer(jobs))

    @rule(target=granted, actor=actors, version=versions, lease_s=times_s)
    def grant(self, actor: str, version: int, lease_s: float) -> Any:
        """Ask for work, with a new token each time."""
        self.tokens_made += 1
        token = f"{self.tokens_made:032x}"
        lease = self.ask(lambda c: c.grant(actor, version, policy_hash_of(version), lease_s, token))
        if lease is None:
            return multiple()
        assert (version, policy_hash_of(version)) == (lease.version, lease.policy_hash)
        self.books.note(lease, actor)
        return (lease, actor)

    @rule(target=granted, first=granted, other=actors)
    def grant_again(self, first: tuple[Lease, str], other: str) -> Any:
        """CASE L5: the same token again, by the holder or by somebody else."""
        lease, actor = first
        asked = (lease.version, lease.policy_hash, 10.0, lease.token)
        again = self.ask(lambda c: c.grant(actor, *asked))
        if again is not None:
            self.books.note(again, actor)
        if other != actor and again is not None:
            assert self.ask(lambda c: c.grant(other, *asked)) is None
        return multiple() if again is None else (again, actor)

    @rule(held=granted, done=st.integers(0, 5), lease_s=times_s, max_s=times_s)
    def renew(self, held: tuple[Lease, str], done: int, lease_s: float, max_s: float) -> None:
        """Ask for more time, with or without progress."""
        lease, _ = held
        if self.ask(lambda c: c.renew(lease.job_id, lease.token, done, lease_s, max_s)):
            self.books.extend(lease.token, self.clock.utc_s() + lease_s * 2 ** (MAX_ATTEMPTS - 1))

    @rule(held=consumes(granted))
    def hand_back(self, held: tuple[Lease, str]) -> None:
        """Return it; the token ends."""
        lease, _ = held
        self.ask(lambda c: c.hand_back(lease.job_id, lease.token))

    @rule(
        held=granted,
        lie=st.sampled_from(
            [{}] * 4 + [{"version": 2}, {"policy_hash": "f" * 64}, {"job_id": "j0"}]
        ),
        liar=st.none() | actors,
    )
    def settle(self, held: tuple[Lease, str], lie: dict[str, Any], liar: str | None) -> None:
        """Settle truly, wrongly, late or twice."""
        lease, actor = held
        claim = claim_of(lease, liar or actor, **lie)
        if self.ask(lambda c: c.settle(claim)) is Settled.ADMITTED:
            self.check_admitted(claim)

    @rule(token=foreign_tokens, actor=actors, job_id=job_ids, version=versions)
    def settle_from_nowhere(self, token: str, actor: str, job_id: str, version: int) -> None:
        """A claim on a token nobody was given is never admitted."""
        claim = Settlement(
            job_id, token, actor, version, policy_hash_of(version), "ab" * 32, 1, 1, "eu"
        )
        assert self.ask(lambda c: c.settle(claim)) is not Settled.ADMITTED

    def check_admitted(self, claim: Settlement) -> None:
        """The predicate, by the test's own books."""
        lease, actor = self.books.leases[claim.token]
        assert (claim.job_id, claim.actor_id) == (lease.job_id, actor)
        assert (claim.version, claim.policy_hash) == (lease.version, lease.policy_hash)
        assert self.clock.utc_s() <= self.books.deadlines_s[claim.token] + 1e-6
        before = self.books.settled_attempt.get(claim.job_id, 0)
        assert lease.attempt > before, "admitted twice without being offered anew"
        self.books.settled_attempt[claim.job_id] = lease.attempt

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        """Take results, without waiting."""
        results: list[AdmittedResult] = self.ask(lambda c: c.take_settled(count, 0.0))
        for result in results:
            assert result.settlement.token in self.books.leases

    @rule()
    def reap(self) -> None:
        """Take back what expired."""
        self.ask(lambda c: c.reap())

    @rule(ids=st.lists(job_ids, max_size=3))
    def withdraw(self, ids: list[str]) -> None:
        """Close some jobs."""
        self.ask(lambda c: c.withdraw(ids))

    @precondition(lambda self: hasattr(self, "redis"))
    @invariant()
    def same_state(self) -> None:
        """Members, head, counts, outcomes and samples agree after every rule."""
        self.ask(lambda c: c.now_s())
        self.ask(lambda c: c.members())
        self.ask(lambda c: c.head_hint())
        self.ask(lambda c: c.job_counts())
        self.ask(lambda c: c.outcome_counts())
        self.ask(lambda c: c.throughput())


def test_redis_equals_the_model(redis_server: RedisServer) -> None:
    """Over random interleavings Redis and the Python model give the same answers."""

    class OnThisServer(Both):
        url = redis_server.url

    run_state_machine_as_test(OnThisServer)


def test_a_busy_day(redis_server: RedisServer) -> None:
    """Hundreds of calls of a working fleet, seeded: the same answers, and work gets admitted."""

    class OnThisServer(Both):
        url = redis_server.url

    rng = random.Random(6)
    day = OnThisServer()
    day.start()
    held: list[tuple[Lease, str]] = []
    admitted = 0
    for step in range(300):
        if step % 20 == 0:
            day.a_fleet_joins(ACTORS)
            batch = [
                {
                    "job_id": f"s{step}-{i}",
                    "payload": b"x",
                    "gate": gate_of(1, 2),
                    "expected_tokens": 10,
                    "assigned_to": rng.choice([None, *ACTORS]),
                }
                for i in range(12)
            ]
            day.offer(batch, rng.choice([None, 30.0]))
        lease = day.grant(rng.choice(ACTORS), rng.choice([1, 1, 2]), rng.choice([1.0, 10.0]))
        if isinstance(lease, tuple):
            held.append(lease)
        if held and rng.random() < 0.6:
            one = held.pop(rng.randrange(len(held)))
            day.renew(one, rng.randrange(5), 10.0, 30.0)
            day.settle(one, rng.choice([{}, {}, {}, {"version": 3}]), None)
        if rng.random() < 0.3:
            day.time_passes(rng.choice([0.5, 5.0, -0.5]))
            day.reap()
        if rng.random() < 0.02:
            day.scripts_are_forgotten()
        day.same_state()
        admitted = day.model.outcome_counts()[Settled.ADMITTED]
    day.teardown()
    assert admitted > 30
