"""A server that outlives its test holds ports and memory until somebody finds it: these cannot.

One child process on loopback ports of its own, with a folder of its own. A watcher ends it when
this process dies without having stopped it.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Self

from deltastore.clock import Clock, SystemClock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# SeaweedFS also listens on port + 10000; both halves stay below the ephemeral range (32768).
_FIRST_PORT, _LAST_PORT, _GRPC_OFFSET = 11_000, 20_999, 10_000
_START_ATTEMPTS = 5
# Not the global generator: test frameworks seed it, and parallel runs would choose the same ports.
_RANDOM = random.SystemRandom()
_POLL_S = 0.05
# Reads until the parent's end of the pipe closes, which it does when the parent dies, however.
_WATCHER = 'while read -r _; do :; done; kill -KILL "$1" 2>/dev/null'


class ServerStartError(RuntimeError):
    """A server program is missing, or did not become ready; the message ends with its log."""


def free_port() -> int:
    """A loopback port that is free now, and whose port + 10000 is free as well."""
    for _ in range(1000):
        port = _RANDOM.randint(_FIRST_PORT, _LAST_PORT)
        if all(_bindable(p) for p in (port, port + _GRPC_OFFSET)):
            return port
    raise ServerStartError(f"no free port between {_FIRST_PORT} and {_LAST_PORT}")


def _bindable(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def find_program(name: str) -> Path | None:
    """The program beside this interpreter (wheels put it there), else on the PATH, else None."""
    for folder in (sysconfig.get_path("scripts"), str(Path(sys.executable).parent), None):
        found = shutil.which(name, path=folder)
        if found:
            return Path(found)
    return None


class Server(ABC):
    """One child process: `start`, `stop`, `kill`, `restart`, or a `with` block.

    Args:
        folder: where its files and log live; a temporary folder, removed at `stop`, when None.
        ready_within_s: how long to wait until it answers; slow machines take seconds.
    """

    name = "server"

    def __init__(
        self,
        folder: Path | None = None,
        *,
        ready_within_s: float = 60.0,
        clock: Clock | None = None,
    ) -> None:
        self._own_folder = folder is None
        self._folder = folder
        self._ready_within_s = ready_within_s
        self._clock = clock or SystemClock()
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def folder(self) -> Path:
        """Where its files and its log live."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder

    @property
    def log_path(self) -> Path:
        """The file that takes its output."""
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        """Its process id; raises when it does not run."""
        if self._process is None:
            raise ServerStartError(f"{self.name} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start it on free ports and return when it answers."""
        for attempt in range(_START_ATTEMPTS):
            if attempt or not self.port:
                self._choose_ports()
            try:
                self._launch()
            except _ExitedEarly:  # somebody took a port in between: choose others
                continue
            return self
        raise ServerStartError(f"{self.name} ended at once:\n{self._log_tail()}")

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after three seconds; a temporary folder goes with it."""
        self._end(signal.SIGTERM)
        if self._own_folder and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def kill(self) -> None:
        """SIGKILL, as a machine failure would; its files stay, `restart` brings it back."""
        self._end(signal.SIGKILL)

    def restart(self) -> Self:
        """End it if it runs, and start it again on the same ports and files."""
        self._end(signal.SIGTERM)
        self._launch()
        return self

    def pause(self) -> None:
        """SIGSTOP: connections stay open, nothing answers any more when this returns."""
        self._signal(signal.SIGSTOP)
        if self._process is not None:  # the signal is on its way: threads may still answer
            states = os.WSTOPPED | os.WEXITED | os.WNOWAIT
            os.waitid(os.P_PID, self._process.pid, states)

    def resume(self) -> None:
        """SIGCONT after `pause`."""
        self._signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @abstractmethod
    def _choose_ports(self) -> None: ...

    @abstractmethod
    def _command(self) -> Sequence[str]: ...

    @abstractmethod
    def _is_ready(self) -> bool: ...

    def _environment(self) -> Mapping[str, str]:
        return {}

    def _launch(self) -> None:
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(self.folder), **self._environment()}
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                list(self._command()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the program that uses it, not the server
            )
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHER, "watcher", str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline_s = self._clock.monotonic_s() + self._ready_within_s
        while True:
            # Not ready while it has ended: else another program on its port would pass for it.
            ready = self._is_ready()
            if self._process.poll() is not None:
                self._end(signal.SIGKILL)
                raise _ExitedEarly
            if ready:
                return
            if self._clock.monotonic_s() > deadline_s:
                tail = self._log_tail()
                self._end(signal.SIGKILL)
                raise ServerStartError(
                    f"{self.name} did not answer within {self._ready_within_s} s:\n{tail}"
                )
            self._clock.sleep_s(_POLL_S)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            try:
                process.wait(timeout=3.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher.stdin is not None:
            watcher.kill()  # before its pipe closes: the process id may belong to another by now
            watcher.stdin.close()
            watcher.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise ServerStartError(f"{self.name} is not running")
        self._process.send_signal(number)

    def _log_tail(self) -> str:
        if not self.log_path.exists():
            return "(no log)"
        return self.log_path.read_bytes()[-2000:].decode(errors="replace")


class _ExitedEarly(Exception):
    """The process ended before it was ready."""
