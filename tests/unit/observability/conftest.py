"""A small run as events: two versions, three actors, one of which joins late and one is killed."""

from __future__ import annotations

import pytest

from deltastore.events import (
    ActivationFailed,
    ActorJoined,
    BatchDealt,
    RegionCommitted,
    ResultSettled,
    StepTrained,
    VersionActivated,
    VersionPublished,
    VersionStaged,
)
from deltastore.observability.jsonl import StampedEvent
from deltastore.observability.view import ActorLive, RunView


def published(version: int, nnz: int = 1_000, delta_bytes: int = 1_250) -> VersionPublished:
    """A version of one step over a layout of 100,000 elements."""
    return VersionPublished(
        version=version,
        step_first=version,
        step_last=version,
        policy_hash="ab" * 32,
        nnz=nnz,
        elements=100_000,
        delta_bytes=delta_bytes,
        dense_bytes=200_000,
        capture_s=0.01,
        encode_s=0.25,
        upload_s=0.05,
        commit_s=0.002,
        total_s=0.3,
    )


def trained(step: int, accuracy: float) -> StepTrained:
    """A step with that sampled accuracy."""
    return StepTrained(step, step - 1, accuracy, 0.1, 1.0, 32, 0, 1, 1.0, 1.1, 0.001, 2.0, 3.0)


EVENTS = [
    StampedEvent(1_000, ActorJoined("a1", 0, "local checkpoint", 0, 0.5)),
    StampedEvent(1_100, ActorJoined("a2", 0, "anchor 0", 269_000_000, 2.5)),
    StampedEvent(1_500, BatchDealt(1, (("a1", 2), ("a2", 1), ("", 1)))),
    StampedEvent(1_700, ResultSettled("j1", "a1", "admitted", 80, 1.0)),
    StampedEvent(1_800, ResultSettled("j2", "a2", "late", 80, 9.0)),
    StampedEvent(2_000, trained(1, 0.25)),
    StampedEvent(2_100, published(1)),
    StampedEvent(2_150, RegionCommitted("west", 1, 1_250, 0.05)),
    StampedEvent(2_200, VersionStaged("a1", 1, 1_250, 1_000, 0.06)),
    StampedEvent(2_200, VersionStaged("a2", 1, 1_250, 1_000, 0.04)),
    StampedEvent(2_300, VersionActivated("a1", 0, 1, "ab" * 32, 1_000, 0.004)),
    StampedEvent(2_400, VersionActivated("a2", 0, 1, "ab" * 32, 1_000, 0.006)),
    StampedEvent(3_000, trained(2, 0.75)),
    StampedEvent(3_100, published(2, nnz=0, delta_bytes=0)),
    StampedEvent(3_200, ActivationFailed("a1", 2, "rolled_back", "fingerprint <differs>")),
    StampedEvent(3_300, ActorJoined("a3", 2, "anchor 0 and 2 deltas", 269_001_250, 3.0)),
]


@pytest.fixture
def run_events() -> list[StampedEvent]:
    """The events of the small run, oldest first."""
    return list(EVENTS)


@pytest.fixture
def view() -> RunView:
    """The view of the small run; a2 was killed."""
    folded = RunView()
    folded.fold(EVENTS)
    folded.mark(3_050, "a2 was killed (SIGKILL)")
    folded.end_actor("a2", 3_050)
    return folded


@pytest.fixture
def live() -> list[ActorLive]:
    """What membership says at the end of the small run."""
    return [
        ActorLive("a1", "east", "active", 1, 1, 52.4),
        ActorLive("a3", "west", "joining", None, 0, 0.0),
    ]
