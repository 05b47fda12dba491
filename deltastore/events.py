"""Timings mixed into manifests would change policy hashes: what happened goes to events instead.

Every part reports frozen events to an `EventSink`; logs, metrics, tables and reports only consume
them. Durations are seconds on a monotonic clock, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events; the class name is the event's kind."""


@dataclass(frozen=True, slots=True)
class VersionPublished(Event):
    """A version exists: its manifest is in the home region.

    `upload_s` runs from the first put to the last confirmed body in home and overlaps `encode_s`
    (cut-through); `total_s` is the wall time from publish() to the commit.
    """

    version: int
    step_first: int
    step_last: int
    policy_hash: str
    nnz: int
    elements: int
    delta_bytes: int
    dense_bytes: int
    capture_s: float
    encode_s: float
    upload_s: float
    commit_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class PublishFailed(Event):
    """A version could not be committed; the changes travel with the next one."""

    version: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class RegionCommitted(Event):
    """A region other than home holds a version."""

    region: str
    version: int
    size_bytes: int
    lag_s: float


@dataclass(frozen=True, slots=True)
class RegionFailed(Event):
    """A region did not take a version; it stays in the backlog."""

    region: str
    version: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class VersionStaged(Event):
    """An actor holds a verified, decoded version that is not active yet.

    `stage_s` covers fetch, verification and decoding.
    """

    actor: str
    version: int
    size_bytes: int
    nnz: int
    stage_s: float


@dataclass(frozen=True, slots=True)
class VersionActivated(Event):
    """An actor's weights are at a version, proved by fingerprint.

    `write_pause_s` is the time in which no forward pass could run.
    """

    actor: str
    base_version: int
    version: int
    policy_hash: str
    nnz: int
    write_pause_s: float


@dataclass(frozen=True, slots=True)
class ActivationFailed(Event):
    """An activation did not happen: rolled back, or the actor is poisoned."""

    actor: str
    version: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class ActorJoined(Event):
    """An actor reached a version from what it held, `via` says from what."""

    actor: str
    version: int
    via: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepTrained(Event):
    """One optimizer step of the reference trainer.

    `version` is the one its rollouts were mostly made with; `sampled_accuracy` is over all admitted
    samples; lags are in versions; `ratio_*` are importance ratios before truncation.
    """

    step: int
    version: int
    sampled_accuracy: float
    loss: float
    grad_norm: float
    samples: int
    dropped: int
    lag_max: int
    ratio_mean: float
    ratio_max: float
    mismatch_kl: float
    wait_s: float
    train_s: float


@dataclass(frozen=True, slots=True)
class BatchDealt(Event):
    """How a step's groups were split over the actors: (actor id, groups), '' is the open pool."""

    step: int
    shares: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ResultSettled(Event):
    """A result was offered for a job; `outcome` is one of the seven."""

    job: str
    actor: str
    outcome: str
    tokens: int
    elapsed_s: float


EventSink: TypeAlias = Callable[[Event], None]


def discard(event: Event) -> None:
    """An EventSink that keeps nothing."""
