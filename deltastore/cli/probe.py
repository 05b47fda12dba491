"""A store that loses versions is found out by trying, before a run is there and not after."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from deltastore.cli.exits import ExitCode
from deltastore.cli.output import Document, Output, one_line
from deltastore.clock import SystemClock
from deltastore.storage.probe import ProbeReport, probe_store

if TYPE_CHECKING:
    from rich.console import RenderableType

    from deltastore.cli.connection import Connection


def probe_url(store_url: str, connection: Connection, *, rounds: int, output: Output) -> None:
    """Try the store at a URL out and print what it does; exits with 5 when it can be no home."""
    clock = SystemClock()
    with connection.store_at(store_url) as store:
        started_s = clock.monotonic_s()
        report = probe_store(store, race_rounds=rounds, ask_more=True)
        seconds = clock.monotonic_s() - started_s
    output.emit(report_document(report, seconds), lambda: _table(report))
    if not report.may_be_home:
        raise typer.Exit(ExitCode.STORAGE)


def report_document(report: ProbeReport, seconds: float) -> Document:
    """The report as `--json` prints it."""
    required = report.required()
    return {
        "url": report.url,
        "may_be_home": report.may_be_home,
        "abilities": [
            {
                "name": name,
                "ok": found.ok,
                "needed_by_home": name in required,
                "note": found.note,
            }
            for name, found in report.findings().items()
        ],
        "seconds": round(seconds, 3),
    }


def _table(report: ProbeReport) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    required = report.required()
    table = Table(box=None, pad_edge=False)
    for name in ("ability", "works", "needed by a home", "seen"):
        table.add_column(name, overflow="fold", justify="left")
    for name, found in report.findings().items():
        needed = name in required
        table.add_row(
            name,
            "yes" if found.ok else "NO",
            "yes" if needed else "no",
            one_line(found.note),
            style="" if found.ok else "red" if needed else "yellow",
        )
    verdict = (
        "may be the home of a run"
        if report.may_be_home
        else "can NOT be the home of a run; may be another region's relay"
    )
    return Group(table, Text(one_line(f"{report.url} {verdict}")))
