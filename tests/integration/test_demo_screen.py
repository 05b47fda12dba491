"""What is seen while the demo runs: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from deltastore.coordination.backend import ActorRecord, ActorState, ActorStatus
from deltastore.coordination.memory import MemoryCoordination
from deltastore.events import ActorJoined, VersionPublished
from deltastore.observability.jsonl import JsonlSink
from deltastore.testing.clock import FakeClock
from workers.demo.screen import Screen
from workers.demo.watch import Watch

if TYPE_CHECKING:
    from pathlib import Path

VERSION = VersionPublished(1, 1, 1, "ab" * 32, 10, 1000, 40, 2000, 0.1, 0.1, 0.1, 0.1, 0.4)


@pytest.fixture
def clock() -> FakeClock:
    """Time that tests move."""
    return FakeClock()


@pytest.fixture
def coordination(clock: FakeClock) -> MemoryCoordination:
    """A fleet of one active actor."""
    fleet = MemoryCoordination(clock)
    fleet.register(ActorRecord("a1", "east", "transformers", 1), ttl_s=10.0)
    fleet.heartbeat("a1", ActorStatus(ActorState.ACTIVE, 1, "ab" * 32, tokens_per_s=52), 10.0)
    return fleet


@pytest.fixture
def watch(tmp_path: Path, clock: FakeClock, coordination: MemoryCoordination) -> Watch:
    """A watch over two files of events."""
    with JsonlSink(tmp_path / "trainer.jsonl", clock) as sink:
        sink(VERSION)
        sink(replace(VERSION, version=2, step_first=2, step_last=2))
    with JsonlSink(tmp_path / "a1.jsonl", clock) as sink:
        sink(ActorJoined("a1", 1, "checkpoint v0 + 1 deltas", 40, 0.5))
    return Watch(tmp_path, coordination, clock)


def _text(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_plain_output_says_each_version_once(watch: Watch) -> None:
    """Without a terminal a version is said when the next is there, the last at the end."""
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    with Screen(console, watch.view) as screen:
        watch.poll()
        screen.update(watch.actors, "step 1 of 2")
        screen.update(watch.actors, "step 1 of 2")
        assert _text(console).count("v1  step 1") == 1
        assert "v2  step 2" not in _text(console)
        screen.update(watch.actors, "step 2 of 2", last=True)
    text = _text(console)
    assert text.count("v2  step 2") == 1
    assert "a1 joined at version 1 from checkpoint v0 + 1 deltas: 40 bytes in 0.5 s" in text
    assert "a1@east active v1" in text
    assert "\x1b" not in text


def test_a_terminal_gets_the_whole_table_at_the_end(watch: Watch) -> None:
    """On a terminal the last view stays and has every version, however low the window is."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=10)
    with Screen(console, watch.view) as screen:
        watch.poll()
        screen.update(watch.actors, "step 1 of 2")
        screen.update(watch.actors, "step 2 of 2", last=True)
    last = _text(console).rsplit("step 2 of 2", 1)[1]
    assert "versions" in last
    assert "active" in last
    assert last.count("50x") == 2


def test_an_actor_that_left_is_shown_where_it_was(
    watch: Watch, clock: FakeClock, coordination: MemoryCoordination
) -> None:
    """Leaving politely keeps the last version on the screen; being killed by the demo does not."""
    watch.poll()
    coordination.leave("a1")
    clock.advance_s(2.0)
    watch.poll()
    assert [(actor.actor, actor.state, actor.version) for actor in watch.actors] == [
        ("a1", "left", 1)
    ]
    watch.end_actor("a1")
    assert watch.actors == []
