"""One of several API servers leads; all say the same of the engine; settings are checked."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.adapters.vllm.server_following import ServerFollowing
from deltastore.adapters.vllm.server_settings import parse_server
from deltastore.clock import SystemClock
from deltastore.errors import InvalidInputError
from deltastore.events import ActorJoined, SafePointPassed, discard
from deltastore.pipeline.engine_control import PauseMode
from deltastore.storage.store_use import UseCounter
from deltastore.testing.faults import unavailable
from tests.unit.pipeline.scripted_engine import ScriptedEngine, served

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deltastore.events import EventSink
    from deltastore.storage.store_use import StoreUse

PROMPT = {"min_interval_s": 0, "jitter_s": 0, "poll_s": 0.01}


def settings(folder: Path, **more: Any) -> Any:
    """Settings of a server that looks often."""
    return parse_server({"run": "file:///r/x", "folder": str(folder), **PROMPT, **more})


def following(folder: Path, engine: ScriptedEngine, sink: EventSink = discard) -> ServerFollowing:
    """The follower of one API server of that engine."""
    return ServerFollowing(engine, settings(folder), SystemClock(), server="s:8000", sink=sink)


def eventually(true: Callable[[], bool]) -> None:
    """Wait until it holds, at most ten seconds."""
    for _ in range(1000):
        if true():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came to that")


def test_a_server_follows_in_the_background(tmp_path: Path) -> None:
    """A staged version is activated, shown, and told."""
    engine, events = ScriptedEngine(), []
    server = following(tmp_path, engine, events.append)
    server.start()
    try:
        eventually(lambda: server.served == served(1))
        engine.staged = 2
        eventually(lambda: server.served == served(2))
        shown = server.document()
    finally:
        server.stop()
    assert shown["served"] == str(served(2))
    assert shown["last_safe_point"]["version"] == 2
    assert [rank["rank"] for rank in shown["ranks"]] == [0, 1]
    assert (shown["run"], shown["leads"], shown["held"]) == ("x", True, "")
    assert [type(event) for event in events] == [ActorJoined, SafePointPassed]


def test_one_of_two_servers_leads_and_the_other_takes_over(tmp_path: Path) -> None:
    """Two API servers on one engine: one pauses it, both say the same; then the other leads."""
    engine = ScriptedEngine()
    first, second = following(tmp_path, engine), following(tmp_path, engine)
    first.start()
    eventually(lambda: first.served == served(1))
    second.start()
    try:
        eventually(lambda: second.served == served(1))
        engine.staged = 2
        engine.faults = [("update", "mixed"), *[("re_anchor", "before")] * 1000]
        eventually(lambda: bool(second.held))
        assert second.held == first.held
        assert not second.document()["leads"]
        seen: list[str] = []
        status = engine.status

        def asked() -> Any:
            if second.document()["leads"]:
                seen.append(second.held)
            return status()

        engine.status = asked  # type: ignore[method-assign]
        held = second.held
        first.stop()
        engine.faults = []
        eventually(lambda: second.document()["leads"] and second.served == served(2))
        assert second.held == ""
    finally:
        first.stop()
        second.stop()
    assert seen[0] == held  # until it knows better than who led before
    assert engine.wrong == []


def test_the_use_of_the_store_is_passed_on_once(tmp_path: Path) -> None:
    """Counts of ranks and stager are summed whoever repeats them, and whoever leads: who takes over
    counts on from where it found them; what cannot be read is left out and harms nobody."""
    engine, counter = ScriptedEngine(), UseCounter()
    totals: list[Counter[str]] = [Counter(), Counter()]

    def counting(total: Counter[str]) -> ServerFollowing:
        def take(use: StoreUse) -> None:
            total["bytes"] += use.received_bytes
            total.update(use.retries)
            total.update({" ".join(what): calls for what, calls in use.requests.items()})

        return ServerFollowing(engine, settings(tmp_path), SystemClock(), server="s", used=take)

    def work(times: int) -> None:
        for _ in range(times):
            counter.called("", "get", "ok", 0.1)
            counter.moved("", received_bytes=100)
            counter.retried("", unavailable())
        engine.store = [counter.row("far"), {"counter": "of another release"}]

    first, second = (counting(total) for total in totals)
    work(2)
    first.start()
    try:
        eventually(lambda: totals[0]["bytes"] == 200)
        second.start()
        work(3)
        eventually(lambda: totals[0]["bytes"] == 500)
        eventually(lambda: second.served is not None)
        first.stop()
        eventually(lambda: bool(second.document()["leads"]))
        asked = engine.calls.count("status")
        eventually(lambda: engine.calls.count("status") > asked + 1)
        work(1)
        eventually(lambda: totals[1]["bytes"] > 0)
    finally:
        first.stop()
        second.stop()
    assert totals[0] == {"bytes": 500, "get ok": 5, "unavailable": 5}
    assert totals[1] == {"bytes": 100, "get ok": 1, "unavailable": 1}
    assert engine.wrong == []


def test_a_server_that_watches_says_as_much_as_one_that_leads(tmp_path: Path) -> None:
    """What is asked for is there from the start, before a leader has written anything; what dead
    servers wrote is not read, but removed."""
    engine = ScriptedEngine()
    first = following(tmp_path, engine)
    shown = first.document()
    assert (shown["served"], shown["held"], shown["ranks"]) == (None, "", [])
    first.start()
    eventually(lambda: any((tmp_path / "servers").glob("*.json")) and first.served is not None)
    assert first.document().keys() == shown.keys()
    first.stop()
    (left,) = (tmp_path / "servers").glob("*.json")
    left.with_suffix(".new").write_text("{")
    second = ServerFollowing(engine, settings(tmp_path), SystemClock(), server="another")
    second.start()
    eventually(lambda: second.served == served(1))
    second.stop()
    assert left.with_suffix(".lock") not in (tmp_path / "servers").iterdir()
    assert {path.suffix for path in (tmp_path / "servers").iterdir()} <= {".lock", ".json"}
    assert len({path.stem for path in (tmp_path / "servers").iterdir()}) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_follower_that_dies_takes_the_server_out(tmp_path: Path) -> None:
    """A fault of this library is not silence: the server says that nobody follows any more."""
    engine = ScriptedEngine()
    server = following(tmp_path, engine)
    server.start()
    eventually(lambda: server.served == served(1))
    engine.status = lambda: 1 // 0
    eventually(lambda: "ZeroDivisionError" in server.held)
    server.stop()


def test_the_servers_settings_are_those_that_were_set(tmp_path: Path) -> None:
    """Every key arrives where it belongs; those of the workers pass as well."""
    made = settings(tmp_path, policy="wait", drain_max_s=7, pause_timeout_s=8, hold_max_s=9)
    assert made.safe_points.mode is PauseMode.WAIT
    assert (made.bounds.drain_max_s, made.bounds.pause_s) == (7, 8)
    assert (made.safe_points.hold_max_s, made.safe_points.look_s) == (9, 0.01)
    assert made.engine.run == "file:///r/x"
    assert made.events is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy", "boundary"),
        ("policy", 1),
        ("jitter_s", "2"),
        ("min_interval_s", -1),
        ("poll_s", 0),
        ("pause_timeout_s", True),
        ("events", 3),
        ("polcy", "keep"),
    ],
)
def test_a_setting_that_is_wrong_is_named(tmp_path: Path, name: str, value: object) -> None:
    """Nothing is guessed and nothing is passed over."""
    with pytest.raises(InvalidInputError) as caught:
        settings(tmp_path, **{name: value})
    assert {"poll_s": "look_s", "pause_timeout_s": "pause"}.get(name, name) in str(caught.value)
