"""An engine behind development endpoints is driven like any other, and only from here."""

from __future__ import annotations

import json
import logging
import socketserver
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest

from deltastore.adapters.vllm_http import HttpControl, local_server
from deltastore.errors import ApplyError, DeltastoreError, InvalidInputError, Kind
from deltastore.pipeline.engine_control import NEWEST, ControlBounds, PauseMode
from deltastore.pipeline.safe_point import SafePointDriver, SafePointSettings, Turn
from deltastore.testing.clock import FakeClock
from tests.unit.pipeline.scripted_engine import ScriptedEngine, hash_of, served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT = SafePointSettings(min_interval_s=0, jitter_s=0, settle_s=0)


class DevelopmentServer:
    """A real HTTP server that answers the development endpoints over a scripted engine."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.asked: list[str] = []
        self.named: list[str] = []
        self.settings: dict[str, object] = {}
        self.world_size = len(engine.ranks)
        self.instead: dict[str, tuple[int, bytes]] = {}
        """What a path answers instead."""
        self.unanswered: set[str] = set()
        """Requests that are not answered before the server ends."""
        self.ending = threading.Event()

    def answer(self, verb: str, target: str, body: dict[str, object]) -> tuple[int, bytes]:
        """Status and body for one request."""
        parts = urlsplit(target)
        self.asked.append(f"{verb} {target}")
        if target in self.unanswered:
            self.ending.wait(30)
            return 500, b""
        if parts.path in self.instead:
            return self.instead[parts.path]
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        try:
            return 200, json.dumps(self._do(parts.path, query, body)).encode()
        except KeyError:
            return 404, b'{"detail":"Not Found"}'
        except DeltastoreError as err:
            return 500, json.dumps({"error": {"message": err.message}}).encode()

    def _do(self, path: str, query: dict[str, str], body: dict[str, object]) -> object:
        match path:
            case "/init_weight_transfer_engine":
                self.settings = body["init_info"]
                self.engine.initialise()
            case "/collective_rpc":
                return self._call(str(body["method"]))
            case "/get_world_size":
                return {"world_size": self.world_size}
            case "/pause":
                assert query["clear_cache"] == "true"
                self.engine.pause(PauseMode(query["mode"]))
            case "/start_weight_update" | "/finish_weight_update":
                pass
            case "/update_weights":
                assert body == {"update_info": {"version": NEWEST}}
                self.engine.update(NEWEST)
            case "/update_weight_version":
                self.named.append(body["new_version"])
            case "/reset_prefix_cache":
                assert query["reset_external"] == "true"
                return {"success": self.engine.reset_caches()}
            case "/resume":
                self.engine.resume()
            case _:
                raise KeyError(path)
        return {}

    def _call(self, method: str) -> object:
        if method == "deltastore_re_anchor":
            self.engine.re_anchor()
            return {"results": [None] * len(self.engine.ranks)}
        assert method == "deltastore_status"
        return {"results": [_document(one) for one in self.engine.status()]}


def _document(status: object) -> dict[str, object]:
    active = status.active
    return {
        "rank": status.rank,
        "active": None
        if active is None
        else {"version": active.version, "policy_hash": active.policy_hash},
        "staged": status.staged,
        "head": status.head,
        "poisoned": status.poisoned,
    }


class _UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@contextmanager
def serving(server: DevelopmentServer, unix_path: Path | None = None) -> Iterator[str]:
    """Serve on a free port, or on a socket's path; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self._reply(json.loads(self.rfile.read(length) or b"{}"))

        def _reply(self, body: dict[str, object]) -> None:
            status, text = server.answer(self.command, self.path, body)
            if server.ending.is_set():
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def address_string(self) -> str:
            return "local"

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    if unix_path is None:
        listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        url = f"http://127.0.0.1:{listening.server_port}"
    else:
        listening = _UnixServer(str(unix_path), Handler)
        url = f"unix://{unix_path}"
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield url
    finally:
        server.ending.set()
        listening.shutdown()
        listening.server_close()
        thread.join()


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
        "/pause",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/update_weight_version",
        "/reset_prefix_cache",
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
