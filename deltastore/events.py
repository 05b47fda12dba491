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
class BaselineLost(Event):
    """The bits of `version` can be proved neither here nor from home: the next one is full."""

    version: int
    message: str


@dataclass(frozen=True, slots=True)
class StageFinished(Event):
    """One stage of a version's way is over; stages overlap.

    `stage` is capture (reading and comparing the source), encode (summed over threads), upload
    (first put to last confirmed body), commit (manifest and hint), copy (bodies a region took from
    home), catch_up (a region began again at an anchor) or replay (a version was rebuilt from the
    bucket). `parts` are the objects it handled.
    """

    region: str
    version: int
    stage: str
    parts: int
    size_bytes: int
    seconds: float


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

    `stage_s` covers fetch, verification and decoding; `region` is the one it was fetched from, in
    `parts` objects. (Lines that older releases wrote say neither.)
    """

    actor: str
    version: int
    size_bytes: int
    nnz: int
    stage_s: float
    region: str = ""
    parts: int = 0


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
class SafePointPassed(Event):
    """An engine serves another version: paused, written, caches reset, resumed.

    `pause_s` runs until no forward pass is in flight (with mode `wait`, until requests have ended);
    in `write_s`, `reset_s` and `resume_s` none can run.
    """

    actor: str
    base_version: int
    version: int
    policy_hash: str
    mode: str
    pause_s: float
    write_s: float
    reset_s: float
    resume_s: float


@dataclass(frozen=True, slots=True)
class EngineHeld(Event):
    """An engine is out of rotation: paused, and its health says so. `version` is what it served."""

    actor: str
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class EngineReleased(Event):
    """An engine that was held serves again."""

    actor: str
    version: int
    policy_hash: str
    held_s: float


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
    """A result was offered for a job.

    `outcome` is one of the seven of settling, or what the trainer made of an admitted one.
    """

    job: str
    actor: str
    outcome: str
    tokens: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class PromptParked(Event):
    """A job was not done in all its attempts: its prompt is left out of its step."""

    job: str
    attempts: int


@dataclass(frozen=True, slots=True)
class CompositeWritten(Event):
    """A region holds one more composite, made of `inputs` links of `input_bytes`."""

    base_version: int
    version: int
    inputs: int
    input_bytes: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class AnchorWritten(Event):
    """A region holds one more anchor; `chain_bytes` is what it spares a joiner."""

    version: int
    size_bytes: int
    chain_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ChainLag(Event):
    """How far the composites of a region are behind its HEAD; 0 to 7 versions is none at all."""

    head: int
    composites_missing: int
    composite_lag_versions: int


@dataclass(frozen=True, slots=True)
class FloorRaised(Event):
    """Readers of a region are told that bodies at or below `floor` will go."""

    floor: int
    previous: int


@dataclass(frozen=True, slots=True)
class ObjectsDeleted(Event):
    """Retention or the janitor deleted objects; `by` says which."""

    by: str
    objects: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MaintenanceFailed(Event):
    """A shortcut could not be made; every version can still be rebuilt without it."""

    task: str
    version: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class EventsLost(Event):
    """So many events before this one could not be written to the log (its disk was full)."""

    count: int


EventSink: TypeAlias = Callable[[Event], None]
"""Takes events as they happen. It must not raise into the work that it is told about."""


def discard(event: Event) -> None:
    """An EventSink that keeps nothing."""


def both(first: EventSink, second: EventSink) -> EventSink:
    """An EventSink that passes every event to two."""

    def sink(event: Event) -> None:
        first(event)
        second(event)

    return sink
