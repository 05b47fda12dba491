"""An engine behind development endpoints is driven like any other, and only from here."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from deltastore.adapters.vllm_http import HttpControl, local_server
from deltastore.errors import ApplyError, InvalidInputError, Kind
from deltastore.pipeline.engine_control import ControlBounds, PauseMode
from deltastore.pipeline.safe_point import SafePointDriver, SafePointSettings, Turn
from deltastore.testing.clock import FakeClock
from tests.unit.adapters.development_server import DevelopmentServer, serving
from tests.unit.pipeline.scripted_engine import ScriptedEngine, hash_of, served

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = SafePointSettings(min_interval_s=0, jitter_s=0, settle_s=0)


@pytest.mark.parametrize("over", ["tcp", "unix"])
def test_a_version_is_activated_over_http(over: str, tmp_path: Path) -> None:
    """Over a port or a socket: settings, pause, update, label, reset and resume, in this order."""
    server = DevelopmentServer(ScriptedEngine())
    with serving(server, tmp_path / "s" if over == "unix" else None) as url:
        control = HttpControl(url, init_info={"run": "file:///r/x"})
        driver = SafePointDriver(control, FakeClock(), name="e", settings=PROMPT)
        assert driver.turn() is Turn.NOTHING
        assert server.settings == {"run": "file:///r/x"}
        assert server.named == [f"1:{hash_of(1)}"]
        server.engine.staged = 2
        server.asked.clear()
        assert driver.turn() is Turn.ACTIVATED
    assert driver.view().served == served(2)
    assert server.named[-1] == f"2:{hash_of(2)}"
    paths = [urlsplit(asked.split()[1]).path for asked in server.asked]
    assert [path for path in paths if path != "/collective_rpc"] == [
        "/is_paused",
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/reset_prefix_cache",
        "/is_paused",
        "/resume",
    ]


def test_a_poisoned_engine_is_rebuilt_over_http() -> None:
    """Doubt, re-anchor and a reset that fails once pass through the endpoints as they are."""
    server, clock = DevelopmentServer(ScriptedEngine()), FakeClock()
    with serving(server) as url:
        driver = SafePointDriver(HttpControl(url), clock, name="e", settings=PROMPT)
        driver.turn()
        server.engine.staged = 2
        server.engine.faults = [("update", "mixed"), ("reset", "false")]
        assert driver.turn() is Turn.HELD
        clock.advance_s(1)
        assert driver.turn() is Turn.RECOVERED
    assert server.engine.calls.count("re_anchor") == 1
    assert not server.engine.paused


def test_a_drain_that_takes_too_long_becomes_a_pause() -> None:
    """`wait` that is not over after `drain_max_s` keeps what still runs (CASE R18)."""
    server = DevelopmentServer(ScriptedEngine())
    server.unanswered = {"/pause?mode=wait&clear_cache=true"}
    with serving(server) as url:
        HttpControl(url, bounds=ControlBounds(drain_max_s=0.05)).pause(PauseMode.WAIT)
        assert server.engine.requests == ["keep"]


def test_an_engine_that_does_not_answer_is_given_up() -> None:
    """Every call has a limit, and says which one was not answered."""
    server = DevelopmentServer(ScriptedEngine())
    server.unanswered = {"/resume"}
    with serving(server) as url:
        control = HttpControl(url, bounds=ControlBounds(resume_s=0.05))
        with pytest.raises(ApplyError, match=r"POST /resume within 0\.05 s") as caught:
            control.resume()
    assert caught.value.kind is Kind.ENGINE_TIMEOUT


def test_answers_of_some_ranks_are_not_taken_for_all() -> None:
    """A data-parallel server passes on one core's answers: refused, with the way out."""
    server = DevelopmentServer(ScriptedEngine())
    server.world_size = 4
    with serving(server) as url, pytest.raises(ApplyError, match="2 ranks of 4") as caught:
        HttpControl(url).status()
    assert "VLLM_PLUGINS" in str(caught.value)


@pytest.mark.parametrize(
    ("instead", "says"),
    [
        ((404, b"{}"), "VLLM_SERVER_DEV_MODE=1"),
        ((500, b'{"error": "it died"}'), "it died"),
        ((302, b""), "answered 302"),
        ((200, b"<html>"), "supported version"),
        ((200, b"[]"), "supported version"),
        ((200, b"{}"), "supported version"),
        ((200, b'{"success": "yes"}'), "supported version"),
        ((200, b" " * (16 << 20) + b"{}"), "supported version"),
    ],
)
def test_a_strange_answer_is_an_error(instead: tuple[int, bytes], says: str) -> None:
    """What is no such server, or no such endpoint, is said with what it answered."""
    server = DevelopmentServer(ScriptedEngine())
    server.instead = {"/reset_prefix_cache": instead}
    with serving(server) as url, pytest.raises(ApplyError) as caught:
        HttpControl(url).reset_caches()
    assert caught.value.kind is Kind.ENGINE
    assert says in str(caught.value)


def test_a_server_that_is_away_is_an_error() -> None:
    """Nobody listens: an error of the engine, with the address."""
    with serving(DevelopmentServer(ScriptedEngine())) as url:
        pass
    with pytest.raises(ApplyError, match="cannot be asked"):
        HttpControl(url).status()


@pytest.mark.parametrize(
    "url",
    [
        "http://192.0.2.7:8000",
        "http://example.org",
        "http://localhost.example.org:8000",
        "http://127.0.0.1.example.org:8000",
        "http://0.0.0.0:8000",
        "http://[::]:8000",
        "https://127.0.0.1:8000",
        "http://me:secret@127.0.0.1:8000",
        "http://127.0.0.1:8000/v1",
        "http://127.0.0.1:8000?x=1",
        "http://127.0.0.1:99999",
        "http://[::1",
        "http://127.0.0.1:port",
        "http://",
        "unix://run/vllm.sock",
        "unix://",
        "127.0.0.1:8000",
        "",
    ],
)
def test_a_server_elsewhere_is_refused(url: str) -> None:
    """Only a loopback address or a socket's path; a password in the URL is not shown."""
    with pytest.raises(InvalidInputError) as caught:
        HttpControl(url)
    assert caught.value.kind is Kind.URL
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:8000", "http://localhost:8000", "http://[::1]:8000", "http://127.9.9.9:80"],
)
def test_a_server_here_is_accepted(url: str) -> None:
    """Every way to write this machine."""
    assert str(local_server(url)) == url


def test_every_use_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever turns the endpoints on is told that they have no password."""
    with caplog.at_level(logging.WARNING):
        HttpControl("unix:///run/vllm.sock")
    assert "ask for no password" in caplog.text
