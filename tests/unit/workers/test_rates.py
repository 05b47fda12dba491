"""Speeds outlive Redis and trainers; leases are as long as the actor's own speed says."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.coordination.backend import ActorRecord, ActorState, ActorStatus, JobOffer
from deltastore.coordination.memory import MemoryCoordination
from deltastore.errors import StorageError
from deltastore.format.canonical import canonical_json
from deltastore.format.keys import Hint
from deltastore.scheduling.pace import ALPHA
from deltastore.storage.memory import MemoryStore
from deltastore.storage.store import PutMode
from deltastore.testing.clock import FakeClock
from deltastore.testing.faults import FaultyStore, Op, fail_at
from deltastore.testing.fleet import claim_of
from tests.unit.workers.kit import hash_of, memory_run
from workers.actor.lease_length import LeaseLength
from workers.actor.rollout import HeldLease
from workers.config import ActorConfig
from workers.payload import JobPayload
from workers.sampling import Sampling
from workers.trainer.fleet import TRY_AGAIN_SPLITS, Fleet
from workers.trainer.rates import FORMAT, MAX_AGE_S, RateSnapshot

if TYPE_CHECKING:
    from deltastore.repository.run import Run
    from deltastore.scheduling.split import Deal

TTL_S = 120.0


@dataclass
class Yard:
    """Actors of given speeds, worked by hand on a clock that only the test moves."""

    clock: FakeClock = field(default_factory=FakeClock)
    run: Run = field(default_factory=memory_run)
    jobs: int = 0

    def __post_init__(self) -> None:
        self.redis_comes_back_empty()
        self.new_trainer()

    def redis_comes_back_empty(self) -> None:
        """Lose everything that coordination knows."""
        self.coordination: Any = MemoryCoordination(self.clock)
        if hasattr(self, "fleet"):
            self.fleet._coordination = self.coordination  # the same trainer, a new server

    def new_trainer(self) -> None:
        """Lose everything that the trainer knows."""
        self.fleet = Fleet(self.coordination, RateSnapshot(self.run, self.clock))

    def join(self, *actor_ids: str) -> None:
        """Register actors at version 1."""
        for actor_id in actor_ids:
            self.coordination.register(ActorRecord(actor_id, "eu", "fake", 1), TTL_S)
        self.beat(*actor_ids)

    def beat(self, *actor_ids: str) -> None:
        """Let actors report."""
        for actor_id in actor_ids:
            status = ActorStatus(ActorState.ACTIVE, 1, hash_of(1))
            assert self.coordination.heartbeat(actor_id, status, TTL_S)

    def work(self, actor_id: str, tokens_per_s: float, leases: int = 8) -> None:
        """Do leases of 100 tokens at a speed, with a pause before each."""
        for _ in range(leases):
            self.clock.advance_s(1.0)
            self.jobs += 1
            offer = JobOffer(f"j{self.jobs}", b"", ((1, hash_of(1)),), 100, actor_id)
            self.coordination.offer([offer])
            lease = self.coordination.grant(actor_id, 1, hash_of(1), 1000.0)
            assert lease is not None
            self.clock.advance_s(100 / tokens_per_s)
            self.coordination.settle(claim_of(lease, actor_id))

    def split(self, groups: int = 40, dealt_fraction: float = 1.0) -> Deal:
        """Deal a batch."""
        return self.fleet.split(
            groups,
            head_version=1,
            hashes={1: hash_of(1)},
            dealt_fraction=dealt_fraction,
            tokens_per_group=100.0,
        )


@pytest.fixture
def yard() -> Yard:
    """Two actors, one three times as fast, measured and split once."""
    yard = Yard()
    yard.join("fast", "slow")
    yard.work("fast", 30.0)
    yard.work("slow", 10.0)
    yard.beat("fast", "slow")
    assert yard.split().dealt == {"fast": 30, "slow": 10}
    return yard


def test_a_restarted_trainer_with_an_empty_redis_knows_the_speeds(yard: Yard) -> None:
    """Averages are restored from hints/throughput: the first split is the measured one."""
    yard.redis_comes_back_empty()
    yard.new_trainer()
    yard.join("fast", "slow")
    assert yard.split().dealt == {"fast": 30, "slow": 10}


def test_without_a_snapshot_the_split_starts_even(yard: Yard) -> None:
    """What the test above shows is the snapshot's doing."""
    yard.run.store.delete([yard.run.keys.hint(Hint.THROUGHPUT)])
    yard.redis_comes_back_empty()
    yard.new_trainer()
    yard.join("fast", "slow")
    assert yard.split().dealt == {"fast": 20, "slow": 20}


def test_a_trainer_remembers_while_redis_forgets(yard: Yard) -> None:
    """Redis restarting empty costs no speed: not while nobody is registered, nor after."""
    yard.redis_comes_back_empty()
    assert yard.split().open_pool == 40
    yard.join("fast", "slow")
    assert yard.split().dealt == {"fast": 30, "slow": 10}


def test_who_was_away_earns_its_share_back(yard: Yard) -> None:
    """An actor that left, was lost, or only blinked gets ALPHA of its share until it keeps work."""
    yard.coordination.leave("fast")
    assert yard.split().dealt == {"slow": 40}
    yard.join("fast")
    back = yard.split().dealt
    assert back["fast"] == pytest.approx(40 * 3 * ALPHA / (3 * ALPHA + 1), abs=1)
    yard.work("fast", 30.0)
    yard.beat("fast", "slow")
    assert yard.split().dealt == {"fast": 30, "slow": 10}
    yard.clock.advance_s(TTL_S + 1)
    yard.beat("slow")
    assert yard.split().dealt == {"slow": 40}
    yard.beat("fast")
    assert yard.split().dealt["fast"] == pytest.approx(back["fast"], abs=2)
    yard.work("fast", 30.0)
    yard.join("fast")  # restarted between two splits
    yard.work("fast", 30.0, leases=1)
    yard.beat("fast", "slow")
    assert yard.split().dealt["fast"] == pytest.approx(back["fast"], abs=2)


def test_who_was_left_out_is_tried_again(yard: Yard) -> None:
    """An actor too slow for a single group gets one every 40 splits, and its share once cured."""
    yard.work("slow", 1.0, leases=1)
    yard.beat("fast", "slow")
    dealt = [yard.split(10, 0.5) for _ in range(TRY_AGAIN_SPLITS + 1)]
    tries = [i for i, deal in enumerate(dealt) if deal.dealt["slow"]]
    assert tries == [TRY_AGAIN_SPLITS - 1]
    assert all(sum(deal.dealt.values()) + deal.open_pool == 10 for deal in dealt)
    yard.work("slow", 30.0, leases=1)
    yard.beat("fast", "slow")
    assert yard.split(10, 1.0).dealt == {"fast": 5, "slow": 5}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff" * 100,
        b"[]",
        canonical_json({"format": "other", "written_ms": 1, "rates_milli": {}}),
        canonical_json({"format": FORMAT, "written_ms": "now", "rates_milli": {"fast": 1}}),
        canonical_json({"format": FORMAT, "written_ms": 1_000_000_000, "rates_milli": [1]}),
        canonical_json({"format": FORMAT, "written_ms": 1_000_000_000, "rates_milli": {"/": 1}}),
        canonical_json({"format": FORMAT, "written_ms": 1_000_000_000, "rates_milli": {"a": "1"}}),
        canonical_json({"format": FORMAT, "written_ms": 1_000_000_000, "rates_milli": {"a": 0}}),
        canonical_json({"format": FORMAT, "written_ms": 1_000_000_000, "rates_milli": {"a": -5}}),
        b" " * (2 << 20),
    ],
)
def test_garbage_in_the_snapshot_decides_nothing(body: bytes) -> None:
    """CASE L12: a snapshot that is none, or of impossible speeds, is as good as absent."""
    run = memory_run()
    run.store.put(run.keys.hint(Hint.THROUGHPUT), body, mode=PutMode.OVERWRITE)
    snapshot = RateSnapshot(run, FakeClock())
    assert [snapshot.recall(actor) for actor in ("a", "fast")] == [None, None]


@pytest.mark.parametrize("age_s", [MAX_AGE_S + 60, -MAX_AGE_S - 60])
def test_an_old_snapshot_is_not_used(age_s: float) -> None:
    """CASE L12: speeds of another day, or of a clock that was wrong, are not planned with."""
    run, clock = memory_run(), FakeClock()
    RateSnapshot(run, clock).keep({"a": 5.0})
    assert RateSnapshot(run, clock).recall("a") == 5.0
    clock.advance_s(age_s)
    assert RateSnapshot(run, clock).recall("a") is None


def test_a_store_that_is_away_costs_only_the_snapshot() -> None:
    """The split goes on when neither reading nor writing the snapshot works."""
    store = FaultyStore(MemoryStore(), [fail_at(Op.GET, 1, times=99), fail_at(Op.PUT, 1, times=99)])
    run = replace(memory_run(), store=store)
    snapshot = RateSnapshot(run, FakeClock())
    assert snapshot.recall("a") is None
    snapshot.keep({"a": 5.0})
    with pytest.raises(StorageError):
        store.get("anything")


# leases


def _held(clock: FakeClock, samples: int, *, counts: bool = True) -> HeldLease:
    coordination = MemoryCoordination(clock)
    coordination.register(ActorRecord("a", "eu", "fake", 1), TTL_S)
    payload = JobPayload(1, (1, 2), Sampling(samples, 100, 1))
    if counts:
        coordination.offer([JobOffer("first", payload.to_bytes(), ((1, hash_of(1)),), 1)])
        coordination.grant("a", 1, hash_of(1), 30.0)
    coordination.offer([JobOffer("j", payload.to_bytes(), ((1, hash_of(1)),), 1)])
    lease = coordination.grant("a", 1, hash_of(1), 30.0)
    assert lease is not None
    return HeldLease(lease, payload, clock.monotonic_s(), 30.0)


def test_a_lease_is_as_long_as_the_actor_is_slow() -> None:
    """Unknown: the longest. Known: three times what its next batch can take, within the bounds."""
    clock = FakeClock()
    length = LeaseLength(ActorConfig("a", "eu", lease_s=600.0, max_lease_s=900.0, min_lease_s=5.0))
    assert length.ask_s() == 600.0
    held = [_held(clock, 2), _held(clock, 2)]  # up to 400 tokens
    length.note([_held(clock, 4, counts=False)], 400, 1.0, 1.0)
    assert length.ask_s() == 600.0  # the first lease after a join is no measurement
    length.note(held, 400, 40.0, 50.0)
    assert length.ask_s() == pytest.approx(120.0)
    for i in range(30):
        length.note(held, 400, 0.4, 60.0 + i)
    assert length.ask_s() == 5.0
    for i in range(60):
        length.note(held, 0, 60.0, 100.0 + 60 * i)
    assert length.ask_s() == 600.0
