"""A result without its lease is noise: work is taken, renewed, delivered and settled in one place.

Order of one job, and what a crash leaves after each step:
  1. grant        a lease that expires; the job goes back
  2. generate     the same; renewed only while tokens come
  3. put          an object nobody refers to, under a key of this lease alone; lifecycle removes it
  4. settle       THE FIRST GATE: admitted, or one of six other answers
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from deltastore.coordination.backend import Settled, Settlement
from deltastore.coordination.outage import is_outage
from deltastore.errors import CoordinationError, FormatError, StorageError
from deltastore.events import ResultSettled
from deltastore.ids import new_token
from deltastore.pipeline.engine_control import ServedVersion
from deltastore.storage.store import PutMode
from workers.actor.engine import GenerationStopped, Prompt
from workers.actor.lease_length import LeaseLength
from workers.actor.safe_point import SafePoint
from workers.payload import JobPayload
from workers.results import Provenance, RolloutResult, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deltastore.clock import Clock
    from deltastore.coordination.backend import Coordination, Lease
    from deltastore.events import EventSink
    from deltastore.repository.points import ActiveVersion
    from deltastore.repository.run import Run
    from workers.actor.engine import Completions, Engine
    from workers.config import ActorConfig

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

RENEWALS_PER_LEASE = 3
RETRY_S = 0.5  # between two tries to reach Redis while a lease runs
HAND_BACK_S = 2.0  # tried for so long in all: who is told to leave has no more, and leases expire
RATE_KEPT = 0.8  # of the old rate in the moving average an actor reports of itself


@dataclass(slots=True)
class HeldLease:
    """A lease, what it asks for, and until when it runs by this machine's clock."""

    lease: Lease
    payload: JobPayload
    taken_s: float
    asked_s: float
    """How long it was asked for, and will be again."""
    deadline_s: float = field(init=False)
    """Monotonic, moved by renewals; counted from before each question, so never later than Redis'.

    Only a step that closes meanwhile ends a lease earlier; its result is answered as late.
    """

    def __post_init__(self) -> None:
        self.deadline_s = self.taken_s + self.lease.lease_s

    def renewed(self, asked_at_s: float, max_lease_s: float) -> None:
        """Redis said yes to a renewal that was asked for at `asked_at_s`."""
        limit_s = self.taken_s + max_lease_s * 2 ** (self.lease.attempt - 1)
        renewed_s = min(asked_at_s + self.lease.lease_s, limit_s)
        self.deadline_s = max(self.deadline_s, renewed_s)


class RolloutWorker:
    """Takes leases at one version, does them, and settles them. One thread uses it.

    Args:
        run: in the actor's own region: results go there.
        may_go_on: asked while generating; False hands the work back.
        safe_point: shared with whoever writes the weights; None: nobody does meanwhile.
    """

    def __init__(
        self,
        run: Run,
        coordination: Coordination,
        engine: Engine,
        settings: ActorConfig,
        *,
        may_go_on: Callable[[], bool],
        clock: Clock,
        sink: EventSink,
        safe_point: SafePoint | None = None,
    ) -> None:
        self._run = run
        self._coordination = coordination
        self._engine = engine
        self._settings = settings
        self._may_go_on = may_go_on
        self._safe_point = safe_point or SafePoint(clock)
        self._clock = clock
        self._sink = sink
        self._length = LeaseLength(settings)
        self.tokens_per_s = 0.0
        self.in_doubt = False
        """Whether the engine sampled at other weights than a lease's; cleared by the loop."""

    def take(self, active: ActiveVersion | ServedVersion) -> list[HeldLease]:
        """Lease up to `leases_at_once` jobs at `active`; CoordinationError when Redis is away."""
        held: list[HeldLease] = []
        for _ in range(self._settings.leases_at_once):
            taken_s, asked_s = self._clock.monotonic_s(), self._length.ask_s()
            lease = self._grant(active, asked_s)
            if lease is None:
                break
            try:
                payload = JobPayload.from_bytes(lease.payload)
            except FormatError as err:
                # Handed back it would come again at once; expired it is parked at the third time.
                _LOG.warning("job %s cannot be read: %s", lease.job_id, err)
                continue
            held.append(HeldLease(lease, payload, taken_s, asked_s))
        return held

    def work(self, held: Sequence[HeldLease]) -> list[Settled]:
        """Generate, deliver and settle; jobs that could not be delivered are handed back."""
        started_s = self._clock.monotonic_s()
        prompts = [Prompt(item.payload.prompt, item.payload.sampling) for item in held]
        try:
            with self._safe_point.forward():
                made = self._engine.generate(prompts, _Renewal(self, held).progress)
        except GenerationStopped:
            now_s = self._clock.monotonic_s()
            if all(now_s > item.deadline_s for item in held):  # too slow, not told to stop
                self._length.note(held, 0, now_s - started_s, now_s)
            self._hand_back(held)
            return []
        answers = []
        for item, completions in zip(held, made, strict=True):
            if not self._of_its_version(item, completions):
                continue
            answer = self._deliver(item, completions)
            if answer is not None:
                answers.append(answer)
        tokens = sum(len(row) for completions in made for row in completions.tokens)
        ended_s = self._clock.monotonic_s()
        elapsed_s = ended_s - started_s
        if elapsed_s > 0:
            self._length.note(held, tokens, elapsed_s, ended_s)
            rate = tokens / elapsed_s
            old = self.tokens_per_s or rate
            self.tokens_per_s = RATE_KEPT * old + (1 - RATE_KEPT) * rate
        return answers

    def renew(self, item: HeldLease, tokens_done: int) -> None:
        """Ask for more time on progress; the old deadline stands unless Redis says yes."""
        asked_at_s = self._clock.monotonic_s()
        most_s = self._settings.max_lease_s
        job_id, token = item.lease.job_id, item.lease.token
        if self._coordination.renew(job_id, token, tokens_done, item.asked_s, most_s):
            item.renewed(asked_at_s, most_s)

    def _grant(self, active: ActiveVersion | ServedVersion, asked_s: float) -> Lease | None:
        token = new_token()

        def ask() -> Lease | None:
            return self._coordination.grant(
                self._settings.actor_id,
                active.version,
                active.policy_hash,
                asked_s,
                token,
            )

        try:
            return ask()
        except CoordinationError as err:
            if not is_outage(err):
                raise
            return ask()  # the reply may have been lost: the same token returns the same lease

    def _of_its_version(self, item: HeldLease, completions: Completions) -> bool:
        """Whether every token was sampled at the lease's version; else the job is handed back."""
        lease = item.lease
        bound = ServedVersion(lease.version, lease.policy_hash)
        odd = [m for m in (completions.begin, completions.end) if m is not None and m != bound]
        if not odd and not completions.unversioned:
            return True
        _LOG.error(
            "job %s is bound to version %d, the engine sampled %s: handed back",
            lease.job_id,
            lease.version,
            completions.unversioned or f"from {completions.begin} to {completions.end}",
        )
        self.in_doubt = True
        tokens = sum(len(row) for row in completions.tokens)
        elapsed_s = self._clock.monotonic_s() - item.taken_s
        wrong = Settled.WRONG_VERSION.value
        self._sink(ResultSettled(lease.job_id, self._settings.actor_id, wrong, tokens, elapsed_s))
        self._hand_back([item])
        return False

    def _deliver(self, item: HeldLease, completions: Completions) -> Settled | None:
        lease = item.lease
        result = self._pack(item, completions)
        body = result.to_bytes()
        digest = hashlib.sha256(body).hexdigest()
        key = self._run.keys.rollout(lease.version, lease.job_id, lease.token, digest)
        claim = Settlement(
            job_id=lease.job_id,
            token=lease.token,
            actor_id=self._settings.actor_id,
            version=lease.version,
            policy_hash=lease.policy_hash,
            result_sha256=digest,
            result_bytes=len(body),
            tokens=result.token_count,
            region=self._settings.region,
        )
        try:
            self._run.store.put(key, body, mode=PutMode.CREATE)
        except StorageError as err:
            _LOG.warning("result of job %s cannot be stored: %s", lease.job_id, err)
            self._hand_back([item])
            return None
        answer = self._until(item.deadline_s, lambda: self._coordination.settle(claim))
        if answer is not None and answer is not Settled.ADMITTED:
            elapsed_s = self._clock.monotonic_s() - item.taken_s
            event = ResultSettled(
                lease.job_id, self._settings.actor_id, answer.value, claim.tokens, elapsed_s
            )
            self._sink(event)
        return answer

    def _pack(self, item: HeldLease, completions: Completions) -> RolloutResult:
        provenance = Provenance(
            job_id=item.lease.job_id,
            token=item.lease.token,
            actor_id=self._settings.actor_id,
            version=item.lease.version,
            policy_hash=item.lease.policy_hash,
            end_version=item.lease.version,
            end_policy_hash=item.lease.policy_hash,
            seed=item.payload.sampling.seed,
        )
        return pack(provenance, completions.tokens, completions.logprobs)

    def _hand_back(self, held: Sequence[HeldLease]) -> None:
        give_up_s = self._clock.monotonic_s() + HAND_BACK_S
        for item in held:
            call = partial(self._coordination.hand_back, item.lease.job_id, item.lease.token)
            self._until(min(item.deadline_s, give_up_s), call)

    def _until(self, deadline_s: float, call: Callable[[], _T]) -> _T | None:
        """Call until there is an answer or the time is over; None then."""
        while True:
            try:
                return call()
            except CoordinationError as err:
                if not is_outage(err):
                    raise
                if self._clock.monotonic_s() + RETRY_S > deadline_s:
                    _LOG.warning("Redis stayed away, the lease will end by itself: %s", err)
                    return None
                self._clock.sleep_s(RETRY_S)

    def go_on(self) -> bool:
        """Whether the actor still wants this work done."""
        return self._may_go_on()

    def now_s(self) -> float:
        """This machine's monotonic time."""
        return self._clock.monotonic_s()


class _Renewal:
    """Renews a batch's leases while tokens come, and stops it when all of them are lost."""

    def __init__(self, worker: RolloutWorker, held: Sequence[HeldLease]) -> None:
        self._worker = worker
        self._held = held
        lease_s = min((item.lease.lease_s for item in held), default=0.0)
        self._period_s = lease_s / RENEWALS_PER_LEASE
        self._next_s = worker.now_s() + self._period_s

    def progress(self, tokens: int) -> bool:
        now_s = self._worker.now_s()
        if now_s >= self._next_s:
            self._next_s = now_s + self._period_s
            self._renew(tokens)
        runs = any(now_s <= item.deadline_s for item in self._held)
        return self._worker.go_on() and runs

    def _renew(self, tokens: int) -> None:
        for item in self._held:
            try:
                self._worker.renew(item, tokens)
            except CoordinationError as err:
                if not is_outage(err):
                    raise
                _LOG.warning("lease of job %s not renewed: %s", item.lease.job_id, err)
