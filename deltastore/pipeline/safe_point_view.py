"""Settings and state of a safe point's driver: a bad setting is refused before an engine pauses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from deltastore.config import require
from deltastore.errors import ApplyError, DeltastoreError, Kind
from deltastore.pipeline.engine_control import PauseMode

if TYPE_CHECKING:
    from deltastore.events import SafePointPassed
    from deltastore.pipeline.engine_control import RankStatus, ServedVersion


@dataclass(frozen=True, slots=True)
class SafePointSettings:
    """When an engine pauses, and how long anything may take.

    Args:
        mode: what becomes of requests in flight.
    """

    mode: PauseMode = PauseMode.KEEP
    min_interval_s: float = 2.0  # between two activations: each computes running requests' KV anew
    jitter_s: float = 1.0  # a fleet that learns of a version at once shall not pause at once
    look_s: float = 0.5  # between two looks at what is staged
    settle_s: float = 2.0  # for all ranks to have staged the same; then the slow ones map it paused
    reset_attempts: int = 5  # blocks that an offload still holds are free a moment later
    reset_retry_s: float = 0.2
    retry_min_s: float = 1.0  # after a failure; doubled each time
    retry_max_s: float = 60.0
    hold_max_s: float = 60.0  # requests wait for a held engine no longer than this

    def __post_init__(self) -> None:
        for name in ("min_interval_s", "jitter_s", "settle_s", "reset_retry_s", "hold_max_s"):
            require(0 <= getattr(self, name) < 1e6, name, getattr(self, name), "0 or more seconds")
        require(0 < self.look_s <= 60, "look_s", self.look_s, "above 0, at most 60 seconds")
        require(1 <= self.reset_attempts <= 100, "reset_attempts", self.reset_attempts, "1 to 100")
        require(
            0 < self.retry_min_s <= self.retry_max_s,
            "retry_min_s",
            self.retry_min_s,
            "above 0, at most retry_max_s",
        )


class Turn(StrEnum):
    """What one turn of the driver came to."""

    NOTHING = "nothing"
    """Nothing was due."""
    ACTIVATED = "activated"
    """The engine serves another version than before."""
    FAILED = "failed"
    """It serves what it served before; `view().trouble` says why."""
    HELD = "held"
    """It serves nothing: paused, and `view().held` says why."""
    RECOVERED = "recovered"
    """It was held and serves again."""


@dataclass(frozen=True, slots=True)
class SafePointView:
    """Where an engine is, for whoever asks. Immutable; a new one replaces it.

    Args:
        served: the version that forward passes use; None before it is known.
        staged, head: as the foremost rank said last.
        held: why the engine is out of rotation; empty when it is not.
        trouble: what failed last, or keeps ranks from staging; empty when nothing does.
        passed: seconds per stage of the last activation.
        ranks: what every rank said last while nothing was in doubt.
    """

    served: ServedVersion | None = None
    staged: int | None = None
    head: int | None = None
    held: str = ""
    trouble: str = ""
    passed: SafePointPassed | None = None
    ranks: tuple[RankStatus, ...] = ()


def told(err: DeltastoreError) -> str:
    """Kind, message and way out, for people."""
    return f"{err.kind.value}: {err}"


def nothing_came(base: ServedVersion) -> ApplyError:
    """An update that was answered with yes and did nothing."""
    return ApplyError(
        f"the engine took an update and is still at version {base.version}",
        kind=Kind.NOT_STAGED,
        hint="the ranks' status and what they have staged contradict each other: see their log",
    )
