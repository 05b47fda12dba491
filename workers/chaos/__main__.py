"""`make chaos`: break a run for ten minutes, then prove that nothing came of it.

Exit 0: every fault was recovered from and every check at the end held. The table says what was
injected and how long it took until work went on. The same seed injects the same faults.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deltastore.clock import SystemClock
from deltastore.errors import DeltastoreError
from workers.chaos.judge import ChaosFound
from workers.chaos.play import Outcome, play
from workers.demo.fleet import DemoError


def main(arguments: list[str]) -> int:
    """Play one chaos; 0 if it was survived."""
    parser = argparse.ArgumentParser(prog="python -m workers.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults come")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule")
    parser.add_argument("--every-s", type=float, default=8.0, help="between two faults")
    parser.add_argument("--actors", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=None, help="kept; default: a temporary one")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        try:
            outcome = play(
                folder,
                seed=options.seed,
                duration_s=60 * options.minutes,
                every_s=options.every_s,
                actors=options.actors,
                clock=SystemClock(),
                say=console.print,
            )
        except (DemoError, ChaosFound, DeltastoreError) as err:
            console.print(f"not survived (seed {options.seed}): {err}", style="red")
            return 1
    console.print(table(outcome, options.seed))
    return 0


def table(outcome: Outcome, seed: int) -> Table:
    """What happened, for people."""
    growth = max(outcome.memory_growth.values(), default=1.0)
    title = (
        f"seed {seed}: {outcome.steps} steps, {outcome.results} results,"
        f" {outcome.restarts} restarts, {outcome.orphans} orphans cleared, memory x {growth:.2f},"
        f" ends at v{outcome.version}"
    )
    found = Table(title=title, title_justify="left")
    for name in ("fault", "injected", "survived", "recovered after: median", "longest"):
        found.add_column(name, justify="left" if name == "fault" else "right")
    for row in outcome.rows:
        found.add_row(
            row.fault.value,
            str(row.injected),
            str(row.survived),
            f"{row.median_s:.1f} s",
            f"{row.longest_s:.1f} s",
        )
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
