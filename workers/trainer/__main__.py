"""`python -m workers.trainer FILE`: train the run that the JSON file describes.

Exit codes are those of the command line (deltastore/cli/exits.py): 8 when another trainer has taken
the run, 9 when Redis or all actors were away for too long.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from deltastore.cli.signals import ring_on_sigterm
from workers.run_folder import TRAINER
from workers.wiring import open_surroundings, run_worker

if TYPE_CHECKING:
    from workers.config import WorkerConfig


def _work(config: WorkerConfig) -> None:
    stopping = threading.Event()
    ring_on_sigterm(stopping.set)
    with open_surroundings(config, TRAINER) as around:
        # Only now: what is wrong with the file is said without waiting for torch.
        from workers.trainer.assembly import train

        train(around, stopping)


if __name__ == "__main__":
    sys.exit(run_worker(_work, sys.argv[1:]))
