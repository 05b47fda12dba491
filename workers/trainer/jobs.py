"""What Redis admitted may still be forged, stale or torn: the trainer's own table decides last.

The table knows every job it issued. A claim counts once, only for a job still wanted, only at a
version and policy hash the trainer itself published, only within the allowed lag, and only if the
object under the key the trainer computes has the claimed digest and the schema the job asked for.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from deltastore.coordination.backend import MAX_GATE
from deltastore.errors import FormatError
from deltastore.ids import new_token
from workers.results import MAX_HEADER_BYTES, Provenance, RolloutResult, check_sampled

if TYPE_CHECKING:
    from deltastore.coordination.backend import Settlement
    from workers.payload import JobPayload
    from workers.trainer.tasks import Problem

MAX_CLOSED = 16_384  # remembered to tell a late or second claim from an unknown one
MAX_POLICIES = 64  # versions remembered; far above any lag


class Verdict(StrEnum):
    """The trainer's answer to a claim that Redis admitted. Append only: metrics match on it."""

    ADMITTED = "admitted"
    LATE = "late"
    WRONG_VERSION = "wrong_version"
    WRONG_HASH = "wrong_hash"
    NOT_HOLDER = "not_holder"
    """The object says another lease, job, actor or seed than the claim."""
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"
    STALE = "stale"
    """Older than the allowed policy lag by the time the loss would see it."""
    CORRUPT = "corrupt"
    """Absent, of another size or digest, or not what the job asked for."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A version the trainer published: its hash, and the optimizer steps in it."""

    version: int
    policy_hash: str
    step: int


class PolicyLedger:
    """The newest versions this trainer published, by number. Bounded, never empty.

    Args:
        first: the version it started with.
    """

    def __init__(self, first: Policy) -> None:
        self._policies: OrderedDict[int, Policy] = OrderedDict({first.version: first})

    def note(self, policy: Policy) -> None:
        """Remember a committed version."""
        self._policies[policy.version] = policy
        while len(self._policies) > MAX_POLICIES:
            self._policies.popitem(last=False)

    def get(self, version: int) -> Policy | None:
        """What was published under that number."""
        return self._policies.get(version)

    @property
    def newest(self) -> Policy:
        """The version published last."""
        return next(reversed(self._policies.values()))

    def hashes(self) -> dict[int, str]:
        """Policy hash by version."""
        return {p.version: p.policy_hash for p in self._policies.values()}

    def gate(self, step: int, max_lag: int) -> tuple[tuple[int, str], ...]:
        """The (version, hash) pairs a batch may be sampled at, newest first.

        Args:
            step: the optimizer step that learns from the batch; its weights have `step` - 1 in.
        """
        at = step - 1
        good = [p for p in self._policies.values() if 0 <= at - p.step <= max_lag]
        return tuple((p.version, p.policy_hash) for p in reversed(good))[:MAX_GATE]


@dataclass(frozen=True, slots=True)
class IssuedJob:
    """One group the trainer wants: `index` is its place in the batch of `step`."""

    job_id: str
    step: int
    index: int
    problem: Problem
    payload: JobPayload
    attempt: int = 1
    """Which try this is, from 1: leases that expired count, and results that could not be used."""

    @property
    def max_result_bytes(self) -> int:
        """No honest result of this job is larger."""
        sampling = self.payload.sampling
        cells = sampling.group_size * sampling.max_new_tokens
        return 8 + MAX_HEADER_BYTES + 8 * cells + 4 * sampling.group_size


class JobTable:
    """Every job this trainer issued and what became of it.

    Args:
        ledger: the versions this trainer published.
        max_policy_lag: how old a result may be when the loss sees it.
        vocabulary: number of token ids of the model.
    """

    def __init__(self, ledger: PolicyLedger, *, max_policy_lag: int, vocabulary: int) -> None:
        self._ledger = ledger
        self._max_lag = max_policy_lag
        self._vocabulary = vocabulary
        self._open: dict[str, IssuedJob] = {}
        self._closed: OrderedDict[str, Verdict] = OrderedDict()

    def issue(self, step: int, index: int, problem: Problem, payload: JobPayload) -> IssuedJob:
        """A new job under a random id."""
        job = IssuedJob(f"{step}-{index}-{new_token()}", step, index, problem, payload)
        self._open[job.job_id] = job
        return job

    def reissue(self, job: IssuedJob, *, failed: bool) -> IssuedJob:
        """The same work under a new id; claims on the old one are late from now on.

        Args:
            failed: whether a result was there and could not be used: that counts as an attempt.
        """
        self.close(job.job_id)
        again = self.issue(job.step, job.index, job.problem, job.payload)
        again = replace(again, attempt=job.attempt + failed)
        self._open[again.job_id] = again
        return again

    def note_attempt(self, job_id: str, attempt: int) -> None:
        """A lease on it has expired: remember it, or under a new id it would begin at 1 again."""
        job = self._open.get(job_id)
        if job is not None and attempt > job.attempt:
            self._open[job_id] = replace(job, attempt=attempt)

    def wanted(self, step: int) -> list[IssuedJob]:
        """The jobs of a step that have no usable result yet."""
        return [job for job in self._open.values() if job.step == step]

    def find(self, job_id: str) -> IssuedJob | None:
        """The job, if its result is still wanted."""
        return self._open.get(job_id)

    def close(self, job_id: str, answer: Verdict = Verdict.LATE) -> None:
        """Stop wanting a job; a later claim on it gets `answer`."""
        if self._open.pop(job_id, None) is not None:
            self._closed[job_id] = answer
            while len(self._closed) > MAX_CLOSED:
                self._closed.popitem(last=False)

    def judge(self, claim: Settlement) -> Verdict:
        """Whether a claim is worth fetching: everything that can be said without the object."""
        job = self._open.get(claim.job_id)
        if job is None:
            return self._closed.get(claim.job_id, Verdict.UNKNOWN)
        policy = self._ledger.get(claim.version)
        if policy is None:
            return Verdict.WRONG_VERSION
        if policy.policy_hash != claim.policy_hash:
            return Verdict.WRONG_HASH
        lag = self.lag(job, claim.version)
        if lag < 0:
            return Verdict.WRONG_VERSION
        if lag > self._max_lag:
            return Verdict.STALE
        if not 0 < claim.result_bytes <= job.max_result_bytes:
            return Verdict.CORRUPT
        return Verdict.ADMITTED

    def lag(self, job: IssuedJob, version: int) -> int:
        """Versions between the one that sampled and the one that will learn from it."""
        policy = self._ledger.get(version)
        return -1 if policy is None else job.step - 1 - policy.step

    def consume(self, claim: Settlement, body: bytes) -> tuple[Verdict, RolloutResult | None]:
        """Judge a claim with its object; ADMITTED marks the job consumed and returns the result."""
        verdict = self.judge(claim)
        if verdict is not Verdict.ADMITTED:
            return verdict, None
        if len(body) != claim.result_bytes:
            return Verdict.CORRUPT, None
        if hashlib.sha256(body).hexdigest() != claim.result_sha256:
            return Verdict.CORRUPT, None
        job = self._open[claim.job_id]
        try:
            result = RolloutResult.from_bytes(body, max_bytes=job.max_result_bytes)
            expected = Provenance(
                job_id=claim.job_id,
                token=claim.token,
                actor_id=claim.actor_id,
                version=claim.version,
                policy_hash=claim.policy_hash,
                end_version=claim.version,
                end_policy_hash=claim.policy_hash,
                seed=job.payload.sampling.seed,
            )
            if result.provenance.crossed:
                return Verdict.WRONG_VERSION, None
            if result.provenance != expected:
                return Verdict.NOT_HOLDER, None
            check_sampled(result, job.payload.sampling, self._vocabulary)
        except FormatError:
            return Verdict.CORRUPT, None  # counted by the caller; the job is offered again
        self.close(job.job_id, Verdict.DUPLICATE)
        return Verdict.ADMITTED, result
