"""A table and a page that each interpret events disagree: both are drawn from this one view.

`RunView` folds stamped events, in any order across processes, into rows per version and per actor.
It knows no files, no terminal and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from deltastore.events import (
    ActivationFailed,
    ActorJoined,
    BatchDealt,
    PublishFailed,
    RegionCommitted,
    RegionFailed,
    ResultSettled,
    StepTrained,
    VersionActivated,
    VersionPublished,
    VersionStaged,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deltastore.events import Event
    from deltastore.observability.jsonl import StampedEvent


@dataclass(frozen=True, slots=True)
class ActorLive:
    """What the fleet's membership says of an actor right now."""

    actor: str
    region: str
    state: str
    version: int | None
    staleness: int
    tokens_per_s: float


@dataclass(slots=True)
class VersionRow:
    """All that is known of one version."""

    version: int
    published: VersionPublished | None = None
    published_at_ms: int | None = None
    staged: dict[str, VersionStaged] = field(default_factory=dict)
    activated: dict[str, VersionActivated] = field(default_factory=dict)
    region_lag_s: dict[str, float] = field(default_factory=dict)

    @property
    def density(self) -> float | None:
        """Changed elements over all elements."""
        if self.published is None or self.published.elements == 0:
            return None
        return self.published.nnz / self.published.elements

    @property
    def ratio(self) -> float | None:
        """How many times smaller the delta is than a dense broadcast."""
        if self.published is None or self.published.delta_bytes == 0:
            return None
        return self.published.dense_bytes / self.published.delta_bytes

    @property
    def stage_s(self) -> float | None:
        """Fetch, verification and decoding, mean over the actors that staged it."""
        if not self.staged:
            return None
        return fmean(event.stage_s for event in self.staged.values())

    @property
    def activate_s(self) -> float | None:
        """The longest write pause of any actor."""
        if not self.activated:
            return None
        return max(event.write_pause_s for event in self.activated.values())


@dataclass(frozen=True, slots=True)
class StalenessPoint:
    """From `at_ms` on an actor was this many versions behind."""

    at_ms: int
    staleness: int


@dataclass(slots=True)
class ActorRow:
    """All that events say of one actor."""

    actor: str
    active_version: int | None = None
    share: int | None = None
    """Groups dealt to it in the newest step; None if it was dealt none yet."""
    joins: list[ActorJoined] = field(default_factory=list)
    failures: list[ActivationFailed] = field(default_factory=list)
    staleness: list[StalenessPoint] = field(default_factory=list)
    ended_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """Something an operator did or noticed, for the time line."""

    at_ms: int
    text: str


class RunView:
    """The rows of one run. Not thread-safe: one reader folds, the same one draws."""

    def __init__(self) -> None:
        self.versions: dict[int, VersionRow] = {}
        self.actors: dict[str, ActorRow] = {}
        self.steps: dict[int, StepTrained] = {}
        self.outcomes: dict[str, int] = {}
        self.problems: list[Mark] = []
        self.marks: list[Mark] = []
        self.pulled_groups = 0
        """Groups of the newest step that no actor was dealt: the open pool."""
        self.head: int | None = None
        self.first_ms: int | None = None
        self.last_ms: int | None = None

    def fold(self, stamped: Iterable[StampedEvent]) -> None:
        """Take in more events, oldest first; those of several files are sorted here."""
        for one in sorted(stamped, key=lambda item: item.at_ms):
            self.first_ms = one.at_ms if self.first_ms is None else min(self.first_ms, one.at_ms)
            self.last_ms = one.at_ms if self.last_ms is None else max(self.last_ms, one.at_ms)
            self._fold(one.at_ms, one.event)

    def mark(self, at_ms: int, text: str) -> None:
        """Note something that no event says."""
        self.marks.append(Mark(at_ms, text))

    def end_actor(self, actor: str, at_ms: int) -> None:
        """Say that an actor is gone: its line ends there."""
        self.actor(actor).ended_at_ms = at_ms

    def version(self, number: int) -> VersionRow:
        """The row of a version, made if it is new."""
        return self.versions.setdefault(number, VersionRow(number))

    def actor(self, name: str) -> ActorRow:
        """The row of an actor, made if it is new."""
        return self.actors.setdefault(name, ActorRow(name))

    def published(self) -> list[VersionRow]:
        """The rows of committed versions, oldest first."""
        rows = [row for row in self.versions.values() if row.published is not None]
        return sorted(rows, key=lambda row: row.version)

    def accuracy_of(self, row: VersionRow) -> float | None:
        """Sampled accuracy of the last step that a version covers."""
        if row.published is None:
            return None
        step = self.steps.get(row.published.step_last)
        return None if step is None else step.sampled_accuracy

    def accuracies(self) -> list[tuple[int, float]]:
        """(step, sampled accuracy), oldest first."""
        return [(step, event.sampled_accuracy) for step, event in sorted(self.steps.items())]

    def _fold(self, at_ms: int, event: Event) -> None:
        match event:
            case VersionPublished():
                row = self.version(event.version)
                row.published, row.published_at_ms = event, at_ms
                self.head = event.version if self.head is None else max(self.head, event.version)
                self._note_staleness(at_ms)
            case VersionStaged():
                self.version(event.version).staged[event.actor] = event
            case VersionActivated():
                self.version(event.version).activated[event.actor] = event
                self.actor(event.actor).active_version = event.version
                self._note_staleness(at_ms)
            case ActorJoined():
                actor = self.actor(event.actor)
                actor.joins.append(event)
                actor.active_version = event.version
                self._note_staleness(at_ms)
            case StepTrained():
                self.steps[event.step] = event
            case BatchDealt():
                shares = dict(event.shares)
                self.pulled_groups = shares.pop("", 0)
                for name in self.actors.keys() | shares.keys():
                    self.actor(name).share = shares.get(name, 0)
            case ResultSettled():
                self.outcomes[event.outcome] = self.outcomes.get(event.outcome, 0) + 1
            case RegionCommitted():
                self.version(event.version).region_lag_s[event.region] = event.lag_s
            case ActivationFailed():
                self.actor(event.actor).failures.append(event)
                self._problem(at_ms, f"{event.actor} did not activate {event.version}", event)
            case PublishFailed():
                self._problem(at_ms, f"version {event.version} was not committed", event)
            case RegionFailed():
                self._problem(at_ms, f"region {event.region} did not take {event.version}", event)
            case _:
                return

    def _problem(
        self, at_ms: int, what: str, event: ActivationFailed | PublishFailed | RegionFailed
    ) -> None:
        self.problems.append(Mark(at_ms, f"{what}: {event.kind}: {event.message}"))

    def _note_staleness(self, at_ms: int) -> None:
        for row in self.actors.values():
            if row.active_version is None or row.ended_at_ms is not None:
                continue
            behind = max(0, (self.head or 0) - row.active_version)
            if not row.staleness or row.staleness[-1].staleness != behind:
                row.staleness.append(StalenessPoint(at_ms, behind))
