"""One reading of events for tables and pages."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from deltastore.events import Event
from deltastore.observability.jsonl import StampedEvent
from deltastore.observability.view import RunView


@dataclass(frozen=True, slots=True)
class _SunRose(Event):
    pass


def test_version_rows_say_what_a_version_cost(view: RunView) -> None:
    """Density, ratio, mean stage time and longest pause come from the events of that version."""
    row = view.published()[0]
    assert row.density == pytest.approx(0.01)
    assert row.ratio == pytest.approx(160.0)
    assert row.stage_s == pytest.approx(0.05)
    assert row.activate_s == pytest.approx(0.006)
    assert row.region_lag_s == {"west": 0.05}
    assert view.accuracy_of(row) == 0.25


def test_an_empty_version_has_no_ratio(view: RunView) -> None:
    """Nothing changed is density 0 and no ratio, not a division by zero."""
    row = view.published()[1]
    assert row.density == 0.0
    assert row.ratio is None
    assert row.stage_s is None
    assert row.activate_s is None


def test_actor_rows_follow_staleness_until_the_actor_is_gone(view: RunView) -> None:
    """Staleness rises with HEAD, falls with activation, and ends with the actor."""
    newest = view.published()[-1].published
    assert newest is not None
    view.fold([StampedEvent(4_000, replace(newest, version=3))])
    assert [point.staleness for point in view.actors["a1"].staleness] == [0, 1, 0, 1, 2]
    assert [point.staleness for point in view.actors["a2"].staleness] == [0, 1, 0, 1]
    assert view.actors["a3"].staleness[-1].staleness == 1


def test_shares_outcomes_and_problems_are_counted(view: RunView) -> None:
    """The open pool is not an actor, answers are counted by name, failures are kept."""
    assert view.actors["a1"].share == 2
    assert view.actors["a2"].share == 1
    assert view.pulled_groups == 1
    assert "" not in view.actors
    assert view.outcomes == {"admitted": 1, "late": 1}
    assert "rolled_back" in view.problems[0].text


def test_the_order_of_files_does_not_matter(run_events: list[StampedEvent]) -> None:
    """Events of several processes fold to the same rows in whatever order the files are read."""
    mixed = list(run_events)
    random.Random(7).shuffle(mixed)
    one, other = RunView(), RunView()
    one.fold(run_events)
    other.fold(mixed)
    assert one.published() == other.published()
    assert one.accuracies() == other.accuracies() == [(1, 0.25), (2, 0.75)]
    assert one.head == other.head == 2


def test_an_unknown_event_changes_nothing(view: RunView) -> None:
    """A kind of event that the view does not draw is passed over."""
    before = view.published()
    view.fold([StampedEvent(9_000, _SunRose())])
    assert view.published() == before
