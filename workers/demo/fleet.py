"""A demo that leaves processes behind is worse than none: every child is stopped by its own id.

Children are started from the main thread only (the kernel ties "die with the parent" to it), write
to a log each, and are ended on every way out: SIGTERM, a grace time, SIGKILL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from deltastore.clock import Clock

_GRACE_S = 20.0
_POLL_S = 0.05
_TAIL_BYTES = 3000


class DemoError(Exception):
    """The demo cannot go on; the message says which part failed and where to look."""


@dataclass(slots=True)
class Child:
    """One process that the demo started."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path
    killed: bool = False
    """Whether the demo killed it on purpose."""

    def tail(self) -> str:
        """The end of what it wrote."""
        return self.log_path.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()


class Fleet:
    """The demo's children. A context manager: leaving it ends them all."""

    def __init__(self, log_dir: Path, environment: Mapping[str, str], clock: Clock) -> None:
        self._log_dir = log_dir
        self._environment = dict(environment)
        self._clock = clock
        self.children: dict[str, Child] = {}
        log_dir.mkdir(parents=True, exist_ok=True)

    def start(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        threads: int,
        nice: int = 0,
        python: Path | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Child:
        """Start `python -m module arguments…` as a child of that name.

        Args:
            python: of another environment; None: this one's.
            variables: added to the environment that all children have.
        """
        if name in self.children:
            raise DemoError(f"a process named {name} was started already")
        log_path = self._log_dir / f"{name}.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [
                    sys.executable if python is None else str(python),
                    "-m",
                    "workers.demo.child",
                    str(os.getpid()),
                    str(nice),
                    module,
                    *arguments,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **self._environment,
                    "OMP_NUM_THREADS": str(threads),
                    **(variables or {}),
                },
                start_new_session=True,  # Ctrl-C reaches the demo alone, which ends them in order
            )
        child = Child(name, process, log_path)
        self.children[name] = child
        return child

    def kill(self, name: str) -> None:
        """SIGKILL one child, as a preempted machine would end it."""
        child = self.children[name]
        child.killed = True
        child.process.kill()
        child.process.wait()

    def check(self) -> None:
        """Raise DemoError when a child has failed that was not killed on purpose."""
        for child in self.children.values():
            code = child.process.poll()
            if code and not child.killed:
                raise DemoError(
                    f"{child.name} ended with exit code {code}; the end of {child.log_path}:\n"
                    f"{child.tail()}"
                )

    def running(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that have not ended."""
        return [name for name in names if self.children[name].process.poll() is None]

    def stop(self) -> None:
        """End every child: SIGTERM to all, a grace time for all together, then SIGKILL."""
        left = [child for child in self.children.values() if child.process.poll() is None]
        for child in left:
            child.process.send_signal(signal.SIGTERM)
        deadline_s = self._clock.monotonic_s() + _GRACE_S
        while left and self._clock.monotonic_s() < deadline_s:
            left = [child for child in left if child.process.poll() is None]
            self._clock.sleep_s(_POLL_S)
        for child in left:
            child.process.kill()
            child.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
