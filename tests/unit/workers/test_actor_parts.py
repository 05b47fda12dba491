"""An actor's parts under faults: presence, leases, and weights that must be proved."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.coordination.backend import (
    ActorRecord,
    ActorState,
    ActorStatus,
    JobOffer,
    Settled,
)
from deltastore.coordination.memory import MemoryCoordination
from deltastore.errors import CoordinationError, FormatError, Kind, StorageError
from deltastore.events import ResultSettled
from deltastore.format.fingerprint import ZERO
from deltastore.pipeline.engine_control import ServedVersion
from deltastore.repository.points import ActiveVersion
from deltastore.storage.wrapper import StoreWrapper
from deltastore.testing.clock import FakeClock
from tests.unit.workers.kit import hash_of, memory_run
from workers.actor.engine import Completions, GenerationStopped, parse_label
from workers.actor.presence import Presence
from workers.actor.rollout import RolloutWorker
from workers.config import ActorConfig
from workers.head_hints import REPEATED_HINT_WAIT_S, HeadHints
from workers.payload import JobPayload
from workers.results import RolloutResult
from workers.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.actor.engine import Progress, Prompt

ACTIVE = ActiveVersion(1, hash_of(1), ZERO, 1)
SETTINGS = ActorConfig("a", "eu", lease_s=30.0, max_lease_s=120.0, leases_at_once=2)
AWAY = CoordinationError("connection refused", kind=Kind.REDIS_UNAVAILABLE)


class StubEngine:
    """Makes two-token samples; `during` happens between its decoding steps."""

    def __init__(self, during: Callable[[], None] = lambda: None) -> None:
        self._during = during

    def generate(self, prompts: Sequence[Prompt], progress: Progress) -> list[Completions]:
        """One sample of two tokens for every one that is asked for."""
        made = [prompt.sampling.group_size for prompt in prompts]
        for step in (1, 2):
            self._during()
            if not progress(step * sum(made)):
                raise GenerationStopped
        return [Completions([[7, 1]] * n, [[-1.0, -1.0]] * n, [True] * n) for n in made]


class Flaky:
    """A coordination whose named call is away for the next few times, before or after it acts."""

    def __init__(self, inner: Any, name: str, times: int, *, after: bool = False) -> None:
        self._inner = inner
        self._name = name
        self.left = times
        self._after = after

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name != self._name:
            return method

        def call(*args: Any, **keywords: Any) -> Any:
            if self.left == 0:
                return method(*args, **keywords)
            self.left -= 1
            if self._after:
                method(*args, **keywords)
            raise AWAY

        return call


class Bench:
    """A rollout worker with jobs to take, on memory backends."""

    def __init__(self, *, engine: StubEngine | None = None, wrap: Any = None) -> None:
        self.clock = FakeClock()
        self.memory = MemoryCoordination(self.clock)
        self.coordination: Any = self.memory if wrap is None else wrap(self.memory)
        self.run = memory_run()
        self.events: list[Any] = []
        self.go_on = True
        self.engine = engine or StubEngine()
        status = ActorStatus(ActorState.ACTIVE, 1, hash_of(1))
        self.memory.register(ActorRecord("a", "eu", "stub", 1), 10_000.0)
        self.memory.heartbeat("a", status, 10_000.0)

    def offer(self, *names: str, payload: bytes | None = None) -> None:
        """Put jobs up for version 1."""
        job = JobPayload(1, (4, 5), Sampling(2, 4, 1, seed=3))
        gate = ((1, hash_of(1)),)
        text = job.to_bytes() if payload is None else payload
        self.memory.offer([JobOffer(name, text, gate, 8) for name in names])

    def worker(self) -> RolloutWorker:
        """The worker under test."""
        return RolloutWorker(
            self.run,
            self.coordination,
            self.engine,
            SETTINGS,
            may_go_on=lambda: self.go_on,
            clock=self.clock,
            sink=self.events.append,
        )


def test_leases_are_taken_done_and_settled() -> None:
    """Two jobs become two objects under their leases' keys, and both are admitted."""
    bench = Bench()
    bench.offer("j1", "j2", "j3")
    worker = bench.worker()
    held = worker.take(ACTIVE)
    assert [item.lease.job_id for item in held] == ["j1", "j2"]
    assert worker.work(held) == [Settled.ADMITTED, Settled.ADMITTED]
    for admitted in bench.memory.take_settled(9, 0.1):
        claim = admitted.settlement
        key = bench.run.keys.rollout(1, claim.job_id, claim.token, claim.result_sha256)
        result = RolloutResult.from_bytes(bench.run.store.get(key))
        assert result.provenance.job_id == claim.job_id
        assert result.tokens.tolist() == [[7, 1], [7, 1]]
    assert bench.events == []


def test_a_lost_reply_to_a_grant_is_the_same_lease() -> None:
    """Asking again with the same token returns the lease that was granted (CASE L5)."""
    bench = Bench(wrap=lambda memory: Flaky(memory, "grant", 1, after=True))
    bench.offer("j1", "j2")
    held = bench.worker().take(ACTIVE)
    assert [item.lease.job_id for item in held] == ["j1", "j2"]
    assert bench.memory.job_counts().leased == 2


@pytest.mark.parametrize(
    ("begin", "end"), [(1, 2), (2, 2), (2, 1)], ids=["crossed", "another", "backwards"]
)
def test_tokens_of_other_weights_than_the_leases_are_handed_back(begin: int, end: int) -> None:
    """Samples whose engine says other weights than the lease's are never delivered (CASE R20)."""

    class Marking(StubEngine):
        def generate(self, prompts: Sequence[Prompt], progress: Progress) -> list[Completions]:
            marks = ServedVersion(begin, hash_of(begin)), ServedVersion(end, hash_of(end))
            return [
                replace(c, begin=marks[0], end=marks[1])
                for c in super().generate(prompts, progress)
            ]

    bench = Bench(engine=Marking())
    bench.offer("j1")
    worker = bench.worker()
    assert worker.work(worker.take(ACTIVE)) == []
    assert worker.in_doubt
    assert list(bench.run.store.list("")) == []
    counts = bench.memory.job_counts()
    assert (counts.open, counts.leased) == (1, 0)
    (event,) = bench.events
    assert (event.job, event.outcome) == ("j1", "wrong_version")


def test_tokens_of_no_version_are_handed_back() -> None:
    """An engine whose label names no version is in doubt; the actor goes on (CASE R20)."""

    class Unlabelled(StubEngine):
        def generate(self, prompts: Sequence[Prompt], progress: Progress) -> list[Completions]:
            made = super().generate(prompts, progress)
            return [replace(one, unversioned="labelled 'default'") for one in made]

    bench = Bench(engine=Unlabelled())
    bench.offer("j1")
    worker = bench.worker()
    assert worker.work(worker.take(ACTIVE)) == []
    assert worker.in_doubt
    assert list(bench.run.store.list("")) == []
    counts = bench.memory.job_counts()
    assert (counts.open, counts.leased) == (1, 0)


def test_marks_that_agree_with_the_lease_are_delivered() -> None:
    """An engine that names the lease's own weights is believed, and the result says both ends."""

    class Marking(StubEngine):
        def generate(self, prompts: Sequence[Prompt], progress: Progress) -> list[Completions]:
            mark = parse_label(f"1:{hash_of(1)}")
            return [replace(c, begin=mark, end=mark) for c in super().generate(prompts, progress)]

    bench = Bench(engine=Marking())
    bench.offer("j1")
    worker = bench.worker()
    assert worker.work(worker.take(ACTIVE)) == [Settled.ADMITTED]
    assert not worker.in_doubt
    (key,) = [found.key for found in bench.run.store.list("")]
    who = RolloutResult.from_bytes(bench.run.store.get(key)).provenance
    assert (who.end_version, who.end_policy_hash) == (1, hash_of(1))


@pytest.mark.parametrize(
    "text", ["", "default", "7", f"x:{hash_of(1)}", "7:abc", f"-1:{hash_of(1)}"]
)
def test_a_label_of_no_version_is_refused(text: str) -> None:
    """What an engine calls its weights is a version and a policy hash, or an error."""
    with pytest.raises(FormatError, match="of no version"):
        parse_label(text)


def test_redis_away_while_settling_is_waited_for() -> None:
    """A settlement is tried until the lease ends: an outage shorter than that costs nothing."""
    bench = Bench(wrap=lambda memory: Flaky(memory, "settle", 5))
    bench.offer("j1")
    worker = bench.worker()
    assert worker.work(worker.take(ACTIVE)) == [Settled.ADMITTED]
    away = Bench(wrap=lambda memory: Flaky(memory, "settle", 10_000))
    away.offer("j1")
    worker = away.worker()
    assert worker.work(worker.take(ACTIVE)) == []
    assert 29 <= sum(away.clock.slept_s) <= 30


def test_a_result_that_is_late_is_reported_as_late() -> None:
    """A lease that ran out while generating is settled as late, and the event says so."""
    bench = Bench()
    bench.offer("j1")
    worker = bench.worker()
    held = worker.take(ACTIVE)
    bench.memory.withdraw(["j1"])
    assert worker.work(held) == [Settled.LATE]
    (event,) = bench.events
    assert isinstance(event, ResultSettled)
    assert (event.job, event.outcome) == ("j1", "late")


def test_generation_that_outlives_its_lease_is_stopped() -> None:
    """When no renewal helps, decoding ends at the lease's end instead of wasting the machine."""
    bench = Bench()
    bench.engine = StubEngine(during=lambda: bench.clock.advance_s(31))
    bench.offer("j1")
    worker = bench.worker()
    assert worker.work(worker.take(ACTIVE)) == []
    assert list(bench.run.store.list("")) == []


def test_leases_are_renewed_while_tokens_come() -> None:
    """A generation of 50 s holds a 30 s lease, because every decoding step made tokens."""
    bench = Bench()
    bench.engine = StubEngine(during=lambda: bench.clock.advance_s(25))
    bench.offer("j1")
    worker = bench.worker()
    assert worker.work(worker.take(ACTIVE)) == [Settled.ADMITTED]


def test_draining_hands_the_work_back() -> None:
    """An actor told to stop gives its leases back at once: somebody else does the job."""
    bench = Bench()
    bench.offer("j1")
    worker = bench.worker()
    held = worker.take(ACTIVE)
    bench.go_on = False
    assert worker.work(held) == []
    counts = bench.memory.job_counts()
    assert (counts.open, counts.leased) == (1, 0)


def test_a_store_that_is_down_hands_the_work_back() -> None:
    """A result that cannot be stored is nobody's result: the job goes back to the pool."""

    class Down(StoreWrapper):
        def put(self, *args: Any, **keywords: Any) -> Any:
            raise StorageError("no route", kind=Kind.UNAVAILABLE)

    bench = Bench()
    bench.run = replace(bench.run, store=Down(bench.run.store))
    bench.offer("j1")
    worker = bench.worker()
    assert worker.work(worker.take(ACTIVE)) == []
    assert bench.memory.job_counts().open == 1


def test_a_payload_nobody_can_read_is_parked_not_looped() -> None:
    """An unreadable job is left to expire; after its attempts it is parked, the others are done."""
    bench = Bench()
    bench.offer("bad", payload=b"{}")
    bench.offer("good")
    worker = bench.worker()
    held = worker.take(ACTIVE)
    assert [item.lease.job_id for item in held] == ["good"]
    assert worker.work(held) == [Settled.ADMITTED]
    for _ in range(3):
        bench.clock.advance_s(1000)
        bench.memory.reap()
        assert worker.take(ACTIVE) == []
    assert bench.memory.job_counts().parked == 1


def presence(coordination: Any, clock: FakeClock) -> Presence:
    """An actor's heartbeat that says it is active at version 1."""
    return Presence(
        coordination,
        ActorRecord("a", "eu", "stub", 1),
        ttl_s=9.0,
        status=lambda: ActorStatus(ActorState.ACTIVE, 1, hash_of(1)),
        clock=clock,
    )


def test_an_actor_redis_forgot_registers_again() -> None:
    """After a restart of Redis the next heartbeat makes the actor a member again."""
    clock = FakeClock()
    coordination = MemoryCoordination(clock)
    here = presence(coordination, clock)
    assert coordination.members() == []
    assert here.beat()
    (member,) = coordination.members()
    assert (member.actor_id, member.state) == ("a", ActorState.ACTIVE)


def test_an_actor_goes_on_while_redis_is_away() -> None:
    """A heartbeat into an outage says False and raises nothing; the one after it works."""
    clock = FakeClock()
    coordination = MemoryCoordination(clock)
    here = presence(Flaky(coordination, "heartbeat", 1), clock)
    assert here.beat() is False
    assert here.beat() is True


def test_a_refusal_of_redis_is_not_an_outage() -> None:
    """An evicting Redis ends the actor with the reason (CASE L2)."""

    class Evicting(MemoryCoordination):
        def heartbeat(self, *args: Any, **keywords: Any) -> bool:
            raise CoordinationError("maxmemory-policy is allkeys-lru", kind=Kind.REDIS_POLICY)

    clock = FakeClock()
    with pytest.raises(CoordinationError, match="allkeys-lru"):
        presence(Evicting(clock), clock).beat()


def test_a_hint_is_advice_and_never_an_error() -> None:
    """Redis away means no hint; one that is not there yet in this region comes only slowly."""
    clock = FakeClock()

    class Hinting:
        def wait_head_hint(self, after_version: int, timeout_s: float) -> Any:
            if after_version > 5:
                raise AWAY
            return type("Hint", (), {"version": 5})()

    hints = HeadHints(Hinting(), clock)  # type: ignore[arg-type]
    assert hints.wait(3, 0.5) == 5
    assert clock.slept_s == []
    assert hints.wait(3, 0.5) == 5
    assert clock.slept_s == [REPEATED_HINT_WAIT_S]
    assert hints.wait(6, 0.25) is None
    assert clock.slept_s[1:] == [0.25]
