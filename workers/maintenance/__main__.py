"""`python -m workers.maintenance [DUTY] FILE`: look after the buckets of a run.

Without a duty: anchors, composites, retention and orphans, round after round (FILE has a
`maintenance` part). `replicate`: bring every region up to home (a `replicate` part). SIGTERM ends
it after the requests in flight. Exit codes are those of the command line
(deltastore/cli/exits.py).
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

from deltastore.cli.signals import ring_on_sigterm
from deltastore.errors import InvalidInputError, Kind
from workers.maintenance.replicate import replicate
from workers.maintenance.tend import tend
from workers.wiring import open_premises, run_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.config import WorkerConfig
    from workers.wiring import Premises

TEND = "tend"
DUTIES: dict[str, Callable[[Premises, threading.Event], None]] = {
    TEND: tend,
    "replicate": replicate,
}


def main(arguments: Sequence[str]) -> int:
    """Run the duty that the first of two arguments names, or `tend`, on the file that is last."""
    name, *rest = arguments if len(arguments) > 1 else (TEND, *arguments)
    duty = DUTIES.get(name)

    def work(config: WorkerConfig) -> None:
        if duty is None:
            raise InvalidInputError(
                f"there is no duty {name!r}",
                kind=Kind.SETTING,
                hint=f"one of: {', '.join(DUTIES)}",
            )
        stopping = threading.Event()
        ring_on_sigterm(stopping.set)
        with open_premises(config, f"maintenance-{name}") as at:
            duty(at, stopping)

    return run_worker(work, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
