"""A real server never loses an answer when a test wants it to: this proxy, before it, does.

Requests go through unchanged (the signature covers the Host header, so that is passed on as sent)
unless a rule matches. What came through is kept for the test to look at.
"""

from __future__ import annotations

import http.client
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self, TypeAlias
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "date", "server"})
_UPSTREAM_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class DropRequest:
    """The connection breaks before the server has seen the request."""


@dataclass(frozen=True, slots=True)
class DropResponse:
    """The server carries the request out, the connection breaks before it has answered."""


@dataclass(frozen=True, slots=True)
class CutBody:
    """The answer promises its whole body and breaks off after `keep_bytes`."""

    keep_bytes: int


@dataclass(frozen=True, slots=True)
class Reply:
    """The client gets this answer; the server sees the request only if `forwarded`."""

    status: int
    code: str = ""
    message: str = ""
    forwarded: bool = False

    def body(self) -> bytes:
        """The answer as S3 writes errors."""
        if not self.code:
            return b""
        return (
            f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{self.code}</Code>'
            f"<Message>{self.message}</Message></Error>"
        ).encode()


@dataclass(frozen=True, slots=True)
class Before:
    """Something happens before the request goes through: a rival writes, a server dies."""

    action: Callable[[], None]


ProxyAction: TypeAlias = DropRequest | DropResponse | CutBody | Reply | Before


@dataclass(frozen=True, slots=True)
class ProxyRule:
    """From the `nth` request (from 1) with this method and text in its target, `times` of them."""

    method: str
    contains: str
    action: ProxyAction
    nth: int = 1
    times: int = 1


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that came."""

    method: str
    target: str
    headers: Mapping[str, str]
    body_bytes: int

    @property
    def is_part(self) -> bool:
        """Whether it uploads a part."""
        return self.method == "PUT" and "partNumber=" in self.target

    @property
    def is_abort(self) -> bool:
        """Whether it aborts a multipart upload."""
        return self.method == "DELETE" and "uploadId=" in self.target


@dataclass(slots=True)
class _State:
    upstream: tuple[str, int]
    lock: threading.Lock = field(default_factory=threading.Lock)
    rules: list[tuple[ProxyRule, list[int]]] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0


class S3Proxy:
    """A proxy on a port of its own, in threads of this process, as a context manager."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        if parts.hostname is None or parts.port is None:
            raise ValueError(f"{endpoint!r} has no host and port")
        self._state = _State((parts.hostname, parts.port))
        state = self._state

        class Handler(_Handler):
            pass

        Handler.state = state
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    @property
    def endpoint(self) -> str:
        """Where clients connect to."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def seen(self) -> list[Seen]:
        """The requests so far."""
        with self._state.lock:
            return list(self._state.seen)

    @property
    def most_in_flight(self) -> int:
        """The most requests that were open at one time."""
        with self._state.lock:
            return self._state.most_in_flight

    def add(
        self, method: str, contains: str, action: ProxyAction, *, nth: int = 1, times: int = 1
    ) -> None:
        """Add a rule; its requests are counted from now."""
        with self._state.lock:
            self._state.rules.append((ProxyRule(method, contains, action, nth, times), [0]))

    def forget(self) -> None:
        """Drop all rules and what was seen."""
        with self._state.lock:
            self._state.rules.clear()
            self._state.seen.clear()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: _State

    def handle_any(self) -> None:
        """Any method: the rules decide."""
        state = self.state
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with state.lock:
            state.in_flight += 1
            state.most_in_flight = max(state.most_in_flight, state.in_flight)
        try:
            self._act(self._action(body), body)
        except OSError:
            self.close_connection = True  # the client went away, as tests make it do
        finally:
            with state.lock:
                state.in_flight -= 1

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: the test looks at `seen`."""

    def _action(self, body: bytes) -> ProxyAction | None:
        chosen: ProxyAction | None = None
        with self.state.lock:
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.state.seen.append(Seen(self.command, self.path, headers, len(body)))
            for rule, count in self.state.rules:
                if rule.method == self.command and rule.contains in self.path:
                    count[0] += 1
                    if chosen is None and rule.nth <= count[0] < rule.nth + rule.times:
                        chosen = rule.action
        return chosen

    def _act(self, action: ProxyAction | None, body: bytes) -> None:
        if isinstance(action, DropRequest):
            self._hang_up()
        elif isinstance(action, Reply):
            if action.forwarded:
                self._forward(body)
            self._answer(action.status, {"Content-Type": "application/xml"}, action.body())
        else:
            if isinstance(action, Before):
                action.action()
            status, headers, answer = self._forward(body)
            if isinstance(action, DropResponse):
                self._hang_up()
            else:
                cut = action.keep_bytes if isinstance(action, CutBody) else None
                self._answer(status, headers, answer, cut)

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        host, port = self.state.upstream
        connection = http.client.HTTPConnection(host, port, timeout=_UPSTREAM_TIMEOUT_S)
        try:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            response = connection.getresponse()
            answer = response.read()
            headers = {n: v for n, v in response.getheaders() if n.lower() not in _HOP_BY_HOP}
            return response.status, headers, answer
        finally:
            connection.close()

    def _answer(
        self, status: int, headers: Mapping[str, str], body: bytes, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() != "content-length":
                self.send_header(name, value)
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body if cut is None else body[:cut])
        if cut is not None and cut < len(body):
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
