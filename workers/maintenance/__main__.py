"""`python -m workers.maintenance replicate FILE`: bring every region of the run up to home.

FILE is a worker's JSON file with a `replicate` part. SIGTERM ends it after the requests in flight.
Exit codes are those of the command line (deltastore/cli/exits.py).
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING

from deltastore.errors import InvalidInputError, Kind
from workers.maintenance.replicate import replicate
from workers.wiring import open_premises, run_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.config import WorkerConfig
    from workers.wiring import Premises

DUTIES: dict[str, Callable[[Premises, threading.Event], None]] = {"replicate": replicate}


def main(arguments: Sequence[str]) -> int:
    """Run the duty that the first argument names on the file that the second one names."""
    duty = DUTIES.get(arguments[0]) if arguments else None

    def work(config: WorkerConfig) -> None:
        if duty is None:
            raise InvalidInputError(
                f"there is no duty {arguments[0]!r}",
                kind=Kind.SETTING,
                hint=f"one of: {', '.join(DUTIES)}",
            )
        stopping = threading.Event()
        signal.signal(signal.SIGTERM, lambda number, frame: stopping.set())
        with open_premises(config, f"maintenance-{arguments[0]}") as at:
            duty(at, stopping)

    return run_worker(work, arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
