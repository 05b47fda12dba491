"""A minute of silence looks like a hang, and a progress bar in a log file is noise.

Bars are drawn on stderr, and only when stderr is a terminal.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress, TaskID


@dataclass(frozen=True, slots=True)
class Meter:
    """Takes note of work done, on any thread; draws nothing when there is no bar."""

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


class Tally:
    """Sums what is done and what is to be done, where neither is known beforehand.

    Its methods are what creating a run and publishing call. Thread-safe.
    """

    def __init__(self, meter: Meter, *, total: int = 0) -> None:
        self._meter = meter
        self._lock = threading.Lock()
        self._done, self._total = 0, total
        self._ahead = 0
        """Of the body being put: its parts that have arrived."""

    def moved(self, done: int, to_do: int) -> None:
        """So many bytes more have arrived, so many more are on their way."""
        with self._lock:
            self._total += to_do
            self._advance(done)

    def part(self, size_bytes: int) -> None:
        """A part of the body being put has arrived; bodies come one after the other."""
        with self._lock:
            self._ahead += size_bytes
            self._advance(size_bytes)

    def put(self, size_bytes: int) -> None:
        """The body has arrived, the parts that were told before included."""
        with self._lock:
            rest, self._ahead = size_bytes - self._ahead, 0
            self._advance(rest)

    def _advance(self, amount: int) -> None:
        self._done += amount
        self._meter.reached(self._done, self._total)


@contextmanager
def progress(what: str, *, total: int | None = None) -> Iterator[Meter]:
    """A bar named `what` for the duration of the block; amounts are bytes."""
    with progress_bars() as bar:
        yield bar(what, total)


@contextmanager
def progress_bars() -> Iterator[Callable[[str, int | None], Meter]]:
    """Makes bars, each by its name and total (None: unknown), for the duration of the block."""
    if not sys.stderr.isatty():
        yield lambda what, total: Meter(None, None)
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
        yield lambda what, total: Meter(bars, bars.add_task(what, total=total))
