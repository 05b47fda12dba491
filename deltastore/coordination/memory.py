"""A backend that needs no server, for one process: tests, simulation, `--redis memory://`.

It passes the same conformance suite as Redis and is the model Redis is tested against. Nothing
survives the process, and no other process sees it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.coordination.jobtable import JobTable
from deltastore.coordination.limits import (
    FORGET_AFTER_S,
    MAX_ACTORS,
    MAX_JOBS,
    MAX_SEGMENT_HINTS,
    MAX_TAKE,
    SEGMENT_HINTS_TTL_S,
)
from deltastore.coordination.records import (
    MAX_TOKENS,
    ActorRecord,
    ActorState,
    ActorStatus,
    Member,
    Throughput,
    check_count,
    check_hash,
    check_rate,
    check_token,
    check_ttl_s,
    check_wait_s,
)
from deltastore.coordination.wire import to_ms, to_s
from deltastore.errors import CoordinationError, InvalidInputError, Kind
from deltastore.ids import check_name, check_version, new_token

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from deltastore.clock import Clock
    from deltastore.coordination.records import (
        AdmittedResult,
        HeadHint,
        JobCounts,
        JobOffer,
        Lease,
        Pull,
        ReapedJob,
        RunningLease,
        Settled,
        Settlement,
    )
    from deltastore.coordination.segment_hint import SegmentHint

POLL_S = 0.01  # nobody else pays for it


@dataclass(slots=True)
class _Seat:
    """One registered actor."""

    record: ActorRecord
    status: ActorStatus
    alive_until_ms: int
    seen_ms: int
    fresh: bool
    """No lease since it registered."""

    def takes_work(self, now_ms: int) -> bool:
        return self.alive_until_ms >= now_ms and self.status.state in {
            ActorState.ACTIVE,
            ActorState.JOINING,
        }

    def first_lease(self) -> bool:
        fresh, self.fresh = self.fresh, False
        return fresh


class MemoryCoordination:
    """`Coordination` in this process, on the given clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._seats: dict[str, _Seat] = {}
        self._head: HeadHint | None = None
        self._segments: list[SegmentHint] = []
        self._segments_until_ms = 0
        self._jobs = JobTable()
        self._rates: dict[str, tuple[float, int]] = {}

    def _now_ms(self) -> int:
        return round(self._clock.utc_s() * 1000)

    def now_s(self) -> float:
        """The clock's Unix time, in the milliseconds that Redis keeps."""
        return to_s(self._now_ms())

    # membership

    def register(self, actor: ActorRecord, ttl_s: float) -> None:
        """Join, or join again."""
        ttl_ms = to_ms(check_ttl_s(ttl_s))
        with self._lock:
            if actor.actor_id not in self._seats and len(self._seats) >= MAX_ACTORS:
                raise CoordinationError(
                    f"there are {MAX_ACTORS} actors already",
                    kind=Kind.LIMIT,
                    hint="let unused actors leave; lost ones are forgotten after an hour",
                )
            now_ms = self._now_ms()
            joining = ActorStatus(ActorState.JOINING)
            self._seats[actor.actor_id] = _Seat(actor, joining, now_ms + ttl_ms, now_ms, True)

    def heartbeat(self, actor_id: str, status: ActorStatus, ttl_s: float) -> bool:
        """Stay alive; False: register again."""
        ttl_ms = to_ms(check_ttl_s(ttl_s))
        with self._lock:
            seat = self._seats.get(check_name(actor_id))
            if seat is None:
                return False
            now_ms = self._now_ms()
            seat.status, seat.alive_until_ms, seat.seen_ms = status, now_ms + ttl_ms, now_ms
            return True

    def leave(self, actor_id: str) -> None:
        """Go, and give everything back."""
        with self._lock:
            self._seats.pop(check_name(actor_id), None)
            self._jobs.release_actor(actor_id)

    def members(self) -> list[Member]:
        """Everybody registered, by actor id."""
        with self._lock:
            now_ms = self._now_ms()
            return [
                Member(seat.record, seat.status, to_s(seat.seen_ms), seat.alive_until_ms >= now_ms)
                for _, seat in sorted(self._seats.items())
            ]

    # the head hint

    def announce_head(self, hint: HeadHint) -> None:
        """Advertise a committed version."""
        with self._lock:
            old = self._head
            if old is None or (old.generation, old.version) <= (hint.generation, hint.version):
                self._head = hint

    def head_hint(self) -> HeadHint | None:
        """The last advertised version, if any."""
        with self._lock:
            return self._head

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
        with self._lock:
            self._segments = [*self._segments, hint][-MAX_SEGMENT_HINTS:]
            self._segments_until_ms = self._now_ms() + int(SEGMENT_HINTS_TTL_S * 1000)

    def announced_segments(self) -> list[SegmentHint]:
        """What was announced lately, oldest first."""
        with self._lock:
            return list(self._segments) if self._now_ms() < self._segments_until_ms else []

    def _wait_until(self, deadline_s: float) -> bool:
        left_s = deadline_s - self._clock.monotonic_s()
        return left_s > 0 and not self._clock.wait(self._closed, min(POLL_S, left_s))

    # jobs and leases

    def offer(self, jobs: Sequence[JobOffer]) -> int:
        """Put jobs up; return how many were new."""
        with self._lock:
            added = self._jobs.offer(jobs)
        if added < 0:
            raise InvalidInputError(
                f"there would be more than {MAX_JOBS} live jobs",
                kind=Kind.BACKLOG,
                hint="withdraw closed steps and take settled results first",
            )
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
        lease_ms = to_ms(check_ttl_s(lease_s, "lease_s"))
        with self._lock:
            now_ms = self._now_ms()
            seat = self._seats.get(check_name(actor_id))
            if self._jobs.lease_of_token(token) is not None:
                return self._jobs.again(actor_id, version, policy_hash, token, now_ms)
            if seat is None or not seat.takes_work(now_ms):
                return None
            return self._jobs.grant(
                actor_id,
                version,
                policy_hash,
                lease_ms,
                token,
                now_ms,
                lambda: not seat.first_lease(),
            )

    def limit_pulls(self, pulls: Mapping[str, Pull], for_s: float) -> None:
        """Limit what actors take of the open pool."""
        for_ms = to_ms(check_ttl_s(for_s, "for_s"))
        checked = {check_name(actor): pull for actor, pull in pulls.items()}
        with self._lock:
            self._jobs.limit_pulls(checked, self._now_ms() + for_ms)

    def renew(
        self, job_id: str, token: str, tokens_done: int, lease_s: float, max_lease_s: float
    ) -> bool:
        """Extend a lease whose tokens grew."""
        check_name(job_id)
        check_token(token)
        check_count(tokens_done, "tokens_done", MAX_TOKENS)
        lease_ms = to_ms(check_ttl_s(lease_s, "lease_s"))
        max_lease_ms = to_ms(check_ttl_s(max_lease_s, "max_lease_s"))
        with self._lock:
            now_ms = self._now_ms()
            return self._jobs.renew(job_id, token, tokens_done, lease_ms, max_lease_ms, now_ms)

    def hand_back(self, job_id: str, token: str) -> bool:
        """Return a job unfinished."""
        with self._lock:
            return self._jobs.hand_back(check_name(job_id), check_token(token))

    def settle(self, settlement: Settlement) -> Settled:
        """Claim a job done."""
        with self._lock:
            return self._jobs.settle(settlement, self._now_ms())

    def take_settled(self, max_count: int, timeout_s: float) -> list[AdmittedResult]:
        """The oldest admitted results; waits for the first."""
        check_count(max_count, "max_count", MAX_TAKE, 1)
        deadline_s = self._clock.monotonic_s() + check_wait_s(timeout_s)
        while True:
            with self._lock:
                taken = self._jobs.take(max_count)
            if taken or not self._wait_until(deadline_s):
                return taken

    def reap(self) -> list[ReapedJob]:
        """Take back what expired."""
        with self._lock:
            now_ms = self._now_ms()

            def takes_work(actor_id: str) -> bool:
                seat = self._seats.get(actor_id)
                return seat is not None and seat.takes_work(now_ms)

            reaped = self._jobs.reap(now_ms, takes_work)
            for actor_id, seat in list(self._seats.items()):
                if seat.alive_until_ms <= now_ms - to_ms(FORGET_AFTER_S):
                    del self._seats[actor_id]
                    self._jobs.forget_actor(actor_id)
            return reaped

    def withdraw(self, job_ids: Iterable[str]) -> int:
        """Close jobs with their step; return how many were live."""
        ids = [check_name(job_id, "job id") for job_id in job_ids]
        with self._lock:
            return self._jobs.withdraw(ids)

    def job_counts(self) -> JobCounts:
        """How many jobs are where."""
        with self._lock:
            return self._jobs.counts()

    def running_leases(self) -> list[RunningLease]:
        """Who holds what until when."""
        with self._lock:
            return self._jobs.running()

    def outcome_counts(self) -> dict[Settled, int]:
        """How often each answer was given."""
        with self._lock:
            return self._jobs.outcomes()

    # throughput

    def throughput(self) -> dict[str, Throughput]:
        """Samples and stored average per actor."""
        with self._lock:
            now_ms = self._now_ms()
            samples = self._jobs.samples()
            rates = {
                actor_id: rate
                for actor_id, (rate, expires_ms) in self._rates.items()
                if expires_ms >= now_ms
            }
            return {
                actor_id: Throughput(samples.get(actor_id, ()), rates.get(actor_id))
                for actor_id in sorted(samples.keys() | rates.keys())
            }

    def set_throughput(self, tokens_per_s: Mapping[str, float], ttl_s: float) -> None:
        """Store averages that expire."""
        ttl_ms = to_ms(check_ttl_s(ttl_s))
        checked = {check_name(actor): check_rate(rate) for actor, rate in tokens_per_s.items()}
        with self._lock:
            now_ms = self._now_ms()
            self._rates = {a: kept for a, kept in self._rates.items() if kept[1] >= now_ms}
            self._rates |= {actor: (rate, now_ms + ttl_ms) for actor, rate in checked.items()}

    def close(self) -> None:
        """A wait in progress ends early."""
        self._closed.set()
