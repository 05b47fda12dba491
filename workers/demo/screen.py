"""A log full of redrawn tables cannot be read: terminals get a live view, all else lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.live import Live

from deltastore.observability.table import actors_line, live_view, version_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from deltastore.observability.view import ActorLive, RunView


_OTHER_LINES = 20  # of the live view beside versions: headlines, actors, notes


class Screen:
    """Shows a run in progress; a context manager."""

    def __init__(self, console: Console, view: RunView) -> None:
        self._console = console
        self._view = view
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._said_version = 0
        self._said_marks = 0
        self._said_problems = 0

    def update(self, actors: Sequence[ActorLive], headline: str, *, last: bool = False) -> None:
        """Show the newest state. `last`: nothing more will come, so say all that is left."""
        if self._console.is_terminal:
            if last:
                self._live.stop()
                self._console.print(live_view(self._view, actors, headline))
            else:
                newest = max(3, self._console.height - _OTHER_LINES)
                self._live.update(live_view(self._view, actors, headline, newest), refresh=True)
            return
        for mark in self._view.marks[self._said_marks :]:
            self._say(f"--- {mark.text}")
        for mark in self._view.problems[self._said_problems :]:
            self._say(f"!!! {mark.text}")
        self._said_marks, self._said_problems = len(self._view.marks), len(self._view.problems)
        head = self._view.head or 0
        for row in self._view.published():
            # A version's line waits for the next version: by then its actors have activated it.
            if row.version > self._said_version and (last or row.version < head):
                self._said_version = row.version
                self._say(version_line(self._view, row))
                self._say(actors_line(self._view, actors))

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()
