"""A real HTTP server with vLLM's development endpoints, over a scripted engine."""

from __future__ import annotations

import json
import socketserver
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from deltastore.errors import DeltastoreError
from deltastore.pipeline.engine_control import NEWEST, PauseMode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.unit.pipeline.scripted_engine import ScriptedEngine


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
            case "/is_paused":
                return {"is_paused": self.engine.is_paused()}
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
        "asleep": status.asleep,
        "store": [use.row() for use in status.store],
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
