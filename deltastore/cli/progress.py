"""A minute of silence looks like a hang, and a progress bar in a log file is noise.

Bars are drawn on stderr, and only when stderr is a terminal.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress, TaskID


@dataclass(frozen=True, slots=True)
class Meter:
    """Takes note of work done; draws nothing when there is no bar."""

    bars: Progress | None
    task: TaskID | None

    def advance(self, amount: int) -> None:
        """So much more is done."""
        if self.bars is not None and self.task is not None:
            self.bars.advance(self.task, amount)

    def reached(self, done: int, total: int) -> None:
        """So much of so much is done."""
        if self.bars is not None and self.task is not None:
            self.bars.update(self.task, completed=done, total=total)


@contextmanager
def progress(what: str, *, total: int | None = None) -> Iterator[Meter]:
    """A bar named `what` for the duration of the block; amounts are bytes."""
    if not sys.stderr.isatty():
        yield Meter(None, None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        yield Meter(bars, bars.add_task(what, total=total))
