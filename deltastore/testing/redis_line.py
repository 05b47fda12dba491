"""A line that never breaks hides what a client does when one does: this one breaks on demand.

Stands between clients and a Redis server as a load balancer, a moving address or a TLS terminator
would: it can be cut, lose the next answer after its effect, be pointed at another server, and speak
TLS to its clients.
"""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import ssl

_CHUNK_BYTES = 65_536


class RedisLine:
    """A listening address in front of a server's port.

    Args:
        port: of the server on this machine.
        tls: what its clients are spoken to with; None is plain text.
    """

    def __init__(self, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self._port = port
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._lose_next = threading.Event()
        self.lost = 0
        """Answers lost so far."""
        threading.Thread(target=self._accept, name="redis-line", daemon=True).start()

    @property
    def url(self) -> str:
        """The URL that Redis clients take."""
        return f"redis{'s' if self._tls else ''}://127.0.0.1:{self.port}/0"

    def lose_next_answer(self) -> None:
        """The next answer of the server is lost with its connection; its effect stays."""
        self._lose_next.set()

    @property
    def losing(self) -> bool:
        """Whether the next answer will be lost."""
        return self._lose_next.is_set()

    def cut(self) -> None:
        """Break every connection there is now."""
        with self._lock:
            broken, self._open = self._open, set()
        for sock in broken:
            _shut(sock)

    def point_at(self, port: int) -> None:
        """Lead to another server from now on, and break what leads to the old one."""
        self._port = port
        self.cut()

    def close(self) -> None:
        """Stop listening and break every connection."""
        _shut(self._listener)
        self._listener.close()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            if self._tls is not None:
                client = self._tls.wrap_socket(client, server_side=True)
            server = socket.create_connection(("127.0.0.1", self._port))
        except OSError:  # no handshake, or nobody there: what a client sees is a closed line
            client.close()
            return
        with self._lock:
            self._open |= {client, server}
        forward = threading.Thread(target=self._carry, args=(client, server, False), daemon=True)
        forward.start()
        self._carry(server, client, True)
        forward.join()
        with self._lock:
            self._open -= {client, server}
        client.close()
        server.close()

    def _carry(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(_CHUNK_BYTES):
                if answers and self._lose_next.is_set():
                    self._lose_next.clear()
                    self.lost += 1
                    break
                sink.sendall(data)
        except (OSError, ValueError):  # ValueError: a TLS socket that was shut meanwhile
            _shut(sink)
        _shut(sink)
        _shut(source)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is shut already
        return
