"""A job's state spread over several sets can contradict itself: here it is one value.

The memory twin and the predicate work on these; the Lua scripts keep the same fields as JSON.
Times are whole milliseconds of the backend's clock, as in Redis.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class JobState(StrEnum):
    """Where a job is: three live states, three ended ones."""

    OPEN = "open"
    DEALT = "dealt"
    LEASED = "leased"
    SETTLED = "settled"
    PARKED = "parked"
    CLOSED = "closed"


LIVE = frozenset({JobState.OPEN, JobState.DEALT, JobState.LEASED})


@dataclass(slots=True)
class Grant:
    """What a lease binds."""

    token: str
    holder: str
    version: int
    policy_hash: str
    granted_ms: int
    expires_ms: int
    """The end of the lease itself; the step may close before."""
    counts: bool
    tokens_done: int = 0


@dataclass(slots=True)
class Job:
    """One offered job and all that happened to it."""

    job_id: str
    payload: bytes
    gate: frozenset[tuple[int, str]]
    sequence: int
    attempt: int
    closes_ms: int | None
    state: JobState
    dealt_to: str | None = None
    grant: Grant | None = None
    expired_tokens: frozenset[str] = frozenset()
    handed_back_token: str | None = None
    ended_order: int = field(default=0)
    """When it ended, as a count: the oldest ended names are forgotten first."""

    def deadline_ms(self, grant: Grant) -> int:
        """The moment after which a result is late: the lease ends, or the step closes."""
        if self.closes_ms is not None and self.closes_ms < grant.expires_ms:
            return self.closes_ms
        return grant.expires_ms
