"""What a test of crashes does inside one rank of several: have it die at a step of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from deltastore.adapters.placed_target import PlacedTarget
from deltastore.adapters.vllm import child_stager
from deltastore.clock import SystemClock
from tests.vllm.crash_steps import STEPS, arm
from tests.vllm.worker_probe import WorkerProbe

HELD_BACK_S = 30.0


class CrashProbe(WorkerProbe):
    """For `worker_extension_cls`; its methods are called by `collective_rpc`."""

    def probe_pid(self) -> int:
        """This rank's process."""
        return os.getpid()

    def probe_step(self, name: str, rank: int, book: str) -> None:
        """Let that rank die at that step, and the others note what they do from then on.

        Args:
            book: folder for the notes: `dies` before it does, `<rank>` for forward passes and for
                the end of the update of the others.
        """
        notes = Path(book)
        if self.rank == rank:  # type: ignore[attr-defined]

            def die() -> None:
                (notes / "dies").touch()
                os.kill(os.getpid(), signal.SIGKILL)

            arm(STEPS[name], die)
            return
        self._note(notes / str(self.rank))  # type: ignore[attr-defined]
        if name == "after the last part":
            _hold_back(notes / "dies")

    def probe_stager_steps(self, book: str) -> None:
        """Let the stagers that this rank starts from now on die where that folder says."""
        child_stager.LOOK_S = child_stager.RESTART_MIN_S = 0.05  # not what is tested
        child: Any = self.weight_transfer_engine._child  # type: ignore[attr-defined]
        child._command[2:3] = ["tests.vllm.crash_stager", book]
        os.kill(child.pid, signal.SIGKILL)

    def _note(self, path: Path) -> None:
        worker: Any = self
        follower = worker.weight_transfer_engine._rank
        update, forward = follower.update, worker.execute_model

        def noted_update(wanted: Any) -> Any:
            try:
                return update(wanted)
            finally:
                _add(path, f"update ended: {follower.poisoned or follower.active.version}")

        def noted_forward(*arguments: Any, **named: Any) -> Any:
            _add(path, "forward")
            return forward(*arguments, **named)

        follower.update, worker.execute_model = noted_update, noted_forward


def _hold_back(dies: Path) -> None:
    """Write nothing before the other rank has gone."""
    write_all = PlacedTarget.write_all

    def held_back(self: Any, parts: Any, *, keep: bool) -> None:
        clock = SystemClock()
        deadline_s = clock.monotonic_s() + HELD_BACK_S
        while not dies.exists() and clock.monotonic_s() < deadline_s:
            clock.sleep_s(0.01)
        write_all(self, parts, keep=keep)

    PlacedTarget.write_all = held_back  # type: ignore[method-assign]


def _add(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
