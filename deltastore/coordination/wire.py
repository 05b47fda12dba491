"""Anybody with a Redis password can write garbage there: what is read back is checked like input.

Records travel as JSON objects with exactly the fields of their dataclass. Decoding rebuilds the
record through its own checks and raises FormatError(`payload`) for everything else.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from deltastore.coordination.limits import MAX_SEGMENT_HINTS
from deltastore.coordination.records import (
    ActorRecord,
    ActorState,
    ActorStatus,
    AdmittedResult,
    HeadHint,
    JobOffer,
    Pull,
    RunningLease,
    Settlement,
    ThroughputSample,
    check_rate,
)
from deltastore.coordination.segment_hint import SegmentHint
from deltastore.errors import FormatError, InvalidInputError, Kind

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

MAX_TEXT_BYTES = 64 * 1024  # the largest record is a sample list, below 4 KiB


def to_ms(seconds: float) -> int:
    """Whole milliseconds, the unit of every stored time; never 0 for a positive time."""
    return max(1, round(seconds * 1000)) if seconds > 0 else 0


def to_s(milliseconds: int) -> float:
    """Seconds of a stored time."""
    return milliseconds / 1000


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _garbage(what: str, why: str) -> FormatError:
    return FormatError(
        f"Redis holds garbage where {what} belongs: {why}",
        kind=Kind.PAYLOAD,
        hint="check who else writes to this Redis; flushing the run's keys only repeats work",
    )


def _load(text: object, what: str) -> Any:
    if not isinstance(text, bytes) or len(text) > MAX_TEXT_BYTES:
        raise _garbage(what, "not a short string")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as err:
        raise _garbage(what, "not JSON") from err


def _fields(value: object, names: dict[str, tuple[type, ...]], what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != names.keys():
        raise _garbage(what, f"not exactly the fields {', '.join(names)}")
    for name, types in names.items():
        if type(value[name]) not in types:
            raise _garbage(what, f"field {name} is a {type(value[name]).__name__}")
    return value


def _checked(what: str, build: Callable[..., T], *args: object, **fields: object) -> T:
    try:
        return build(*args, **fields)
    except InvalidInputError as err:
        raise _garbage(what, err.message) from err


_NONE = type(None)


def dump_record(actor: ActorRecord) -> str:
    """An actor's record as stored."""
    return _dump({name: getattr(actor, name) for name in _RECORD})


_RECORD: dict[str, tuple[type, ...]] = {
    "actor_id": (str,),
    "region": (str,),
    "engine": (str,),
    "threads": (int,),
    "joined_note": (str,),
}


def load_record(text: object) -> ActorRecord:
    """An actor's record from what Redis holds."""
    fields = _fields(_load(text, "an actor"), _RECORD, "an actor")
    return _checked("an actor", ActorRecord, **fields)


_STATUS: dict[str, tuple[type, ...]] = {
    "state": (str,),
    "active_version": (int, _NONE),
    "policy_hash": (str, _NONE),
    "staged_version": (int, _NONE),
    "tokens_per_s": (int, float),
    "staleness": (int,),
    "note": (str,),
}


def dump_status(status: ActorStatus) -> str:
    """A heartbeat's status as stored."""
    return _dump({name: getattr(status, name) for name in _STATUS})


def load_status(text: object) -> ActorStatus:
    """A heartbeat's status from what Redis holds."""
    fields = _fields(_load(text, "a status"), _STATUS, "a status")
    if fields["state"] not in set(ActorState):
        raise _garbage("a status", f"state {fields['state']!r}")
    fields["state"] = ActorState(fields["state"])
    return _checked("a status", ActorStatus, **fields)


_HINT: dict[str, tuple[type, ...]] = {
    "version": (int,),
    "policy_hash": (str,),
    "generation": (int,),
}


def dump_hint(hint: HeadHint) -> str:
    """A head hint as stored."""
    return _dump({name: getattr(hint, name) for name in _HINT})


def load_hint(text: object) -> HeadHint:
    """A head hint from what Redis holds."""
    fields = _fields(_load(text, "the head hint"), _HINT, "the head hint")
    return _checked("the head hint", HeadHint, **fields)


_SEGMENT: dict[str, tuple[type, ...]] = {
    "version": (int,),
    "number": (int,),
    "sha256": (str,),
    "size_bytes": (int,),
}


def dump_segment(hint: SegmentHint) -> str:
    """An announced segment as stored."""
    return _dump({name: getattr(hint, name) for name in _SEGMENT})


def load_segments(text: object) -> list[SegmentHint]:
    """The announced segments from what Redis holds, oldest first."""
    what = "the announced segments"
    rows = _load(text, what)
    if not isinstance(rows, list) or len(rows) > MAX_SEGMENT_HINTS:
        raise _garbage(what, "not a short list")
    hints = []
    for row in rows:
        encoded = row.encode() if isinstance(row, str) else row
        fields = _fields(_load(encoded, what), _SEGMENT, what)
        hints.append(_checked(what, SegmentHint, **fields))
    return hints


def gate_entry(version: int, policy_hash: str) -> str:
    """A (version, policy hash) pair as the scripts compare it."""
    return f"{version}:{policy_hash}"


def dump_job(job: JobOffer) -> str:
    """What the scripts need to know of an offer; the payload travels beside it."""
    fields: dict[str, object] = {
        "gate": [gate_entry(*entry) for entry in job.gate],
        "attempt": job.attempt,
        "tokens": job.expected_tokens,
    }
    if job.assigned_to is not None:
        fields["to"] = job.assigned_to
    if job.closes_at_s is not None:
        fields["closes"] = to_ms(job.closes_at_s)
    return _dump(fields)


def dump_pull(pull: Pull) -> str:
    """A limit as the grant script reads it."""
    return _dump({"left": pull.left, "sharers": pull.sharers})


_ADMITTED: dict[str, tuple[type, ...]] = {
    "job_id": (str,),
    "token": (str,),
    "actor_id": (str,),
    "version": (int,),
    "policy_hash": (str,),
    "result_sha256": (str,),
    "result_bytes": (int,),
    "tokens": (int,),
    "region": (str,),
    "granted_ms": (int,),
    "settled_ms": (int,),
}


def load_admitted(text: object) -> AdmittedResult:
    """An admitted result from what Redis holds."""
    what = "an admitted result"
    fields = _fields(_load(text, what), _ADMITTED, what)
    granted_ms, settled_ms = fields.pop("granted_ms"), fields.pop("settled_ms")
    settlement = _checked(what, Settlement, **fields)
    return _checked(what, AdmittedResult, settlement, to_s(granted_ms), to_s(settled_ms))


def load_running(member: object, deadline_ms: object) -> RunningLease:
    """A running lease from what Redis holds: `actor:job`, and its deadline."""
    what = "a running lease"
    if not isinstance(member, bytes) or not isinstance(deadline_ms, int):
        raise _garbage(what, "not an actor and a job")
    actor_id, _, job_id = member.decode("utf-8", "replace").partition(":")
    return _checked(what, RunningLease, actor_id, job_id, to_s(deadline_ms))


def load_samples(text: object) -> tuple[ThroughputSample, ...]:
    """An actor's samples from what Redis holds."""
    what = "throughput samples"
    rows = _load(text, what)
    if not isinstance(rows, list):
        raise _garbage(what, "not a list")
    samples = []
    for row in rows:
        if not isinstance(row, list) or [type(field) for field in row] != [int] * 4:
            raise _garbage(what, "not rows of four whole numbers")
        at_ms, elapsed_ms, tokens, counts = row
        sample = (to_s(at_ms), to_s(elapsed_ms), tokens, counts == 1)
        samples.append(_checked(what, ThroughputSample, *sample))
    return tuple(samples)


def dump_rate(tokens_per_s: float) -> str:
    """A stored average: decimal text that reads back as the same float."""
    return repr(float(tokens_per_s))


def load_rate(text: object, now_ms: int) -> float | None:
    """A stored average from what Redis holds; None once it has expired."""
    what = "a throughput average"
    fields = _fields(_load(text, what), {"rate": (int, float), "expires_ms": (int,)}, what)
    rate = _checked(what, check_rate, fields["rate"])
    return rate if fields["expires_ms"] >= now_ms else None
