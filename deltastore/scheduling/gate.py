"""An actor two versions behind makes results the loss must drop: it gets no work until it is near.

The gate of head version v holds v and v - 1 with their policy hashes. A version number alone
admits nobody: another history can have the same number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_LAG = 1  # v and v - 1: one step asynchronous
_WORKING = frozenset({"active", "joining"})


class StatusLike(Protocol):
    """What an actor reports."""

    @property
    def active_version(self) -> int | None:
        """The version its weights are at."""
        ...

    @property
    def policy_hash(self) -> str | None:
        """The policy hash of that version."""
        ...


class MemberLike(Protocol):
    """A member of the fleet, as `coordination.backend.Member` is."""

    @property
    def status(self) -> StatusLike:
        """Its last report."""
        ...

    @property
    def alive(self) -> bool:
        """Whether its heartbeat has not expired."""
        ...

    @property
    def state(self) -> str:
        """joining, active, draining, poisoned or lost."""
        ...


def gate_for(
    head_version: int, hashes: Mapping[int, str], max_lag: int = MAX_LAG
) -> tuple[tuple[int, str], ...]:
    """The (version, policy hash) pairs a job made now may be done at, newest first."""
    versions = range(head_version, max(-1, head_version - max_lag - 1), -1)
    return tuple((version, hashes[version]) for version in versions if version in hashes)


def eligible(
    member: MemberLike, head_version: int, hashes: Mapping[int, str], max_lag: int = MAX_LAG
) -> int | None:
    """The version `member` may work at now, or None."""
    if not member.alive or member.state not in _WORKING:
        return None
    version, policy_hash = member.status.active_version, member.status.policy_hash
    if version is None or (version, policy_hash) not in gate_for(head_version, hashes, max_lag):
        return None
    return version
