"""An upload holds its parts in flight and no more, however large the body is: measured in
processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deltastore.storage.parts import plan_upload

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
MIB, GB = 1 << 20, 10**9
STREAMS, PART_BYTES = 4, 8 * MIB
CONSTANT_BYTES = 16 * MIB
"""For what the allocator, the stacks of threads and the client's buffers take beside the parts."""


class Sink(BaseHTTPRequestHandler):
    """As much of S3 as an upload in parts needs; bodies are counted and forgotten."""

    protocol_version = "HTTP/1.1"
    received: dict[str, list[int]]
    lock: threading.Lock

    def do_HEAD(self) -> None:
        """Nothing is there yet."""
        self._answer(404, b"")

    do_GET = do_HEAD

    def do_POST(self) -> None:
        """Begin, or complete."""
        self._drain()
        name = (
            "InitiateMultipartUpload" if "uploadId=" not in self.path else "CompleteMultipartUpload"
        )
        self._answer(200, f"<{name}Result><UploadId>u</UploadId></{name}Result>".encode())

    def do_PUT(self) -> None:
        """A part."""
        size_bytes = self._drain()
        with self.lock:
            self.received.setdefault(self.path.partition("?")[0], []).append(size_bytes)
        self._answer(200, b"")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def _drain(self) -> int:
        size_bytes = left = int(self.headers.get("Content-Length") or 0)
        buffer = memoryview(bytearray(MIB))
        while left:
            read = self.rfile.readinto(buffer[: min(left, MIB)])  # type: ignore[attr-defined]
            assert read, "the client went away"
            left -= read
        return size_bytes

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response_only(status)
        self.send_header("ETag", '"e"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def sink() -> Iterator[ThreadingHTTPServer]:
    """An endpoint that keeps nothing."""

    class Handler(Sink):
        received: dict[str, list[int]] = {}  # noqa: RUF012 - one for all requests of this server
        lock = threading.Lock()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("size_bytes", [GB, pytest.param(50 * GB, marks=pytest.mark.slow)])
def test_a_virtual_body_takes_its_parts_in_flight(
    sink: ThreadingHTTPServer, size_bytes: int
) -> None:
    """CASE S20: of 50 GB (here 1 GB, 50 GB in `make test-slow`) no more becomes resident than
    concurrency x part + a constant."""
    settings = {
        "bucket": "bucket",
        "endpoint_url": f"http://127.0.0.1:{sink.server_address[1]}",
        "access_key": "k",
        "secret_key": "s",
        "streams": STREAMS,
        "part_bytes": PART_BYTES,
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.faults.virtual_upload",
            json.dumps(settings),
            str(size_bytes),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sent = sink.RequestHandlerClass.received["/bucket/k"]  # type: ignore[attr-defined]
    assert sum(sent) == size_bytes
    assert len(sent) == plan_upload(size_bytes, PART_BYTES).parts
    assert int(done.stdout) <= STREAMS * PART_BYTES + CONSTANT_BYTES
