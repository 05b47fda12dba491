"""Without one tree of errors every caller guesses: retry, re-read, re-anchor or stop.

The classes group failures by what the handler does next; `kind` says precisely what went wrong.
Kinds are append-only: dashboards and scripts match on them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


class Kind(StrEnum):
    """What went wrong, precisely. Append only: names and values never change."""

    # NotFoundError
    RUN_MISSING = "run_missing"
    VERSION_MISSING = "version_missing"
    OBJECT_MISSING = "object_missing"
    BUCKET_MISSING = "bucket_missing"
    GONE = "gone"
    FILE_MISSING = "file_missing"
    # ConflictError
    RUN_EXISTS = "run_exists"
    OBJECT_EXISTS = "object_exists"
    HEAD_MOVED = "head_moved"
    OUTPUT_EXISTS = "output_exists"
    # LeaseError
    LEASE_LOST = "lease_lost"
    LEASE_HELD = "lease_held"
    FOREIGN_WRITER = "foreign_writer"
    # StorageError
    UNAVAILABLE = "unavailable"
    THROTTLED = "throttled"
    TIMEOUT = "timeout"
    CREDENTIALS = "credentials"
    CLOCK_SKEW = "clock_skew"
    NO_CONDITIONAL_PUT = "no_conditional_put"
    NO_HARD_LINKS = "no_hard_links"
    DISK_FULL = "disk_full"
    REFUSED = "refused"
    # CoordinationError
    REDIS_UNAVAILABLE = "redis_unavailable"
    REDIS_POLICY = "redis_policy"
    REDIS_MEMORY = "redis_memory"
    REDIS_SCRIPT = "redis_script"
    # FormatError
    MAGIC = "magic"
    FORMAT_VERSION = "format_version"
    LIMIT = "limit"
    ORDER = "order"
    TRUNCATED = "truncated"
    TRAILING = "trailing"
    NOT_CANONICAL = "not_canonical"
    FIELD = "field"
    ENCODING = "encoding"
    BOX = "box"
    KEY = "key"
    # IntegrityError
    DIGEST = "digest"
    FINGERPRINT = "fingerprint"
    BROKEN_CHAIN = "broken_chain"
    WRONG_BASE = "wrong_base"
    LAYOUT_MISMATCH = "layout_mismatch"
    GENERATION = "generation"
    SIGNATURE = "signature"
    ALIAS_DRIFT = "alias_drift"
    BASELINE = "baseline"
    # ApplyError
    ROLLED_BACK = "rolled_back"
    POISONED = "poisoned"
    NOT_STAGED = "not_staged"
    VOTE_TIMEOUT = "vote_timeout"
    ENGINE = "engine"
    ENGINE_TIMEOUT = "engine_timeout"
    CACHE_RESET = "cache_reset"
    # InvalidInputError
    NAME = "name"
    VERSION = "version"
    SETTING = "setting"
    URL = "url"
    CHECKPOINT = "checkpoint"
    TENSOR_NAMES = "tensor_names"
    TENSOR_SHAPE = "tensor_shape"
    TENSOR_DTYPE = "tensor_dtype"
    TENSOR_STORAGE = "tensor_storage"
    META_TENSOR = "meta_tensor"
    PAYLOAD = "payload"
    BACKLOG = "backlog"
    RANGE = "range"
    LOADER = "loader"
    COVERAGE = "coverage"
    ENGINE_VERSION = "engine_version"


class DeltastoreError(Exception):
    """Base of every error this library raises on purpose.

    Args:
        message: one sentence that names the thing that is wrong.
        kind: the precise, append-only reason.
        run, version, key: where it happened, if known.
        hint: the way out, as an instruction to the reader.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: Kind,
        run: str | None = None,
        version: int | None = None,
        key: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.run = run
        self.version = version
        self.key = key
        self.hint = hint

    def __str__(self) -> str:
        """The message, where it happened, and the way out, on one line."""
        where = [
            f"{name}={value}"
            for name, value in (("run", self.run), ("version", self.version), ("key", self.key))
            if value is not None
        ]
        text = self.message + (f" [{', '.join(where)}]" if where else "")
        return f"{text} ({self.hint})" if self.hint else text


class NotFoundError(DeltastoreError, KeyError):
    """Wait, or fall back to something else."""


class ConflictError(DeltastoreError):
    """Re-read, then decide: a manifest exists, or HEAD moved."""


class LeaseError(DeltastoreError):
    """Stop writing: the right to write is lost, or somebody else holds it."""

    def __init__(
        self,
        message: str,
        *,
        kind: Kind,
        run: str | None = None,
        version: int | None = None,
        key: str | None = None,
        hint: str | None = None,
        holder: str | None = None,
        expires_at_s: float | None = None,
    ) -> None:
        super().__init__(message, kind=kind, run=run, version=version, key=key, hint=hint)
        self.holder = holder
        self.expires_at_s = expires_at_s


class StorageError(DeltastoreError):
    """Retry later: the store is unavailable, throttles, timed out, or refuses the credentials."""


class CoordinationError(DeltastoreError):
    """Go on without Redis: work may be slower or repeated, never wrong."""


class FormatError(DeltastoreError, ValueError):
    """Never retry: these bytes are not what the specification says."""


class IntegrityError(DeltastoreError):
    """Quarantine, then re-anchor: a digest, a fingerprint or the chain does not hold."""


class ApplyError(DeltastoreError):
    """The activation was rolled back, or this actor is poisoned."""


class InvalidInputError(DeltastoreError, ValueError):
    """The caller gave something that can never work; nothing was changed."""


def error_row(err: DeltastoreError) -> dict[str, Any]:
    """An error as it travels between processes: strings and numbers; what is None is left out."""
    row = {"class": type(err).__name__, "kind": err.kind.value, "message": err.message}
    about = {"run": err.run, "version": err.version, "key": err.key, "hint": err.hint}
    return row | {name: value for name, value in about.items() if value is not None}


def error_of(row: Mapping[str, Any]) -> DeltastoreError | None:
    """The error that travelled: same class, kind, place and hint; None when the row is no error.

    What the sender of another release knows and this one does not is no error either.
    """
    found = globals().get(str(row.get("class")))
    known = {member.value: member for member in Kind}
    kind, message = known.get(str(row.get("kind"))), row.get("message")
    if not (isinstance(found, type) and issubclass(found, DeltastoreError)):
        return None
    if kind is None or not isinstance(message, str):
        return None
    about = {name: row.get(name) for name in ("run", "key", "hint")}
    version = row.get("version")
    if not all(value is None or isinstance(value, str) for value in about.values()):
        return None
    if version is not None and (isinstance(version, bool) or not isinstance(version, int)):
        return None
    return found(message, kind=kind, version=version, **about)
