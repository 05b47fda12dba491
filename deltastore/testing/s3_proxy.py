"""A real server never loses an answer when a test wants it to: this proxy, before it, does.

Requests go through unchanged (the signature covers the Host header, so that is passed on as sent)
unless a rule matches. What came through is kept for the test to look at.
"""

from __future__ import annotations

import http.client
import socket
import struct
import sys
import threading
from dataclasses import dataclass, field
from email.utils import formatdate, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from deltastore.clock import SystemClock
from deltastore.testing.s3_proxy_actions import (
    Before,
    Choose,
    CutBody,
    CutRequest,
    DateLater,
    DropRequest,
    DropResponse,
    FlipBit,
    ProxyAction,
    ProxyRule,
    ReadSlowly,
    Reply,
    Stall,
    Strip,
    Twice,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "Before",
    "Choose",
    "CutBody",
    "CutRequest",
    "DateLater",
    "DropRequest",
    "DropResponse",
    "FlipBit",
    "ProxyAction",
    "ProxyRule",
    "ReadSlowly",
    "Reply",
    "S3Proxy",
    "Seen",
    "Stall",
    "Strip",
    "Twice",
]

_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "server"})
_UPSTREAM_TIMEOUT_S = 60.0
_STALL_S = 60.0
_SLOW_READS_PER_S = 50
_RECEIVE_BYTES = 1 << 18


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
        self._server = _Listener(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        # Connections inherit it. Else the kernel would take whole bodies while a rule reads slowly.
        self._server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
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
        self,
        method: str,
        contains: str,
        action: ProxyAction,
        *,
        nth: int = 1,
        times: int = 1,
        signed: str = "",
    ) -> None:
        """Add a rule; its requests are counted from now."""
        rule = ProxyRule(method, contains, action, nth, times, signed)
        with self._state.lock:
            self._state.rules.append((rule, [0]))

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


class _Listener(ThreadingHTTPServer):
    request_queue_size = 256  # the default of 5 refuses clients that come together

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away between two requests is what tests are about: no traceback."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: _State

    def handle_any(self) -> None:
        """Any method: the rules decide."""
        state = self.state
        length = int(self.headers.get("Content-Length") or 0)
        action = self._action(length)
        with state.lock:
            state.in_flight += 1
            state.most_in_flight = max(state.most_in_flight, state.in_flight)
        try:
            body = self._read_body(length, action)
            if body is not None:
                self._act(action, body)
        except OSError:
            self.close_connection = True  # the client went away, as tests make it do
        finally:
            with state.lock:
                state.in_flight -= 1

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

    def log_message(self, format: str, *args: object) -> None:
        """Quiet: the test looks at `seen`."""

    def _action(self, length: int) -> ProxyAction | None:
        chosen: ProxyAction | None = None
        headers = {name.lower(): value for name, value in self.headers.items()}
        with self.state.lock:
            self.state.seen.append(Seen(self.command, self.path, headers, length))
            for rule, count in self.state.rules:
                if rule.is_about(self.command, self.path, headers.get("authorization", "")):
                    count[0] += 1
                    if chosen is None and rule.nth <= count[0] < rule.nth + rule.times:
                        chosen = rule.action
        return chosen

    def _read_body(self, length: int, action: ProxyAction | None) -> bytes | None:
        if isinstance(action, CutRequest):
            self.rfile.read(min(length, action.keep_bytes))
            self._reset()
            return None
        if not isinstance(action, ReadSlowly):
            return self.rfile.read(length)
        clock, body = SystemClock(), bytearray()
        while len(body) < length:
            piece = self.rfile.read(
                min(length - len(body), max(1, int(action.bytes_per_s / _SLOW_READS_PER_S)))
            )
            if not piece:
                return None
            body += piece
            clock.sleep_s(1 / _SLOW_READS_PER_S)
        return bytes(body)

    def _act(self, action: ProxyAction | None, body: bytes) -> None:
        if isinstance(action, Choose):
            action = action.choose(self.path)
        if isinstance(action, DropRequest):
            self._hang_up()
            return
        if isinstance(action, Reply):
            if action.forwarded:
                self._forward(body)
            self._answer(action.status, {"Content-Type": "application/xml"}, action.body())
            return
        if isinstance(action, Before):
            action.action()
        if isinstance(action, Twice):
            self._forward(body)
        if isinstance(action, FlipBit) and action.of_request:
            body = _flipped(body, action.at_byte)
        hidden = action.header if isinstance(action, Strip) else None
        status, headers, answer = self._forward(body, hidden)
        if isinstance(action, FlipBit) and not action.of_request:
            answer = _flipped(answer, action.at_byte)
        if isinstance(action, DateLater):
            headers["Date"] = _later(headers["Date"], action.seconds)
        if isinstance(action, DropResponse):
            self._hang_up()
        else:
            self._answer(status, headers, answer, action)

    def _forward(self, body: bytes, hidden: str | None = None) -> tuple[int, dict[str, str], bytes]:
        host, port = self.state.upstream
        connection = http.client.HTTPConnection(host, port, timeout=_UPSTREAM_TIMEOUT_S)
        try:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                if name.lower() != hidden:
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            response = connection.getresponse()
            answer = response.read()
            headers = {
                n.title(): v for n, v in response.getheaders() if n.lower() not in _HOP_BY_HOP
            }
            return response.status, headers, answer
        finally:
            connection.close()

    def _answer(
        self,
        status: int,
        headers: Mapping[str, str],
        body: bytes,
        action: ProxyAction | None = None,
    ) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() != "content-length":
                self.send_header(name, value)
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        keep = action.keep_bytes if isinstance(action, CutBody | Stall) else len(body)
        if self.command != "HEAD":
            self.wfile.write(body[:keep])
        if keep >= len(body):
            return
        if isinstance(action, Stall):
            self.wfile.flush()
            self.connection.settimeout(_STALL_S)
            self.connection.recv(1)  # until the client has had enough of it
            self.close_connection = True
        elif isinstance(action, CutBody) and action.reset:
            self._reset()
        else:
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    def _reset(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        # Without lingering, a close is a reset; the handler's files keep the socket until then.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()
        self.connection.close()


def _flipped(body: bytes, at_byte: int) -> bytes:
    if at_byte >= len(body):
        return body
    flipped = bytearray(body)
    flipped[at_byte] ^= 1
    return bytes(flipped)


def _later(date: str, seconds: float) -> str:
    return formatdate(parsedate_to_datetime(date).timestamp() + seconds, usegmt=True)
