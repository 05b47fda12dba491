"""The scripts need an oracle that a person can read: the same job table, as a dict.

Pure of locks and clocks; `MemoryCoordination` adds both. Every method takes the time in whole
milliseconds and answers exactly as the script of the same name does.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from deltastore.coordination.job import LIVE, Grant, Job, JobState
from deltastore.coordination.limits import (
    LISTED_MAX,
    MAX_ATTEMPTS,
    MAX_ENDED,
    MAX_JOBS,
    MAX_LEASES_PER_ACTOR,
    MAX_SAMPLES,
    SCAN_MAX,
)
from deltastore.coordination.records import (
    AdmittedResult,
    JobCounts,
    Lease,
    Pull,
    ReapedJob,
    ReapOutcome,
    RunningLease,
    Settled,
    ThroughputSample,
)
from deltastore.coordination.settle import decide
from deltastore.coordination.wire import to_ms, to_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from deltastore.coordination.records import JobOffer, Settlement


class JobTable:
    """Jobs, leases, results and samples of one run."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._sequence = 0
        self._ended = 0
        self._results: dict[str, AdmittedResult] = {}
        self._samples: dict[str, list[ThroughputSample]] = {}
        self._outcomes = dict.fromkeys(Settled, 0)
        self._pulls: dict[str, Pull] = {}
        self._pulls_until_ms = 0

    # offering

    def offer(self, jobs: Sequence[JobOffer]) -> int:
        """Put jobs up; how many were new, or -1 when the run would exceed its limit."""
        live = sum(job.state in LIVE for job in self._jobs.values())
        if live + len(self._results) + len(jobs) > MAX_JOBS:
            return -1
        added = sum(self._offer_one(job) for job in jobs)
        self._forget_ended()
        return added

    def _offer_one(self, offer: JobOffer) -> bool:
        old = self._jobs.get(offer.job_id)
        if old is not None:
            ended_well = old.state in {JobState.SETTLED, JobState.PARKED}
            if not ended_well or offer.attempt <= old.attempt:
                return False
            self._results.pop(offer.job_id, None)
        self._sequence += 1
        self._jobs[offer.job_id] = Job(
            offer.job_id,
            offer.payload,
            frozenset(offer.gate),
            self._sequence,
            offer.attempt,
            None if offer.closes_at_s is None else to_ms(offer.closes_at_s),
            JobState.OPEN if offer.assigned_to is None else JobState.DEALT,
            offer.assigned_to,
            expired_tokens=frozenset() if old is None else old.expired_tokens,
        )
        return True

    def _forget_ended(self) -> None:
        for state in (JobState.SETTLED, JobState.PARKED, JobState.CLOSED):
            ended = [job for job in self._jobs.values() if job.state is state]
            ended.sort(key=lambda job: job.ended_order)
            for job in ended[: max(0, len(ended) - MAX_ENDED)]:
                del self._jobs[job.job_id]

    def withdraw(self, job_ids: Iterable[str]) -> int:
        """Close jobs; how many were live."""
        live = 0
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            if job is None:
                continue
            live += job.state in LIVE
            self._results.pop(job_id, None)
            if job.state is not JobState.SETTLED and job.state is not JobState.CLOSED:
                self._end(job, JobState.CLOSED)
        return live

    def _end(self, job: Job, state: JobState) -> None:
        self._ended += 1
        job.state, job.payload, job.grant, job.dealt_to = state, b"", None, None
        job.ended_order = self._ended

    # leasing

    def lease_of_token(self, token: str) -> Job | None:
        """The job whose running lease has this token."""
        return next(
            (job for job in self._jobs.values() if job.grant and job.grant.token == token), None
        )

    def again(
        self, actor_id: str, version: int, policy_hash: str, token: str, now_ms: int
    ) -> Lease | None:
        """The running lease that `token` already bought on the same terms."""
        job = self.lease_of_token(token)
        if job is None or job.grant is None:
            return None
        grant = job.grant
        same = (grant.holder, grant.version, grant.policy_hash) == (actor_id, version, policy_hash)
        return _lease(job, grant) if same and now_ms <= job.deadline_ms(grant) else None

    def grant(
        self,
        actor_id: str,
        version: int,
        policy_hash: str,
        lease_ms: int,
        token: str,
        now_ms: int,
        counts: Callable[[], bool],
    ) -> Lease | None:
        """Bind the first fitting job to a willing actor; `counts` is asked only then."""
        held = sum(job.grant is not None and job.grant.holder == actor_id for job in self._all())
        if held >= MAX_LEASES_PER_ACTOR:
            return None
        pull = self._pull_limit(actor_id, held, now_ms)
        pools: list[Callable[[Job], bool]] = [
            lambda job: job.state is JobState.DEALT and job.dealt_to == actor_id
        ]
        if pull is None or pull.left:
            pools.append(lambda job: job.state is JobState.OPEN)
        for pool in pools:
            for job in islice(filter(pool, self._all()), SCAN_MAX):
                closed = job.closes_ms is not None and job.closes_ms < now_ms
                if closed or (version, policy_hash) not in job.gate:
                    continue
                if pull is not None and job.state is JobState.OPEN:
                    self._pulls[actor_id] = replace(pull, left=pull.left - 1)
                expires_ms = now_ms + (lease_ms << (job.attempt - 1))
                job.state, job.dealt_to, job.handed_back_token = JobState.LEASED, None, None
                job.grant = Grant(
                    token, actor_id, version, policy_hash, now_ms, expires_ms, counts()
                )
                return _lease(job, job.grant)
        return None

    def _all(self) -> list[Job]:
        live = (job for job in self._jobs.values() if job.state in LIVE)
        return sorted(live, key=lambda job: job.sequence)

    def limit_pulls(self, pulls: dict[str, Pull], until_ms: int) -> None:
        """Limit what actors take of the open pool, up to a moment."""
        self._pulls, self._pulls_until_ms = dict(pulls), until_ms

    def _pull_limit(self, actor_id: str, held: int, now_ms: int) -> Pull | None:
        pull = self._pulls.get(actor_id)
        if pull is None or self._pulls_until_ms < now_ms:
            return None
        if pull.left < 1 and pull.sharers and not held:
            handful = self.counts().open // (2 * pull.sharers)
            return replace(pull, left=max(1, handful))
        return pull

    def renew(
        self,
        job_id: str,
        token: str,
        tokens_done: int,
        lease_ms: int,
        max_lease_ms: int,
        now_ms: int,
    ) -> bool:
        """Extend a lease on progress."""
        job = self._jobs.get(job_id)
        grant = None if job is None else job.grant
        if job is None or grant is None or grant.token != token:
            return False
        if now_ms > job.deadline_ms(grant) or tokens_done <= grant.tokens_done:
            return False
        doublings = job.attempt - 1
        expires_ms = min(
            now_ms + (lease_ms << doublings), grant.granted_ms + (max_lease_ms << doublings)
        )
        extended = expires_ms > grant.expires_ms
        grant.tokens_done = tokens_done
        if extended:
            grant.expires_ms = expires_ms
        return extended

    def hand_back(self, job_id: str, token: str) -> bool:
        """Return a job unfinished."""
        job = self._jobs.get(job_id)
        if job is None:
            return False
        if job.grant is None:
            return job.handed_back_token == token
        if job.grant.token != token:
            return False
        self._reopen(job)
        job.handed_back_token = token
        return True

    def _reopen(self, job: Job) -> None:
        job.state, job.grant, job.dealt_to = JobState.OPEN, None, None

    def release_actor(self, actor_id: str) -> None:
        """Return everything dealt to or held by an actor that leaves."""
        for job in self._jobs.values():
            holder = job.grant.holder if job.grant else job.dealt_to
            if holder == actor_id:
                self._reopen(job)
        self._samples.pop(actor_id, None)

    # settling

    def settle(self, claim: Settlement, now_ms: int) -> Settled:
        """Decide, count, and queue what is admitted."""
        job = self._jobs.get(claim.job_id)
        answer = decide(job, claim, now_ms)
        self._outcomes[answer] += 1
        if answer is Settled.ADMITTED and job is not None and job.grant is not None:
            grant = job.grant
            self._results[claim.job_id] = AdmittedResult(
                claim, to_s(grant.granted_ms), to_s(now_ms)
            )
            elapsed_ms = now_ms - grant.granted_ms
            self._sample(claim.actor_id, now_ms, elapsed_ms, claim.tokens, grant.counts)
            self._end(job, JobState.SETTLED)
        return answer

    def take(self, max_count: int) -> list[AdmittedResult]:
        """The oldest admitted results."""
        taken = list(islice(self._results, max_count))
        return [self._results.pop(job_id) for job_id in taken]

    def _sample(
        self, actor_id: str, now_ms: int, elapsed_ms: int, tokens: int, counts: bool
    ) -> None:
        samples = self._samples.setdefault(actor_id, [])
        if elapsed_ms < 0:  # the clock was stepped back meanwhile: this measured nothing
            elapsed_ms, counts = 0, False
        at_ms = now_ms
        if samples:
            at_ms = max(now_ms, round(samples[-1].at_s * 1000) + 1)
        samples.append(ThroughputSample(to_s(at_ms), to_s(elapsed_ms), tokens, counts))
        del samples[:-MAX_SAMPLES]

    # reaping

    def reap(self, now_ms: int, takes_work: Callable[[str], bool]) -> list[ReapedJob]:
        """Take back what expired: closed steps, then leases, then shares of the gone."""
        reaped = []

        def report(job: Job, actor_id: str | None, outcome: ReapOutcome) -> None:
            reaped.append(ReapedJob(job.job_id, actor_id, job.attempt, outcome))

        for _, _, job in sorted(
            (job.closes_ms, job.job_id, job)
            for job in self._jobs.values()
            if job.state in LIVE and job.closes_ms is not None and job.closes_ms < now_ms
        ):
            actor_id = job.grant.holder if job.grant else job.dealt_to
            if job.grant and job.grant.expires_ms < now_ms:
                self._sample_expired(job.grant, now_ms)
            self._end(job, JobState.CLOSED)
            report(job, actor_id, ReapOutcome.CLOSED)
        for _, _, job, grant in sorted(
            (job.grant.expires_ms, job.job_id, job, job.grant)
            for job in self._jobs.values()
            if job.grant and job.grant.expires_ms < now_ms
        ):
            self._sample_expired(grant, now_ms)
            job.expired_tokens |= {grant.token}
            if job.attempt >= MAX_ATTEMPTS:
                self._end(job, JobState.PARKED)
                report(job, grant.holder, ReapOutcome.PARKED)
            else:
                job.attempt += 1
                self._reopen(job)
                report(job, grant.holder, ReapOutcome.REOPENED)
        for actor_id, _, job in sorted(
            (job.dealt_to, job.sequence, job)
            for job in self._jobs.values()
            if job.dealt_to is not None and not takes_work(job.dealt_to)
        ):
            self._reopen(job)
            report(job, actor_id, ReapOutcome.RELEASED)
        return reaped

    def _sample_expired(self, grant: Grant, now_ms: int) -> None:
        lasted_ms = grant.expires_ms - grant.granted_ms
        self._sample(grant.holder, now_ms, lasted_ms, 0, grant.counts)

    def forget_actor(self, actor_id: str) -> None:
        """Drop the samples of an actor lost for long."""
        self._samples.pop(actor_id, None)

    # reading

    def counts(self) -> JobCounts:
        """How many jobs are where."""
        states = [job.state for job in self._jobs.values()]
        return JobCounts(
            states.count(JobState.OPEN),
            states.count(JobState.DEALT),
            states.count(JobState.LEASED),
            states.count(JobState.SETTLED),
            states.count(JobState.PARKED),
        )

    def running(self) -> list[RunningLease]:
        """Who holds what until when, by actor and job."""
        held = sorted(
            (job.grant.holder, job.job_id, job.deadline_ms(job.grant))
            for job in self._jobs.values()
            if job.grant is not None
        )
        return [RunningLease(a, j, to_s(deadline_ms)) for a, j, deadline_ms in held[:LISTED_MAX]]

    def outcomes(self) -> dict[Settled, int]:
        """How often each answer was given."""
        return dict(self._outcomes)

    def samples(self) -> dict[str, tuple[ThroughputSample, ...]]:
        """The newest samples per actor, oldest first."""
        return {actor_id: tuple(samples) for actor_id, samples in self._samples.items()}


def _lease(job: Job, grant: Grant) -> Lease:
    return Lease(
        job.job_id,
        job.payload,
        grant.token,
        grant.version,
        grant.policy_hash,
        to_s(grant.granted_ms),
        to_s(job.deadline_ms(grant)),
        job.attempt,
        grant.counts,
    )
