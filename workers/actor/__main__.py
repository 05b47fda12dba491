"""`python -m workers.actor FILE`: follow and serve the run that the JSON file describes.

SIGTERM drains: generation in progress is finished or handed back, then the actor leaves. Exit codes
are those of the command line (deltastore/cli/exits.py).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from deltastore.cli.signals import ring_on_sigterm
from deltastore.errors import InvalidInputError, Kind
from workers.wiring import open_surroundings, run_worker

if TYPE_CHECKING:
    from workers.actor.loop import Actor
    from workers.config import WorkerConfig


def _work(config: WorkerConfig) -> None:
    if config.actor is None:
        raise InvalidInputError("the file has no `actor` part", kind=Kind.SETTING)
    with open_surroundings(config, config.actor.actor_id) as around:
        # Only now: what is wrong with the file is said without waiting for torch.
        from workers.actor.assembly import act

        act(around, _stop_on_sigterm)


def _stop_on_sigterm(actor: Actor) -> None:
    ring_on_sigterm(actor.request_stop)


if __name__ == "__main__":
    sys.exit(run_worker(_work, sys.argv[1:]))
