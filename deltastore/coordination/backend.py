"""Workers that know Redis die with it; workers that know this protocol go on without it.

Everything below is advice with an expiry, except one thing: `settle` is the first gate of
admission. The last gate is the trainer's own job table. All times are the backend's (Redis TIME),
never the caller's, so a stepped clock on an actor neither extends nor ends a lease.

Errors: InvalidInputError for arguments that can never work, CoordinationError
(`redis_unavailable`, `redis_policy`, `redis_memory`, `redis_script`) for everything the caller
answers by going on without coordination, FormatError(`payload`) for stored garbage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from deltastore.coordination.limits import (
    MAX_ACTORS,
    MAX_ATTEMPTS,
    MAX_JOBS,
    MAX_LEASES_PER_ACTOR,
    MAX_SAMPLES,
    MAX_SEGMENT_HINTS,
    MAX_TAKE,
)
from deltastore.coordination.records import (
    MAX_GATE,
    MAX_PAYLOAD_BYTES,
    MAX_TTL_S,
    MIN_TTL_S,
    ActorRecord,
    ActorState,
    ActorStatus,
    AdmittedResult,
    HeadHint,
    JobCounts,
    JobOffer,
    Lease,
    Member,
    Pull,
    ReapedJob,
    ReapOutcome,
    RunningLease,
    Settled,
    Settlement,
    Throughput,
    ThroughputSample,
)
from deltastore.coordination.segment_hint import SegmentHint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "MAX_ACTORS",
    "MAX_ATTEMPTS",
    "MAX_GATE",
    "MAX_JOBS",
    "MAX_LEASES_PER_ACTOR",
    "MAX_PAYLOAD_BYTES",
    "MAX_SAMPLES",
    "MAX_SEGMENT_HINTS",
    "MAX_TAKE",
    "MAX_TTL_S",
    "MIN_TTL_S",
    "ActorRecord",
    "ActorState",
    "ActorStatus",
    "AdmittedResult",
    "Coordination",
    "HeadHint",
    "JobCounts",
    "JobOffer",
    "Lease",
    "Member",
    "Pull",
    "ReapOutcome",
    "ReapedJob",
    "RunningLease",
    "SegmentHint",
    "Settled",
    "Settlement",
    "Throughput",
    "ThroughputSample",
]


class Coordination(Protocol):
    """Membership, jobs, leases and throughput of one run. Thread-safe."""

    def now_s(self) -> float:
        """The backend's time: the only clock that leases know."""
        ...

    # membership

    def register(self, actor: ActorRecord, ttl_s: float) -> None:
        """Join, or join again: state JOINING, alive for `ttl_s`, next lease not a sample."""
        ...

    def heartbeat(self, actor_id: str, status: ActorStatus, ttl_s: float) -> bool:
        """Stay alive for `ttl_s` more; False: nobody knows this actor, it must register again."""
        ...

    def leave(self, actor_id: str) -> None:
        """Go: what was dealt to it or leased by it returns to the open pool at once."""
        ...

    def members(self) -> list[Member]:
        """Everybody registered, by actor id; those whose heartbeat expired are LOST."""
        ...

    # the head hint

    def announce_head(self, hint: HeadHint) -> None:
        """Advertise a committed version; an older (generation, version) is ignored."""
        ...

    def head_hint(self) -> HeadHint | None:
        """The last advertised version, if any."""
        ...

    def wait_head_hint(self, after_version: int, timeout_s: float) -> HeadHint | None:
        """Wait until a version above `after_version` is advertised; None when time is up."""
        ...

    def announce_segment(self, hint: SegmentHint) -> None:
        """Say that home holds a segment of a version that may come to exist."""
        ...

    def announced_segments(self) -> list[SegmentHint]:
        """What was announced lately, oldest first, at most MAX_SEGMENT_HINTS; none of it is true
        before a manifest says so."""
        ...

    # jobs and leases

    def offer(self, jobs: Sequence[JobOffer]) -> int:
        """Put jobs up; return how many were new. Repeating an offer changes nothing.

        A settled or parked job is opened again by an offer with a higher `attempt` (its result
        was corrupt, or somebody decided to try once more).
        """
        ...

    def grant(
        self,
        actor_id: str,
        version: int,
        policy_hash: str,
        lease_s: float,
        token: str | None = None,
    ) -> Lease | None:
        """Lease one job to a live, willing actor: its own share first, then the open pool.

        Only jobs whose gate holds (version, policy_hash). The time is `lease_s`, doubled per
        earlier attempt of the job. `token` is made by the caller (or here when None): asking
        again with the token of a lease that still runs returns that lease.
        """
        ...

    def limit_pulls(self, pulls: Mapping[str, Pull], for_s: float) -> None:
        """Limit what actors take of the open pool, for `for_s`; replaces earlier limits.

        An actor takes up to `left` jobs. One that holds nothing and has none left gets another
        handful if it is one of the sharers: half an even part of the pool, at least one. Actors
        that are not named are not limited, so that nothing waits for somebody who cannot come.
        """
        ...

    def renew(
        self, job_id: str, token: str, tokens_done: int, lease_s: float, max_lease_s: float
    ) -> bool:
        """Extend to `lease_s` from now, only if `tokens_done` grew since the last renewal.

        Never beyond `max_lease_s` from the grant; both are doubled per earlier attempt. False:
        no progress, not the holder, expired, or at the limit; the old expiry stands.
        """
        ...

    def hand_back(self, job_id: str, token: str) -> bool:
        """Return a job unfinished: open pool, attempt unchanged, no sample. False: not held."""
        ...

    def settle(self, settlement: Settlement) -> Settled:
        """Claim a job done. Checks in this order, first answer wins (`settle.py`)."""
        ...

    def take_settled(self, max_count: int, timeout_s: float) -> list[AdmittedResult]:
        """The oldest admitted results, at most `max_count`; waits up to `timeout_s` for one.

        For one trainer. Each result is returned once; one lost with a crashed trainer is offered
        anew by its successor, whose table does not have it.
        """
        ...

    def reap(self) -> list[ReapedJob]:
        """Take back what expired: leases, shares of actors that are gone, jobs past closing."""
        ...

    def withdraw(self, job_ids: Iterable[str]) -> int:
        """Close jobs with their step: no grant, and settlement is LATE. Return how many were live.

        Also forgets admitted results of these jobs that were not taken.
        """
        ...

    def job_counts(self) -> JobCounts:
        """How many jobs are open, assigned, leased, settled, parked."""
        ...

    def running_leases(self) -> list[RunningLease]:
        """Who holds what until when, by actor and job; at most the first `LISTED_MAX`."""
        ...

    def outcome_counts(self) -> dict[Settled, int]:
        """How often each answer was given, all seven present."""
        ...

    # throughput

    def throughput(self) -> dict[str, Throughput]:
        """Samples and stored average per actor."""
        ...

    def set_throughput(self, tokens_per_s: Mapping[str, float], ttl_s: float) -> None:
        """Store averages; each expires after `ttl_s`, so none outlives its use (CASE L2)."""
        ...

    def close(self) -> None:
        """Drop connections; a wait in progress ends early."""
        ...
