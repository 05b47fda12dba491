"""Two round trips are a race: every operation here is one script, on Redis TIME.

Values that scripts return are Redis' own types; records inside them are read through `wire`, so
garbage becomes FormatError(`payload`) and not a wrong lease.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from deltastore.coordination import wire
from deltastore.coordination.connection import RedisConnection
from deltastore.coordination.limits import MAX_ACTORS, MAX_JOBS, MAX_TAKE, REAP_MAX
from deltastore.coordination.records import (
    MAX_TOKENS,
    ActorState,
    ActorStatus,
    JobCounts,
    Lease,
    Member,
    ReapedJob,
    ReapOutcome,
    RunningLease,
    Settled,
    Throughput,
    check_count,
    check_hash,
    check_rate,
    check_token,
    check_ttl_s,
    check_wait_s,
)
from deltastore.coordination.scripts import Script, load_scripts
from deltastore.errors import CoordinationError, FormatError, InvalidInputError, Kind
from deltastore.ids import check_name, check_version, new_token

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from deltastore.clock import Clock
    from deltastore.coordination.records import (
        ActorRecord,
        AdmittedResult,
        HeadHint,
        JobOffer,
        Pull,
        Settlement,
    )
    from deltastore.coordination.segment_hint import SegmentHint

POLL_S = 0.1  # a waiting call asks ten times a second: 1 % of one Redis for 1,000 actors
OFFER_MAX_BYTES = 4 << 20  # of payloads in one call: keeps a script below a few milliseconds
OFFER_MAX_JOBS = 128
WITHDRAW_MAX_JOBS = 512


class RedisCoordination:
    """`Coordination` on a Redis or Valkey server, 6.2 or later, or a cluster of them.

    Args:
        url: see `RedisConnection`; may carry user and password, which no message repeats.
        run: the run's name; all its keys share the hash tag `{run}`.
        clock: only for waiting; leases know Redis TIME alone.
        timeout_s: for connecting, and for each answer.
        only_reads: whether nothing will be written: then a replica does too.
        scripts: only for tests that move time.

    Raises CoordinationError at once when Redis is down, would evict keys, or is a replica.
    """

    def __init__(
        self,
        url: str,
        run: str,
        clock: Clock,
        *,
        timeout_s: float = 5.0,
        only_reads: bool = False,
        scripts: Mapping[str, Script] | None = None,
    ) -> None:
        self._run = check_name(run, "run")
        self._clock = clock
        self._scripts = load_scripts() if scripts is None else scripts
        self._closed = threading.Event()
        self._redis = RedisConnection(url, run, clock, timeout_s)
        self._redis.check_policy()
        if not only_reads:
            self._redis.check_role()

    def _call(self, name: str, *args: str | bytes | int, tell_repeat: bool = False) -> Any:
        return self._redis.call(self._scripts[name], *args, tell_repeat=tell_repeat)

    def now_s(self) -> float:
        """Redis TIME."""
        return wire.to_s(self._call("now"))

    # membership

    def register(self, actor: ActorRecord, ttl_s: float) -> None:
        """Join, or join again."""
        joining = wire.dump_status(ActorStatus(ActorState.JOINING))
        ttl_ms = wire.to_ms(check_ttl_s(ttl_s))
        if not self._call("register", actor.actor_id, wire.dump_record(actor), joining, ttl_ms):
            raise CoordinationError(
                f"run {self._run} has {MAX_ACTORS} actors already",
                kind=Kind.LIMIT,
                run=self._run,
                hint="let unused actors leave; lost ones are forgotten after an hour",
            )

    def heartbeat(self, actor_id: str, status: ActorStatus, ttl_s: float) -> bool:
        """Stay alive; False: register again."""
        ttl_ms = wire.to_ms(check_ttl_s(ttl_s))
        return bool(self._call("heartbeat", check_name(actor_id), wire.dump_status(status), ttl_ms))

    def leave(self, actor_id: str) -> None:
        """Go, and give everything back."""
        self._call("leave", check_name(actor_id))

    def members(self) -> list[Member]:
        """Everybody registered, by actor id."""
        now_ms, *rows = self._call("members")
        members = []
        for i in range(0, len(rows), 4):
            record, status, alive_ms, seen_ms = rows[i : i + 4]
            members.append(
                Member(
                    wire.load_record(record),
                    wire.load_status(status),
                    wire.to_s(seen_ms),
                    alive_ms >= now_ms,
                )
            )
        return sorted(members, key=lambda member: member.actor_id)

    # the head hint

    def announce_head(self, hint: HeadHint) -> None:
        """Advertise a committed version."""
        self._call("announce", hint.version, hint.generation, wire.dump_hint(hint))

    def head_hint(self) -> HeadHint | None:
        """The last advertised version, if any."""
        text = self._redis.get("head")
        return None if text is None else wire.load_hint(text)

    def wait_head_hint(self, after_version: int, timeout_s: float) -> HeadHint | None:
        """Wait for a version above `after_version`."""
        deadline_s = self._clock.monotonic_s() + check_wait_s(timeout_s)
        while True:
            hint = self.head_hint()
            if hint is not None and hint.version > after_version:
                return hint
            if not self._wait_until(deadline_s):
                return None

    def announce_segment(self, hint: SegmentHint) -> None:
        """Say that home holds a segment of a version that may come to exist."""
        self._call("announce_segment", wire.dump_segment(hint))

    def announced_segments(self) -> list[SegmentHint]:
        """What was announced lately, oldest first."""
        text = self._redis.get("segments")
        return [] if text is None else wire.load_segments(text)

    def _wait_until(self, deadline_s: float) -> bool:
        left_s = deadline_s - self._clock.monotonic_s()
        return left_s > 0 and not self._clock.wait(self._closed, min(POLL_S, left_s))

    # jobs and leases

    def offer(self, jobs: Sequence[JobOffer]) -> int:
        """Put jobs up; return how many were new."""
        added = 0
        for start, batch in _batches(jobs):
            args: list[str | bytes | int] = [len(jobs) - start]
            for job in batch:
                args += (job.job_id, wire.dump_job(job), job.payload)
            count = self._call("offer", *args)
            if count < 0:
                raise InvalidInputError(
                    f"run {self._run} would have more than {MAX_JOBS} live jobs",
                    kind=Kind.BACKLOG,
                    run=self._run,
                    hint="withdraw closed steps and take settled results first",
                )
            added += count
        return added

    def grant(
        self,
        actor_id: str,
        version: int,
        policy_hash: str,
        lease_s: float,
        token: str | None = None,
    ) -> Lease | None:
        """Lease one job, or None: no work for this actor at this version."""
        token = new_token() if token is None else check_token(token)
        check_version(version)
        check_hash(policy_hash)
        lease_ms = wire.to_ms(check_ttl_s(lease_s, "lease_s"))
        row = self._call("grant", check_name(actor_id), version, policy_hash, lease_ms, token)
        if row is None:
            return None
        job_id, payload, granted_ms, deadline_ms, attempt, counts = row
        return Lease(
            job_id.decode(),
            payload,
            token,
            version,
            policy_hash,
            wire.to_s(granted_ms),
            wire.to_s(deadline_ms),
            attempt,
            counts == 1,
        )

    def limit_pulls(self, pulls: Mapping[str, Pull], for_s: float) -> None:
        """Limit what actors take of the open pool."""
        args: list[str | int] = [wire.to_ms(check_ttl_s(for_s, "for_s"))]
        for actor_id, pull in pulls.items():
            args += (check_name(actor_id), wire.dump_pull(pull))
        self._call("limit_pulls", *args)

    def renew(
        self, job_id: str, token: str, tokens_done: int, lease_s: float, max_lease_s: float
    ) -> bool:
        """Extend a lease whose tokens grew."""
        return bool(
            self._call(
                "renew",
                check_name(job_id),
                check_token(token),
                check_count(tokens_done, "tokens_done", MAX_TOKENS),
                wire.to_ms(check_ttl_s(lease_s, "lease_s")),
                wire.to_ms(check_ttl_s(max_lease_s, "max_lease_s")),
                tell_repeat=True,
            )
        )

    def hand_back(self, job_id: str, token: str) -> bool:
        """Return a job unfinished."""
        return bool(self._call("hand_back", check_name(job_id), check_token(token)))

    def settle(self, settlement: Settlement) -> Settled:
        """Claim a job done."""
        answer: bytes = self._call(
            "settle",
            settlement.job_id,
            settlement.token,
            settlement.actor_id,
            settlement.version,
            settlement.policy_hash,
            settlement.result_sha256,
            settlement.result_bytes,
            settlement.tokens,
            settlement.region,
            tell_repeat=True,
        )
        return Settled(answer.decode())

    def take_settled(self, max_count: int, timeout_s: float) -> list[AdmittedResult]:
        """The oldest admitted results; waits for the first."""
        check_count(max_count, "max_count", MAX_TAKE, 1)
        deadline_s = self._clock.monotonic_s() + check_wait_s(timeout_s)
        while True:
            texts = self._call("take", max_count, new_token())
            if texts:
                return [wire.load_admitted(text) for text in texts]
            if not self._wait_until(deadline_s):
                return []

    def reap(self) -> list[ReapedJob]:
        """Take back what expired."""
        reaped = []
        for _ in range(4 * MAX_JOBS // REAP_MAX):  # every job once per reason, at the very most
            rows = self._call("reap")
            if not rows:
                break
            for i in range(0, len(rows), 4):
                job_id, actor_id, attempt, outcome = rows[i : i + 4]
                reaped.append(
                    ReapedJob(
                        job_id.decode(),
                        actor_id.decode() or None,
                        attempt,
                        ReapOutcome(outcome.decode()),
                    )
                )
        return reaped

    def withdraw(self, job_ids: Iterable[str]) -> int:
        """Close jobs with their step; return how many were live."""
        ids = [check_name(job_id, "job id") for job_id in job_ids]
        return sum(
            self._call("withdraw", *ids[i : i + WITHDRAW_MAX_JOBS])
            for i in range(0, len(ids), WITHDRAW_MAX_JOBS)
        )

    def job_counts(self) -> JobCounts:
        """How many jobs are where."""
        counts: list[int] = self._call("counts")
        return JobCounts(*counts)

    def running_leases(self) -> list[RunningLease]:
        """Who holds what until when."""
        flat = self._call("running")
        found = [wire.load_running(*flat[i : i + 2]) for i in range(0, len(flat), 2)]
        return sorted(found, key=lambda lease: (lease.actor_id, lease.job_id))

    def outcome_counts(self) -> dict[Settled, int]:
        """How often each answer was given."""
        flat: list[bytes] = self._call("outcomes")
        try:
            given = {Settled(flat[i].decode()): int(flat[i + 1]) for i in range(0, len(flat), 2)}
        except ValueError as err:
            raise FormatError(
                "Redis holds garbage where outcome counts belong",
                kind=Kind.PAYLOAD,
                run=self._run,
                key="outcomes",
            ) from err
        return {outcome: given.get(outcome, 0) for outcome in Settled}

    # throughput

    def throughput(self) -> dict[str, Throughput]:
        """Samples and stored average per actor."""
        now_ms, samples, rates = self._call("throughput")
        sampled = {
            samples[i].decode("utf-8", "replace"): wire.load_samples(samples[i + 1])
            for i in range(0, len(samples), 2)
        }
        rated = {
            rates[i].decode("utf-8", "replace"): wire.load_rate(rates[i + 1], now_ms)
            for i in range(0, len(rates), 2)
        }
        return {
            actor: Throughput(sampled.get(actor, ()), rated.get(actor))
            for actor in sorted(sampled.keys() | rated.keys())
            if sampled.get(actor) or rated.get(actor) is not None
        }

    def set_throughput(self, tokens_per_s: Mapping[str, float], ttl_s: float) -> None:
        """Store averages that expire."""
        args: list[str | int] = [wire.to_ms(check_ttl_s(ttl_s))]
        for actor_id, rate in tokens_per_s.items():
            args += (check_name(actor_id), wire.dump_rate(check_rate(rate)))
        if tokens_per_s:
            self._call("set_throughput", *args)

    def close(self) -> None:
        """Drop connections; a wait in progress ends early."""
        self._closed.set()
        self._redis.close()


def _batches(jobs: Sequence[JobOffer]) -> Iterable[tuple[int, list[JobOffer]]]:
    """(index of the first, jobs) in calls small enough for one script."""
    start, size_bytes = 0, 0
    batch: list[JobOffer] = []
    for i, job in enumerate(jobs):
        full = len(batch) >= OFFER_MAX_JOBS or size_bytes + len(job.payload) > OFFER_MAX_BYTES
        if batch and full:
            yield start, batch
            start, batch, size_bytes = i, [], 0
        batch.append(job)
        size_bytes += len(job.payload)
    if batch:
        yield start, batch
