"""A driver that knows one engine cannot be tested without it: it speaks to a protocol instead.

`EngineControl` is all that a safe point needs of an engine, synchronous, every wait bounded by
whoever implements it. `RankStatus` is what each worker rank of the engine says of itself; it comes
over wires that carry strings and numbers only, so it is parsed, not trusted.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from deltastore.config import require
from deltastore.errors import ApplyError, FormatError, Kind
from deltastore.ids import is_sha256
from deltastore.storage.store_use import StoreUse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NEWEST: Literal["newest"] = "newest"
Wanted: TypeAlias = "int | Literal['newest']"
MAX_TEXT_CHARS = 2000
MAX_STORES = 8


class PauseMode(StrEnum):
    """What becomes of requests in flight while weights change."""

    KEEP = "keep"
    """They wait and go on at the new version; their cache is computed anew."""
    WAIT = "wait"
    """They finish at the old version first."""
    ABORT = "abort"
    """They end at once with what they have."""


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """A version and the history it belongs to: what an engine serves."""

    version: int
    policy_hash: str

    def __str__(self) -> str:
        """As the engine's weight version and the response headers write it."""
        return f"{self.version}:{self.policy_hash}"


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What one worker rank says of itself.

    Args:
        active: the version that its weights are at, proved; None before it follows.
        staged: the version that an update would bring, if one is staged.
        head: the newest version that its stager knows of.
        poisoned: why its weights are in doubt; empty when they are not.
        trouble: what keeps it from staging, for people; empty when nothing does.
        coverage: how the engine's parameters are covered, as the loader trace found it.
        dense_share: part of the layout's bytes that can only be reloaded whole, 0 to 1.
        last_pause_s: seconds that its last activation took.
        asleep: whether memory of the engine is away: nothing may run, nothing may be written.
        store: how it has used its store, and the host's stager has.
    """

    rank: int
    active: ServedVersion | None = None
    staged: int | None = None
    head: int | None = None
    poisoned: str = ""
    trouble: str = ""
    coverage: Mapping[str, Any] = field(default_factory=dict)
    dense_share: float = 0.0
    shadow_bytes: int = 0
    scratch_bytes: int = 0
    last_pause_s: float | None = None
    asleep: bool = False
    store: tuple[StoreUse, ...] = ()

    @classmethod
    def parse(cls, document: object) -> RankStatus:
        """Read what `deltastore_status` returned; ApplyError(engine) when it is not that."""
        if not isinstance(document, dict):
            raise _not_a_status(document)
        try:
            return cls(
                rank=_number(document["rank"]),
                active=_served(document.get("active")),
                staged=_maybe(document.get("staged")),
                head=_maybe(document.get("head")),
                poisoned=_text(document.get("poisoned", "")),
                trouble=_text(document.get("trouble", "")),
                coverage=dict(document.get("coverage") or {}),
                dense_share=float(document.get("dense_share") or 0.0),
                shadow_bytes=_number(document.get("shadow_bytes") or 0),
                scratch_bytes=_number(document.get("scratch_bytes") or 0),
                last_pause_s=_seconds(document.get("last_pause_s")),
                asleep=_yes(document.get("asleep", False)),
                store=_uses(document.get("store")),
            )
        except (KeyError, TypeError, ValueError) as err:
            raise _not_a_status(document) from err


@dataclass(frozen=True, slots=True)
class ControlBounds:
    """The longest that calls to an engine may take, in seconds."""

    initialise_s: float = 1800.0  # trace, whole fingerprint, perhaps a rebuild from the bucket
    status_s: float = 60.0  # answered between two forward passes: a long prefill is one
    pause_s: float = 60.0
    drain_max_s: float = 60.0  # with `wait`: how long requests may go on before they are kept
    update_s: float = 300.0  # seconds of writing at most; the rest is for ranks that are behind
    reset_s: float = 60.0
    resume_s: float = 60.0
    re_anchor_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            require(0 < getattr(self, name) < 1e6, name, getattr(self, name), "positive seconds")


class EngineControl(Protocol):
    """What a safe point needs of an engine. Every call is bounded in time.

    Except where the engine's core works in the caller's own process (`LLMControl` says when): there
    is nobody else then who could wait for an answer.

    Every method raises a DeltastoreError when it fails: ApplyError(engine) when the engine said no
    or died, ApplyError(engine_timeout) when it did not answer in time. After the latter nobody
    knows what the engine did: ask for its status.
    """

    def initialise(self) -> None:
        """Let every rank find the version that it is at, and begin to stage. Idempotent.

        Only while paused: ranks that are at no version of the run write the newest.
        """
        ...

    def status(self) -> list[RankStatus]:
        """What every rank says of itself, at least one."""
        ...

    def pause(self, mode: PauseMode) -> None:
        """Keep forward passes out, treat requests in flight by `mode`, and clear caches.

        `wait` is `keep` for requests that have not ended after a bound of the implementation.
        """
        ...

    def is_paused(self) -> bool:
        """Whether all forward passes are kept out, whoever paused the engine."""
        ...

    def update(self, wanted: Wanted) -> None:
        """Bring every rank to a staged version, or leave every rank at the one it has."""
        ...

    def reset_caches(self) -> bool:
        """Drop prefix caches and external connectors' caches; whether all of them are empty."""
        ...

    def resume(self) -> None:
        """Let forward passes in again. Harmless when they are."""
        ...

    def re_anchor(self) -> None:
        """Have every rank write the newest version whole, from the bucket. Only while paused."""
        ...


def agreed(statuses: Sequence[RankStatus]) -> ServedVersion | None:
    """The version that all ranks are at, when none is in doubt; None when they do not agree."""
    active = statuses[0].active if statuses else None
    clean = all(not status.poisoned and status.active == active for status in statuses)
    return active if clean else None


def doubt(statuses: Sequence[RankStatus]) -> str:
    """Why the ranks must not serve, for people; empty when they agree."""
    if agreed(statuses) is not None:
        return ""
    poisoned = [f"rank {one.rank}: {one.poisoned}" for one in statuses if one.poisoned]
    if poisoned:
        return "; ".join(poisoned)[:MAX_TEXT_CHARS]
    places = sorted({str(one.active)[:21] for one in statuses})
    return f"the ranks are at different versions: {', '.join(places)}"


def unfollowed(statuses: Sequence[RankStatus]) -> bool:
    """Whether no rank follows a run yet, and none is in doubt: they hold what they loaded."""
    return all(one.active is None and not one.poisoned for one in statuses)


def asleep(statuses: Sequence[RankStatus]) -> bool:
    """Whether memory of any rank is away."""
    return any(one.asleep for one in statuses)


def _served(part: object) -> ServedVersion | None:
    if part is None:
        return None
    if not isinstance(part, dict) or not is_sha256(str(part["policy_hash"])):
        raise ValueError("not a version")
    return ServedVersion(_number(part["version"]), part["policy_hash"])


def _uses(part: object) -> tuple[StoreUse, ...]:
    """What can be read of it: numbers for people are no reason to doubt a rank."""
    found = []
    for row in part[:MAX_STORES] if isinstance(part, list) else ():
        with suppress(FormatError):
            found.append(StoreUse.parse(row))
    return tuple(found)


def _number(part: object) -> int:
    if isinstance(part, bool) or not isinstance(part, int) or part < 0:
        raise ValueError("not a number")
    return part


def _maybe(part: object) -> int | None:
    return None if part is None else _number(part)


def _seconds(part: object) -> float | None:
    if part is None:
        return None
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 <= part < 1e9:
        raise ValueError("not seconds")
    return float(part)


def _yes(part: object) -> bool:
    if not isinstance(part, bool):
        raise TypeError("neither true nor false")
    return part


def _text(part: object) -> str:
    if not isinstance(part, str):
        raise TypeError("not a text")
    return part[:MAX_TEXT_CHARS]


def _not_a_status(document: object) -> ApplyError:
    return ApplyError(
        f"a rank's status is not one: {str(document)[:200]!r}",
        kind=Kind.ENGINE,
        hint="the engine's workers must run the same release of deltastore as this process",
    )
