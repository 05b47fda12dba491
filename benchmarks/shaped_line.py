"""A line between a client and a server on this machine that is as slow and as long as a real one.

What loss does to one TCP stream on a long path is a ceiling for each stream, far below the link;
that ceiling, the link's own and the delay are what is made here, without privileges. It runs in a
process of its own, so that its work is not the client's.
"""

from __future__ import annotations

import math
import queue
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE_BYTES = 1 << 15
_BUFFERED_PIECES = 256
_SEGMENT_BYTES = 1448


@dataclass(frozen=True, slots=True)
class Shape:
    """A link, and how much of it one stream gets."""

    link_mbit_per_s: float = 1000.0
    rtt_s: float = 0.05
    loss: float = 0.001

    @property
    def link_bytes_per_s(self) -> float:
        """Of the whole link, each way."""
        return self.link_mbit_per_s * 1e6 / 8

    @property
    def stream_bytes_per_s(self) -> float:
        """What loss leaves to one stream that halves its window for each (Mathis et al., 1997)."""
        if not self.loss:
            return self.link_bytes_per_s
        ceiling = _SEGMENT_BYTES * 1.22 / (self.rtt_s * math.sqrt(self.loss))
        return min(self.link_bytes_per_s, ceiling)


class _Bucket:
    """When bytes have passed a ceiling; shared by all that pass it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._lock = threading.Lock()

    def passed_at_s(self, size_bytes: int) -> float:
        with self._lock:
            now_s = time.monotonic()
            self._free_at_s = max(self._free_at_s, now_s) + size_bytes / self._bytes_per_s
            return self._free_at_s


def _wait_until(instant_s: float) -> None:
    left_s = instant_s - time.monotonic()
    if left_s > 0.0005:
        time.sleep(left_s)


def _pump(source: socket.socket, sink: socket.socket, link: _Bucket, shape: Shape) -> None:
    """One direction of one connection."""
    stream = _Bucket(shape.stream_bytes_per_s)
    pieces: queue.Queue[tuple[float, bytes]] = queue.Queue(_BUFFERED_PIECES)

    def deliver() -> None:
        try:
            while True:
                due_s, piece = pieces.get()
                if not piece:
                    sink.shutdown(socket.SHUT_WR)
                    return
                _wait_until(due_s)
                sink.sendall(piece)
        except OSError:
            source.close()  # the other side went away: the reader below ends

    threading.Thread(target=deliver, daemon=True).start()
    piece = b"-"
    while piece:
        try:
            piece = source.recv(_PIECE_BYTES)
        except OSError:
            piece = b""
        passed_s = max(link.passed_at_s(len(piece)), stream.passed_at_s(len(piece)))
        _wait_until(passed_s)
        pieces.put((passed_s + shape.rtt_s / 2, piece))


def serve(target_port: int, shape: Shape) -> None:
    """Take connections until stdin ends, as it does when the benchmark dies; prints the port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    up, down = _Bucket(shape.link_bytes_per_s), _Bucket(shape.link_bytes_per_s)

    def connect(client: socket.socket) -> None:
        time.sleep(shape.rtt_s)  # the handshake
        server = socket.create_connection(("127.0.0.1", target_port))
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_pump, args=(server, client, down, shape), daemon=True).start()
        _pump(client, server, up, shape)

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            threading.Thread(target=connect, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


@contextmanager
def shaped_line(target_port: int, shape: Shape) -> Iterator[str]:
    """An endpoint that leads to that port over such a line."""
    words = [str(target_port), str(shape.link_mbit_per_s), str(shape.rtt_s), str(shape.loss)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.shaped_line", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


if __name__ == "__main__":
    port, link, rtt, lost = sys.argv[1:]
    serve(int(port), Shape(float(link), float(rtt), float(lost)))
