"""A trainer's desk without a model: job table, dispatcher, and actors played by hand."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from deltastore.coordination.backend import ActorRecord, ActorState, ActorStatus, Settlement
from deltastore.coordination.memory import MemoryCoordination
from deltastore.format.keys import RunKeys
from deltastore.format.layout import Layout
from deltastore.format.manifest import RunRecord
from deltastore.ids import new_token
from deltastore.repository.run import Run
from deltastore.storage.memory import MemoryStore
from deltastore.storage.store import PutMode
from deltastore.testing.clock import FakeClock
from workers.config import TrainerConfig
from workers.payload import JobPayload
from workers.results import Provenance, RolloutResult, pack
from workers.trainer.dispatch import Dispatcher
from workers.trainer.fleet import Fleet
from workers.trainer.jobs import JobTable, Policy, PolicyLedger
from workers.trainer.steady import Steady
from workers.trainer.tasks import Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deltastore.coordination.backend import Lease, Settled
    from deltastore.events import Event

REGION = "eu"
VOCABULARY = 50
STOP = 1


def hash_of(version: int) -> str:
    """A policy hash for a version of the test's history."""
    return hashlib.sha256(f"v{version}".encode()).hexdigest()


class LengthTask:
    """Rewards by length: no tokenizer needed."""

    stop_token = STOP

    def problem(self, step: int, index: int) -> Problem:
        """A prompt that says its place in the batch."""
        return Problem((3, 4, 5 + index), "short")

    def reward(self, problem: Problem, tokens: Sequence[int]) -> float:
        """More for less."""
        return 1.0 / len(tokens)


def memory_run() -> Run:
    """A run whose bucket is a dict; it has no versions."""
    layout = Layout.build([])
    record = RunRecord("r", new_token(), layout.digest, REGION, 0)
    return Run(MemoryStore(), RunKeys("r"), record, layout)


def honest(lease: Lease, actor_id: str) -> RolloutResult:
    """A result that the lease's job could have: every sample stops at once but the first."""
    payload = JobPayload.from_bytes(lease.payload)
    sampling = payload.sampling
    rows = [[7] * (sampling.max_new_tokens - 1) + [STOP]]
    rows += [[8, STOP] for _ in range(sampling.group_size - 1)]
    logprobs = [[-0.5] * len(row) for row in rows]
    at = lease.version, lease.policy_hash
    who = Provenance(lease.job_id, lease.token, actor_id, *at, *at, sampling.seed)
    return pack(who, rows, logprobs)


@dataclass
class Desk:
    """One trainer's dispatcher over memory backends and a clock that moves when waited on."""

    settings: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(
            groups=3, group_size=2, max_new_tokens=4, step_deadline_s=60, give_up_s=200
        )
    )
    clock: FakeClock = field(default_factory=FakeClock)
    run: Run = field(default_factory=memory_run)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coordination: Any = MemoryCoordination(self.clock)
        self.ledger = PolicyLedger(Policy(1, hash_of(1), 0))
        self.table = JobTable(
            self.ledger, max_policy_lag=self.settings.max_policy_lag, vocabulary=VOCABULARY
        )
        self.build()

    def build(self) -> None:
        """Make the dispatcher anew, on the present coordination."""
        self.dispatcher = Dispatcher(
            self.coordination,
            {REGION: self.run},
            LengthTask(),
            self.table,
            self.ledger,
            Fleet(self.coordination),
            Steady(self.clock, self.settings.outage_max_s),
            self.settings,
            seed=0,
            clock=self.clock,
            sink=self.events.append,
        )

    def publish(self, version: int, step: int) -> None:
        """Play the commit of a version after a step."""
        self.ledger.note(Policy(version, hash_of(version), step))

    def join(self, actor_id: str, version: int = 1, *, ttl_s: float = 10_000.0) -> None:
        """Register an actor whose weights are at a version."""
        self.coordination.register(ActorRecord(actor_id, REGION, "fake", 1), ttl_s)
        status = ActorStatus(ActorState.ACTIVE, version, hash_of(version))
        self.coordination.heartbeat(actor_id, status, ttl_s)

    def lease(self, actor_id: str, version: int = 1, lease_s: float = 30.0) -> Lease | None:
        """Ask for work."""
        lease: Lease | None = self.coordination.grant(
            actor_id, version, hash_of(version), lease_s, new_token()
        )
        return lease

    def settle(
        self,
        lease: Lease,
        actor_id: str,
        *,
        result: RolloutResult | None = None,
        spoil: Callable[[bytes], bytes] | None = None,
        **claim: Any,
    ) -> Settled:
        """Upload a result and settle it; `spoil` changes the bytes, `claim` what is claimed."""
        body = (result or honest(lease, actor_id)).to_bytes()
        digest = hashlib.sha256(body).hexdigest()
        key = self.run.keys.rollout(lease.version, lease.job_id, lease.token, digest)
        self.run.store.put(key, body if spoil is None else spoil(body), mode=PutMode.CREATE)
        settlement = Settlement(
            lease.job_id,
            lease.token,
            actor_id,
            lease.version,
            lease.policy_hash,
            digest,
            len(body),
            10,
            REGION,
        )
        answer: Settled = self.coordination.settle(replace(settlement, **claim))
        return answer

    def serve(self, actor_id: str, version: int = 1) -> int:
        """Do all the work there is for an actor, honestly; how many jobs."""
        done = 0
        while (lease := self.lease(actor_id, version)) is not None:
            self.settle(lease, actor_id)
            done += 1
        return done
