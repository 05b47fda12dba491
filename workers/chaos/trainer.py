"""`python -m workers.chaos.trainer FILE`: the real trainer, on a task without words, all noted."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.cli.signals import ring_on_sigterm
from workers.run_folder import TRAINER
from workers.wiring import open_surroundings, run_worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.config import WorkerConfig
    from workers.trainer.tasks import Problem


@dataclass(frozen=True, slots=True)
class EvenTokens:
    """Prompts of numbers, rewards for even ones."""

    stop_token: int = 1

    def problem(self, step: int, index: int) -> Problem:
        """A prompt that says its place in the batch."""
        from workers.trainer.tasks import Problem

        return Problem((3, 4 + index % 16, 20 + step % 100), "even")

    def reward(self, problem: Problem, tokens: Sequence[int]) -> float:
        """The share of even tokens, in quarters: groups differ, and not by rounding."""
        return round(4 * sum(token % 2 == 0 for token in tokens) / len(tokens)) / 4


def _work(config: WorkerConfig) -> None:
    stopping = threading.Event()
    ring_on_sigterm(stopping.set)
    with open_surroundings(config, TRAINER) as around:
        from workers.chaos.audit import AuditFolder
        from workers.trainer.assembly import train

        audit = AuditFolder(around.folder.path / "audit")
        train(around, stopping, make_task=lambda folder, seed: EvenTokens(), on_batch=audit.keep)


if __name__ == "__main__":
    sys.exit(run_worker(_work, sys.argv[1:]))
