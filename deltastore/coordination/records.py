"""A value that is checked where it is made cannot poison a script or a trainer far away.

Every record of the coordination floor validates itself, so the writer gets InvalidInputError at
the call that is wrong, and a reader of Redis that rebuilds a record finds garbage at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from deltastore.coordination.limits import MAX_ACTORS, MAX_ATTEMPTS
from deltastore.errors import InvalidInputError, Kind
from deltastore.ids import check_name, check_version, is_sha256, is_token

MAX_PAYLOAD_BYTES = 256 * 1024  # a group's prompt as token ids; results travel through the bucket
MAX_GATE = 8  # v and v - 1 today; room for runs that allow spans
MAX_NOTE_CHARS = 200
MAX_TOKENS = 2**40
MAX_RESULT_BYTES = 2**40
MAX_RATE_TOKENS_PER_S = 1e9  # no engine makes more; a larger figure is a broken clock
MIN_TTL_S = 0.05  # below three round trips over a WAN a renewal cannot arrive in time (CASE L11)
MAX_TTL_S = 86_400.0
MAX_WAIT_S = 3_600.0
MAX_TIME_S = 1e10  # the year 2286; in milliseconds still exact in a script's numbers


def _refuse(message: str, hint: str, kind: Kind = Kind.SETTING) -> InvalidInputError:
    return InvalidInputError(message, kind=kind, hint=hint)


def check_ttl_s(ttl_s: float, what: str = "ttl_s") -> float:
    """Return `ttl_s` if a lease or heartbeat can live on it, else raise InvalidInputError."""
    if isinstance(ttl_s, bool) or not MIN_TTL_S <= ttl_s <= MAX_TTL_S:  # NaN fails both
        raise _refuse(
            f"{what} {ttl_s!r} is not allowed", f"use {MIN_TTL_S} to {MAX_TTL_S:.0f} seconds"
        )
    return float(ttl_s)


def check_wait_s(timeout_s: float) -> float:
    """Return `timeout_s` if a call may wait that long (0: not at all), else raise."""
    if isinstance(timeout_s, bool) or not 0 <= timeout_s <= MAX_WAIT_S:
        raise _refuse(f"timeout_s {timeout_s!r} is not allowed", f"use 0 to {MAX_WAIT_S:.0f}")
    return float(timeout_s)


def check_hash(policy_hash: str, what: str = "policy hash") -> str:
    """Return `policy_hash` if it is 64 hex digits, else raise InvalidInputError."""
    if not is_sha256(policy_hash):
        raise _refuse(f"{what} {policy_hash!r} is not a SHA-256", "use 64 lower-case hex digits")
    return policy_hash


def check_token(token: str) -> str:
    """Return `token` if it is 32 hex digits, else raise InvalidInputError."""
    if not is_token(token):
        raise _refuse(f"lease token {token!r} is not 128 bits", "make it with ids.new_token()")
    return token


def check_count(value: int, what: str, maximum: int, minimum: int = 0) -> int:
    """Return `value` if it is a whole number in minimum..maximum, else raise InvalidInputError."""
    if type(value) is not int or not minimum <= value <= maximum:  # a bool is no count
        raise _refuse(f"{what} {value!r} is not allowed", f"use {minimum} to {maximum}")
    return value


def _check_note(note: str, what: str) -> None:
    if len(note) > MAX_NOTE_CHARS or not note.isprintable():
        raise _refuse(
            f"{what} is longer than {MAX_NOTE_CHARS} characters or not printable",
            "shorten it to one line",
        )


def _check_instant_s(value: float, what: str) -> None:
    if isinstance(value, bool) or not 0 <= value <= MAX_TIME_S:  # NaN fails both
        raise _refuse(f"{what} {value!r} is not a time", "use seconds since the epoch")


class ActorState(StrEnum):
    """What an actor says of itself; LOST is what its silence says."""

    JOINING = "joining"
    ACTIVE = "active"
    DRAINING = "draining"
    """Finishes or hands back what it holds; takes nothing new."""
    POISONED = "poisoned"
    """Its weights are at no version: it refuses to serve until it has re-anchored."""
    LOST = "lost"
    """Its heartbeat expired. Never reported by an actor, only derived."""


@dataclass(frozen=True, slots=True)
class ActorRecord:
    """What does not change while an actor takes part."""

    actor_id: str
    region: str
    engine: str
    threads: int
    joined_note: str = ""

    def __post_init__(self) -> None:
        """Refuse names that cannot stand in a key and notes that are not one short line."""
        check_name(self.actor_id, "actor id")
        check_name(self.region, "region")
        check_name(self.engine, "engine")
        check_count(self.threads, "threads", 65_536, 1)
        _check_note(self.joined_note, "joined_note")


@dataclass(frozen=True, slots=True)
class ActorStatus:
    """What a heartbeat carries."""

    state: ActorState
    active_version: int | None = None
    policy_hash: str | None = None
    staged_version: int | None = None
    tokens_per_s: float = 0.0
    staleness: int = 0
    note: str = ""

    def __post_init__(self) -> None:
        """Refuse a state only silence may claim, a version without its hash, and bad numbers."""
        if self.state is ActorState.LOST:
            raise _refuse("an actor cannot report itself lost", "report draining, then leave")
        if (self.active_version is None) != (self.policy_hash is None):
            raise _refuse("active_version and policy_hash go together", "give both or neither")
        if self.active_version is not None and self.policy_hash is not None:
            check_version(self.active_version)
            check_hash(self.policy_hash)
        if self.staged_version is not None:
            check_version(self.staged_version)
        if isinstance(self.tokens_per_s, bool) or not (
            0 <= self.tokens_per_s <= MAX_RATE_TOKENS_PER_S
        ):
            raise _refuse(f"tokens_per_s {self.tokens_per_s!r} is not a rate", "measure it again")
        check_count(self.staleness, "staleness", 2**40)
        _check_note(self.note, "note")


@dataclass(frozen=True, slots=True)
class Member:
    """An actor as the fleet sees it."""

    record: ActorRecord
    status: ActorStatus
    last_heartbeat_s: float
    alive: bool

    @property
    def actor_id(self) -> str:
        """The actor's name."""
        return self.record.actor_id

    @property
    def state(self) -> ActorState:
        """What it reported, or LOST once its heartbeat has expired."""
        return self.status.state if self.alive else ActorState.LOST


@dataclass(frozen=True, slots=True)
class HeadHint:
    """The newest version somebody announced. May be stale or wrong: the bucket decides."""

    version: int
    policy_hash: str
    generation: int

    def __post_init__(self) -> None:
        """Refuse what no manifest could carry."""
        check_version(self.version)
        check_hash(self.policy_hash)
        check_count(self.generation, "generation", 2**52)


@dataclass(frozen=True, slots=True)
class JobOffer:
    """One unit of work (a whole GRPO group) and who may do it at which versions."""

    job_id: str
    payload: bytes
    gate: tuple[tuple[int, str], ...]
    """The (version, policy hash) pairs a lease on this job may be bound to."""
    expected_tokens: int
    assigned_to: str | None = None
    """The actor it is dealt to; None puts it in the open pool."""
    closes_at_s: float | None = None
    """Redis TIME after which its step is closed: no grant, and settlement is late."""
    attempt: int = 1

    def __post_init__(self) -> None:
        """Refuse an empty gate and anything above its limit."""
        check_name(self.job_id, "job id")
        if len(self.payload) > MAX_PAYLOAD_BYTES:
            raise _refuse(
                f"payload of job {self.job_id} has {len(self.payload)} bytes",
                f"keep it within {MAX_PAYLOAD_BYTES}; put large inputs into the bucket",
                Kind.PAYLOAD,
            )
        if not 1 <= len(self.gate) <= MAX_GATE:
            raise _refuse(
                f"job {self.job_id} has {len(self.gate)} gate entries", f"give 1 to {MAX_GATE}"
            )
        for version, policy_hash in self.gate:
            check_version(version)
            check_hash(policy_hash)
        check_count(self.expected_tokens, "expected_tokens", MAX_TOKENS)
        if self.assigned_to is not None:
            check_name(self.assigned_to, "actor id")
        if self.closes_at_s is not None:
            _check_instant_s(self.closes_at_s, "closes_at_s")
        check_count(self.attempt, "attempt", MAX_ATTEMPTS, 1)


@dataclass(frozen=True, slots=True)
class Lease:
    """The time-bounded right to do one job at one version."""

    job_id: str
    payload: bytes
    token: str
    version: int
    policy_hash: str
    granted_at_s: float
    expires_at_s: float
    attempt: int
    counts_as_sample: bool
    """False for the first lease after a join: caches are cold, so its speed misleads."""

    @property
    def lease_s(self) -> float:
        """How long it runs without renewal: what was asked, doubled per earlier attempt.

        Shorter where the job's step closes before that.
        """
        return self.expires_at_s - self.granted_at_s


@dataclass(frozen=True, slots=True)
class Settlement:
    """An actor's claim to have done a job; the result itself lies in its region's bucket."""

    job_id: str
    token: str
    actor_id: str
    version: int
    policy_hash: str
    result_sha256: str
    result_bytes: int
    tokens: int
    region: str

    def __post_init__(self) -> None:
        """Refuse a claim that could never be looked up."""
        check_name(self.job_id, "job id")
        check_token(self.token)
        check_name(self.actor_id, "actor id")
        check_version(self.version)
        check_hash(self.policy_hash)
        check_hash(self.result_sha256, "result_sha256")
        check_count(self.result_bytes, "result_bytes", MAX_RESULT_BYTES)
        check_count(self.tokens, "tokens", MAX_TOKENS)
        check_name(self.region, "region")


@dataclass(frozen=True, slots=True)
class Pull:
    """How much of the open pool an actor may take, so that a slow one does not take what others
    would have finished before it.
    """

    left: int
    """Jobs it may take at once, beside its own share."""
    sharers: int
    """How many actors share what is left when somebody runs out of work; 0: not this one."""

    def __post_init__(self) -> None:
        """Refuse what a script could not count with."""
        check_count(self.left, "left", 2**31)
        check_count(self.sharers, "sharers", MAX_ACTORS)


@dataclass(frozen=True, slots=True)
class RunningLease:
    """A lease as somebody who only watches sees it: no token, so nothing to settle with."""

    actor_id: str
    job_id: str
    expires_at_s: float
    """The moment after which its result is late, as things stand."""

    def __post_init__(self) -> None:
        """Refuse what no lease could be."""
        check_name(self.actor_id, "actor id")
        check_name(self.job_id, "job id")
        _check_instant_s(self.expires_at_s, "expires_at_s")


class Settled(StrEnum):
    """The one answer to a settlement. Append only: metrics match on the values."""

    ADMITTED = "admitted"
    LATE = "late"
    WRONG_VERSION = "wrong_version"
    WRONG_HASH = "wrong_hash"
    NOT_HOLDER = "not_holder"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class AdmittedResult:
    """A settlement that passed the first gate; the trainer's own table is the last."""

    settlement: Settlement
    granted_at_s: float
    settled_at_s: float

    def __post_init__(self) -> None:
        """Refuse times that are not times."""
        _check_instant_s(self.granted_at_s, "granted_at_s")
        _check_instant_s(self.settled_at_s, "settled_at_s")


class ReapOutcome(StrEnum):
    """What became of a job that nobody finished in time."""

    REOPENED = "reopened"
    """Back in the open pool, with one attempt more and twice the time."""
    PARKED = "parked"
    """Expired too often: nobody gets it again; counted, and reported."""
    RELEASED = "released"
    """Dealt to an actor that is gone: back in the open pool, attempt unchanged."""
    CLOSED = "closed"
    """Its step closed before anybody finished it."""


@dataclass(frozen=True, slots=True)
class ReapedJob:
    """A job that `reap` took away from somebody."""

    job_id: str
    actor_id: str | None
    attempt: int
    """The attempt it is at now."""
    outcome: ReapOutcome


@dataclass(frozen=True, slots=True)
class JobCounts:
    """How many jobs are where."""

    open: int
    assigned: int
    leased: int
    settled: int
    parked: int


@dataclass(frozen=True, slots=True)
class ThroughputSample:
    """One lease as a measurement: transfer and decoding in one signal."""

    at_s: float
    """Redis TIME of the end; strictly increasing per actor, so it serves as a cursor."""
    elapsed_s: float
    tokens: int
    """0 for an expired lease."""
    counts: bool
    """False for the first lease after a join."""

    def __post_init__(self) -> None:
        """Refuse what cannot have been measured."""
        _check_instant_s(self.at_s, "at_s")
        _check_instant_s(self.elapsed_s, "elapsed_s")
        check_count(self.tokens, "tokens", MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class Throughput:
    """What is known of one actor's speed."""

    samples: tuple[ThroughputSample, ...]
    """The newest ones, oldest first, at most `MAX_SAMPLES`."""
    tokens_per_s: float | None
    """The average the trainer stored, None if there is none or it has expired."""


def check_rate(tokens_per_s: float) -> float:
    """Return a stored average if it is finite and possible, else raise InvalidInputError."""
    if isinstance(tokens_per_s, bool) or not 0 <= tokens_per_s <= MAX_RATE_TOKENS_PER_S:
        raise _refuse(f"tokens_per_s {tokens_per_s!r} is not a rate", "measure it again")
    return float(tokens_per_s)
