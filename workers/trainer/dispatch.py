"""A step that waits for its slowest actor waits for ever: it has a deadline and a stated minimum.

Deals a step's groups to actors, takes what Redis admitted, lets the trainer's own table decide,
and puts up again what came to nothing: expired leases (by `reap`), results that could not be used
(under a new id), work whose version nobody is at any more, everything after Redis lost its memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.coordination.backend import MAX_ATTEMPTS, JobOffer, ReapOutcome
from deltastore.errors import CoordinationError, Kind
from deltastore.events import BatchDealt, PromptParked, ResultSettled
from deltastore.scheduling.split import Deal
from workers.payload import JobPayload
from workers.sampling import MILLI, Sampling, prompt_seed
from workers.trainer.fetch import ResultFetcher
from workers.trainer.grpo import Group
from workers.trainer.jobs import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deltastore.clock import Clock
    from deltastore.coordination.backend import AdmittedResult, Coordination
    from deltastore.events import EventSink
    from deltastore.repository.run import Run
    from workers.config import TrainerConfig
    from workers.results import RolloutResult
    from workers.trainer.fleet import Fleet
    from workers.trainer.jobs import IssuedJob, JobTable, PolicyLedger
    from workers.trainer.steady import Steady
    from workers.trainer.tasks import Task

TAKE_MAX = 64
TAKE_WAIT_S = 0.25
FETCH_WAIT_S = 0.25  # for objects on their way, before the next look at everything else
TEND_PERIOD_S = 1.0  # between two looks for expired leases and stranded jobs
QUIET_TENDS = 3  # looks at jobs that are done without a result before they are issued anew
OPEN_POOL = ""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What a step learns from.

    Args:
        groups: admitted, in the order of their places in the batch.
        missing: groups that did not come in time or were given up, parked ones too.
        dropped: results that were refused. One still on its way at the end is late: its group is
            missing, and counted there.
        wait_s: how long the trainer waited for them.
    """

    step: int
    groups: list[Group]
    missing: int
    dropped: int
    wait_s: float


class Dispatcher:
    """Hands out the work of steps and brings their results in. One thread uses it.

    Args:
        regions: the run in every region, by name: results lie where their actor is.
        seed: of the run: prompts and sampling follow from it.
    """

    def __init__(
        self,
        coordination: Coordination,
        regions: Mapping[str, Run],
        task: Task,
        table: JobTable,
        ledger: PolicyLedger,
        fleet: Fleet,
        steady: Steady,
        settings: TrainerConfig,
        *,
        seed: int,
        clock: Clock,
        sink: EventSink,
    ) -> None:
        self._coordination = coordination
        self._fetcher = ResultFetcher(regions, clock)
        self._task = task
        self._table = table
        self._ledger = ledger
        self._fleet = fleet
        self._steady = steady
        self._settings = settings
        self._run_name = next(iter(regions.values())).name
        self._seed = seed
        self._clock = clock
        self._sink = sink
        self._gates: dict[str, tuple[tuple[int, str], ...]] = {}
        self._dropped = 0
        self._quiet_tends = 0

    def deal(self, step: int) -> None:
        """Put up a step's groups, split over the actors that can do them now."""
        jobs = [self._issue(step, index) for index in range(self._settings.groups)]
        gate = self._ledger.gate(step, self._settings.max_policy_lag)
        plan = self._steady.attempt(
            lambda: self._fleet.split(
                len(jobs),
                head_version=self._ledger.newest.version,
                hashes=self._ledger.hashes(),
                dealt_fraction=self._settings.dealt_fraction,
                tokens_per_group=float(jobs[0].payload.most_tokens),
            )
        )
        plan = Deal({}, len(jobs)) if plan is None else plan  # Redis is away: whoever comes back
        holders: list[str | None] = [a for a, share in plan.dealt.items() for _ in range(share)]
        holders += [None] * plan.open_pool
        self._put_up(jobs, holders, gate)
        shares = [(a, share) for a, share in sorted(plan.dealt.items()) if share]
        self._sink(BatchDealt(step, (*shares, (OPEN_POOL, plan.open_pool))))

    def collect(self, step: int, tick: Callable[[], None]) -> Batch:
        """Wait for the step's results: all of them, or at its deadline at least `min_groups`.

        Args:
            tick: called between two waits, for what else must go on.

        Raises CoordinationError(timeout) when not even the minimum came within `give_up_s`, or
        what is missing was given up.
        """
        started_s = self._clock.monotonic_s()
        next_tend_s = started_s
        self._dropped = 0
        groups: dict[int, Group] = {}
        while self._table.wanted(step):
            tick()
            self._look_for_results(groups)
            now_s = self._clock.monotonic_s()
            if now_s >= next_tend_s:
                next_tend_s = now_s + TEND_PERIOD_S
                self._tend(step)
            if self._is_over(step, len(groups), now_s - started_s):
                break
        self._close(step)
        if len(groups) < self._settings.min_groups:
            raise self._too_few(step, len(groups), "the others were given up after their attempts")
        return Batch(
            step=step,
            groups=[groups[index] for index in sorted(groups)],
            missing=self._settings.groups - len(groups),
            dropped=self._dropped,
            wait_s=self._clock.monotonic_s() - started_s,
        )

    def _issue(self, step: int, index: int) -> IssuedJob:
        problem = self._task.problem(step, index)
        sampling = Sampling(
            group_size=self._settings.group_size,
            max_new_tokens=self._settings.max_new_tokens,
            stop_token=self._task.stop_token,
            temperature_milli=round(self._settings.temperature * MILLI),
            seed=prompt_seed(self._run_name, self._seed, step, index),
        )
        return self._table.issue(step, index, problem, JobPayload(step, problem.prompt, sampling))

    def _put_up(
        self,
        jobs: Sequence[IssuedJob],
        holders: Sequence[str | None],
        gate: tuple[tuple[int, str], ...],
    ) -> int:
        offers = [
            JobOffer(
                job_id=job.job_id,
                payload=job.payload.to_bytes(),
                gate=gate,
                expected_tokens=job.payload.most_tokens,
                assigned_to=holder,
                attempt=job.attempt,
            )
            for job, holder in zip(jobs, holders, strict=True)
        ]
        self._gates.update({job.job_id: gate for job in jobs})
        return self._steady.insist(lambda: self._coordination.offer(offers))

    def _look_for_results(self, groups: dict[int, Group]) -> None:
        """Send for the objects of new claims, and use what has come of earlier ones."""
        admitted = self._steady.attempt(
            lambda: self._coordination.take_settled(TAKE_MAX, TAKE_WAIT_S)
        )
        for claim in admitted or []:
            if claim.settlement.job_id in self._fetcher.job_ids:
                self._tell(claim, Verdict.DUPLICATE)  # one fetch a job bounds what is on its way
            elif self._table.judge(claim.settlement) is Verdict.ADMITTED:
                self._fetcher.submit(claim)
            else:
                self._take(claim, None, groups)  # refused unread
        for claim, body in self._fetcher.take(FETCH_WAIT_S):
            self._take(claim, body, groups)

    def _take(self, admitted: AdmittedResult, body: bytes | None, groups: dict[int, Group]) -> None:
        self._quiet_tends = 0
        claim = admitted.settlement
        job = self._table.find(claim.job_id)
        verdict, result = self._table.consume(claim, b"" if body is None else body)
        self._tell(admitted, verdict)
        if result is not None and job is not None:
            groups[job.index] = self._group(job, result)
            return
        self._dropped += 1
        if job is not None:
            self._give_another_try([job])

    def _tell(self, admitted: AdmittedResult, verdict: Verdict) -> None:
        claim = admitted.settlement
        elapsed_s = admitted.settled_at_s - admitted.granted_at_s
        self._sink(
            ResultSettled(claim.job_id, claim.actor_id, verdict.value, claim.tokens, elapsed_s)
        )

    def _group(self, job: IssuedJob, result: RolloutResult) -> Group:
        rewards = tuple(
            self._task.reward(job.problem, row[:length].tolist())
            for row, length in zip(result.tokens, result.lengths.tolist(), strict=True)
        )
        lag = self._table.lag(job, result.provenance.version)
        return Group(job.problem.prompt, result, rewards, lag)

    def _again(self, jobs: Sequence[IssuedJob], *, failed: bool) -> None:
        """Put jobs up under new ids, for everybody, at today's gate."""
        old = [job.job_id for job in jobs]
        self._steady.attempt(lambda: self._coordination.withdraw(old))
        fresh = [self._table.reissue(job, failed=failed) for job in jobs]
        for job_id in old:
            self._gates.pop(job_id, None)
        gate = self._ledger.gate(fresh[0].step, self._settings.max_policy_lag)
        self._put_up(fresh, [None] * len(fresh), gate)

    def _tend(self, step: int) -> None:
        """Take back what expired, and put up again what nobody holds or nobody can do."""
        for reaped in self._steady.attempt(self._coordination.reap) or []:
            if reaped.outcome is ReapOutcome.PARKED:
                self._table.close(reaped.job_id)
                self._sink(PromptParked(reaped.job_id, reaped.attempt))
            else:
                self._table.note_attempt(reaped.job_id, reaped.attempt)
        on_their_way = self._fetcher.job_ids
        wanted = [job for job in self._table.wanted(step) if job.job_id not in on_their_way]
        counts = self._steady.attempt(self._coordination.job_counts)
        if not wanted or counts is None or counts.leased:
            return
        gate = self._ledger.gate(step, self._settings.max_policy_lag)
        if not counts.open + counts.assigned:
            self._revive(wanted, gate)
            return
        stale = [job for job in wanted if self._gates.get(job.job_id) != gate]
        if not stale:
            return
        asked = self._gates.get(stale[0].job_id, gate)
        if self._steady.attempt(lambda: self._fleet.can_serve(asked)) is False:
            self._again(stale, failed=False)

    def _revive(self, wanted: Sequence[IssuedJob], gate: tuple[tuple[int, str], ...]) -> None:
        """No wanted job is live: Redis has forgotten them, or says that they are done.

        Offering the same ids brings back what was forgotten and changes nothing else. Done without
        a result to take means that somebody else took it: after a while they are issued anew.
        """
        if self._put_up(wanted, [None] * len(wanted), gate):
            self._quiet_tends = 0
            return
        self._quiet_tends += 1
        if self._quiet_tends > QUIET_TENDS:
            self._quiet_tends = 0
            self._give_another_try(wanted)

    def _give_another_try(self, jobs: Sequence[IssuedJob]) -> None:
        """Put jobs up again whose results cannot be used, unless that has failed too often."""
        for job in jobs:
            if job.attempt >= MAX_ATTEMPTS:
                self._table.close(job.job_id)
        again = [job for job in jobs if job.attempt < MAX_ATTEMPTS]
        if again:
            self._again(again, failed=True)

    def _is_over(self, step: int, have: int, waited_s: float) -> bool:
        if waited_s >= self._settings.step_deadline_s and have >= self._settings.min_groups:
            return True
        if waited_s < self._settings.give_up_s:
            return False
        raise self._too_few(step, have, f"the others did not come within {waited_s:.0f} s")

    def _too_few(self, step: int, have: int, why: str) -> CoordinationError:
        return CoordinationError(
            f"step {step} has {have} of {self._settings.groups} groups, fewer than min_groups ="
            f" {self._settings.min_groups}: {why}",
            kind=Kind.TIMEOUT,
            run=self._run_name,
            hint="start actors for this run and read their logs, or raise give_up_s",
        )

    def _close(self, step: int) -> None:
        """A result of this step that comes now is late."""
        for unread in self._fetcher.forget():
            self._tell(unread, Verdict.LATE)
        left = [job.job_id for job in self._table.wanted(step)]
        for job_id in left:
            self._table.close(job_id)
        if left:
            self._steady.attempt(lambda: self._coordination.withdraw(left))
        self._gates.clear()
