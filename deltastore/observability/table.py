"""A demo that only scrolls text hides what matters: which actor is behind, and what it costs.

Pure functions from a `RunView` (and what membership says) to rich renderables and to plain lines
for output that is not a terminal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from deltastore.observability.view import ActorLive, RunView, VersionRow

NOTHING = "-"  # not known yet, or does not apply


def size(size_bytes: float | None) -> str:
    """Bytes for people: 512 B, 1.24 MB."""
    if size_bytes is None:
        return NOTHING
    value, units = float(size_bytes), ("B", "kB", "MB", "GB", "TB")
    for unit in units:
        if value < 1000 or unit == units[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return NOTHING


def seconds(value_s: float | None) -> str:
    """Seconds for people: 58 us, 1.2 ms, 0.31 s, 12 s."""
    if value_s is None:
        return NOTHING
    if value_s < 1e-3:
        return f"{value_s * 1e6:.0f} us"
    if value_s < 0.1:
        return f"{value_s * 1000:.1f} ms"
    return f"{value_s:.2f} s" if value_s < 10 else f"{value_s:.0f} s"


def share_of(value: float | None, digits: int = 2) -> str:
    """A fraction as per cent."""
    return NOTHING if value is None else f"{value * 100:.{digits}f} %"


def number(value: float | None, digits: int = 2) -> str:
    """A number, or that there is none."""
    return NOTHING if value is None else f"{value:.{digits}f}"


def versions_table(view: RunView, newest: int = 1000) -> Table:
    """One line per version, the newest ones."""
    table = Table(
        title="versions",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in ("v", "step", "accuracy", "density", "delta", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("encode", "upload", "stage", "activate"):
        table.add_column(name, justify="right", no_wrap=True, style="cyan")
    for row in view.published()[-newest:]:
        table.add_row(*_version_cells(view, row))
    return table


def actors_table(view: RunView, live: Sequence[ActorLive]) -> Table:
    """One line per actor: those that membership knows, then those that are gone."""
    table = Table(
        title="actors",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in ("actor", "region", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("version", "stale", "tokens/s", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("joined", overflow="fold")
    for actor in live:
        row = view.actors.get(actor.actor)
        share = None if row is None else row.share
        table.add_row(
            actor.actor,
            actor.region,
            Text(actor.state, style="green" if actor.state == "active" else "yellow"),
            NOTHING if actor.version is None else str(actor.version),
            str(actor.staleness),
            f"{actor.tokens_per_s:.0f}",
            NOTHING if share is None else str(share),
            join_note(view, actor.actor),
        )
    known = {actor.actor for actor in live}
    for name, row in sorted(view.actors.items()):
        if name not in known and row.ended_at_ms is not None:
            version = NOTHING if row.active_version is None else str(row.active_version)
            cells = (name, NOTHING, Text("gone", style="red"), version, NOTHING, NOTHING, NOTHING)
            table.add_row(*cells, join_note(view, name), style="dim")
    return table


def live_view(
    view: RunView, live: Sequence[ActorLive], headline: str, newest: int = 1000
) -> RenderableType:
    """The whole screen of a run in progress, with that many versions at most."""
    notes = [Text(mark.text, style="magenta") for mark in view.marks[-4:]]
    problems = [Text(mark.text, style="bold red") for mark in view.problems[-3:]]
    return Group(
        Text(headline, style="bold"),
        versions_table(view, newest),
        actors_table(view, live),
        *notes,
        *problems,
    )


def version_line(view: RunView, row: VersionRow) -> str:
    """A version on one line of plain text."""
    names = ("step", "accuracy", "density", "delta", "ratio")
    cells = _version_cells(view, row)
    first = "  ".join(f"{name} {cell}" for name, cell in zip(names, cells[1:6], strict=True))
    times = zip(("encode", "upload", "stage", "activate"), cells[6:], strict=True)
    return f"v{row.version}  {first}  " + "  ".join(f"{name} {cell}" for name, cell in times)


def actors_line(view: RunView, live: Sequence[ActorLive]) -> str:
    """All actors on one line of plain text."""
    parts = []
    for actor in live:
        row = view.actors.get(actor.actor)
        share = NOTHING if row is None or row.share is None else str(row.share)
        version = NOTHING if actor.version is None else f"v{actor.version}"
        parts.append(
            f"{actor.actor}@{actor.region} {actor.state} {version} stale {actor.staleness} "
            f"{actor.tokens_per_s:.0f} tok/s share {share}"
        )
    return "    " + " | ".join(parts)


def join_note(view: RunView, actor: str) -> str:
    """From what an actor joined, and how many bytes it took."""
    row = view.actors.get(actor)
    if row is None or not row.joins:
        return NOTHING
    join = row.joins[-1]
    return f"v{join.version} from {join.via}, {size(join.size_bytes)}, {seconds(join.seconds)}"


def _version_cells(view: RunView, row: VersionRow) -> tuple[str, ...]:
    published = row.published
    if published is None:
        return (str(row.version), *([NOTHING] * 9))
    first, last = published.step_first, published.step_last
    ratio = "empty" if row.ratio is None else f"{row.ratio:.0f}x"
    return (
        str(row.version),
        str(last) if first == last else f"{first}-{last}",
        number(view.accuracy_of(row)),
        share_of(row.density),
        size(published.delta_bytes),
        ratio,
        seconds(published.encode_s),
        seconds(published.upload_s),
        seconds(row.stage_s),
        seconds(row.activate_s),
    )
