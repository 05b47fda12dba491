"""An admission rule that exists only in Lua cannot be reasoned about: this is it, in plain Python.

`lua/settle.lua` is the same predicate and is tested against this one over random interleavings.
A result is admitted iff t_r <= t_expire and v_r = v_j and h_r = h(v_j) and the lease token is
current and the job is not settled. Checks run in the order below; the first that fails answers,
so that an actor learns the most useful truth: work that is over before work that is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.coordination.job import JobState
from deltastore.coordination.records import Settled

if TYPE_CHECKING:
    from deltastore.coordination.job import Job
    from deltastore.coordination.records import Settlement


def decide(job: Job | None, claim: Settlement, now_ms: int) -> Settled:
    """The one answer to `claim` on `job` at `now_ms`; changes nothing."""
    if job is None:
        return Settled.UNKNOWN
    if job.state is JobState.SETTLED:
        return Settled.DUPLICATE
    if job.state is JobState.CLOSED:
        return Settled.LATE
    grant = job.grant
    if grant is None or grant.token != claim.token:
        # A lease that expired and was reaped: its holder is late, whoever has the job now.
        return Settled.LATE if claim.token in job.expired_tokens else Settled.NOT_HOLDER
    if grant.holder != claim.actor_id:
        return Settled.NOT_HOLDER
    if now_ms > job.deadline_ms(grant):
        return Settled.LATE
    if grant.version != claim.version:
        return Settled.WRONG_VERSION
    if grant.policy_hash != claim.policy_hash:
        return Settled.WRONG_HASH
    return Settled.ADMITTED
