"""A lease that a test must wait for makes it slow and flaky: here time moves when the test says so.

`Fleet` is a backend under test with its time, and short words for what actors and trainers do.
`StandingRedisTime` gives Redis a clock that stands: scripts loaded with it read the time from a
key that only the test moves, so nothing sleeps and every millisecond is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltastore.coordination.backend import (
    ActorRecord,
    ActorState,
    ActorStatus,
    Coordination,
    JobOffer,
    Lease,
    Settled,
    Settlement,
)
from deltastore.coordination.scripts import load_scripts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deltastore.coordination.scripts import Script

TTL_S = 30.0
LEASE_S = 10.0


def policy_hash_of(version: int) -> str:
    """A different 64-digit hash per version."""
    return f"{version:064x}"


def gate_of(*versions: int) -> tuple[tuple[int, str], ...]:
    """A gate that holds these versions with their right hashes."""
    return tuple((version, policy_hash_of(version)) for version in versions)


def active(version: int = 1) -> ActorStatus:
    """The status of an actor serving `version`."""
    return ActorStatus(ActorState.ACTIVE, version, policy_hash_of(version))


def claim_of(lease: Lease, actor_id: str, **changes: Any) -> Settlement:
    """The settlement of `lease` that is right in every field but `changes`."""
    fields: dict[str, Any] = {
        "job_id": lease.job_id,
        "token": lease.token,
        "actor_id": actor_id,
        "version": lease.version,
        "policy_hash": lease.policy_hash,
        "result_sha256": "ab" * 32,
        "result_bytes": 1000,
        "tokens": 100,
        "region": "eu",
    }
    return Settlement(**(fields | changes))


class StandingRedisTime:
    """Redis TIME that stands until a test moves it.

    Args:
        client: a connection to the same database as the coordination under test.
        key: where the time is kept; one per run under test.
    """

    def __init__(self, client: Any, key: str, start_s: float = 1_000_000.0) -> None:
        self._client = client
        self._key = key
        client.set(key, round(start_s * 1000))

    def scripts(self) -> Mapping[str, Script]:
        """The shipped scripts on this clock."""
        return load_scripts(
            f"local function now_ms() return tonumber(redis.call('GET', '{self._key}')) end\n"
        )

    def advance_s(self, seconds: float) -> None:
        """Move time; backwards too, as a stepped server clock does."""
        self._client.incrby(self._key, round(seconds * 1000))


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fresh backend, and its time."""

    coordination: Coordination
    advance_s: Callable[[float], None]

    def join(self, *actor_ids: str, version: int = 1) -> None:
        """Register actors and let them report `version` as active."""
        for actor_id in actor_ids:
            self.coordination.register(ActorRecord(actor_id, "eu", "test", 1), TTL_S)
            assert self.coordination.heartbeat(actor_id, active(version), TTL_S)

    def offer(self, *job_ids: str, **changes: Any) -> int:
        """Offer jobs at version 1 into the open pool, or as `changes` says."""
        fields: dict[str, Any] = {"gate": gate_of(1), "expected_tokens": 100} | changes
        return self.coordination.offer(
            [JobOffer(job_id, f"do {job_id}".encode(), **fields) for job_id in job_ids]
        )

    def grant(self, actor_id: str, version: int = 1, **changes: Any) -> Lease | None:
        """Ask for a lease at a version with its right hash."""
        fields: dict[str, Any] = {"policy_hash": policy_hash_of(version), "lease_s": LEASE_S}
        return self.coordination.grant(actor_id, version, **(fields | changes))

    def lease(self, actor_id: str, **changes: Any) -> Lease:
        """`grant`, which must succeed."""
        lease = self.grant(actor_id, **changes)
        assert lease is not None
        return lease

    def settle(self, lease: Lease, actor_id: str, **changes: Any) -> Settled:
        """Settle, right in every field but `changes`."""
        return self.coordination.settle(claim_of(lease, actor_id, **changes))
