"""A check whose exit code is always 0 is not run by anyone's script: errors here exit with 6."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from deltastore.cli.exits import ExitCode
from deltastore.cli.history import run_document
from deltastore.cli.output import Document, Output, one_line, size_text
from deltastore.cli.progress import progress
from deltastore.clock import SystemClock
from deltastore.maintenance.findings import Finding, Report, Severity
from deltastore.maintenance.fsck import check_run

if TYPE_CHECKING:
    from rich.console import RenderableType

    from deltastore.cli.connection import Connection

MAX_ROWS = 200  # a table longer than this is not read: --json has them all
_STYLES = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def verify_run(
    run_url: str, connection: Connection, *, deep: bool, streams: int, output: Output
) -> None:
    """Check a run and print what was found; exits with 6 when a finding is an error."""
    with connection.run(run_url, streams=streams) as run:
        with progress(f"verify {run.name}") as meter:
            report = check_run(
                run, deep=deep, streams=streams, clock=SystemClock(), progress=meter.reached
            )
        document = {**run_document(run, run_url), **report_document(report)}
        output.emit(document, lambda: _report_table(report))
    if not report.ok:
        raise typer.Exit(ExitCode.INTEGRITY)


def report_document(report: Report) -> Document:
    """The report as `--json` prints it."""
    return {
        "ok": report.ok,
        "deep": report.deep,
        "head": report.head,
        "versions": report.versions,
        "replayed": report.replayed,
        "objects": report.objects,
        "size_bytes": report.size_bytes,
        "floor": report.floor,
        "gone": report.gone,
        "shortcuts": report.shortcuts,
        "proved": report.proved,
        "seconds": round(report.seconds, 3),
        "findings": [
            {
                "severity": finding.severity.value,
                "defect": finding.defect.value,
                "key": finding.key,
                "version": finding.version,
                "message": finding.message,
                "remedy": finding.remedy,
            }
            for finding in report.findings
        ],
    }


def _report_table(report: Report) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    if report.findings:
        table = Table(box=None, pad_edge=False)
        for name in ("severity", "defect", "version", "what", "way out"):
            table.add_column(name, overflow="fold", justify="left")
        shown = sorted(report.findings, key=_rank)[:MAX_ROWS]
        for finding in shown:
            table.add_row(*_row(finding), style=_STYLES[finding.severity])
        parts.append(table)
        if len(report.findings) > len(shown):
            parts.append(Text(f"and {len(report.findings) - len(shown)} more: see --json"))
    errors = sum(finding.severity is Severity.ERROR for finding in report.findings)
    verdict = "whole" if report.ok else f"DAMAGED: {errors} errors"
    proved = f", {report.replayed} replayed and proved bit for bit" if report.deep else ""
    head = "no version" if report.head is None else f"HEAD {report.head}"
    shortcuts = f", {report.shortcuts} shortcuts" if report.shortcuts else ""
    gone = f", {report.gone} gone below the floor {report.floor}" if report.gone else ""
    parts.append(
        Text(
            f"{verdict}: {head}, {report.versions} versions{proved}{gone}{shortcuts},"
            f" {report.objects} objects,"
            f" {size_text(report.size_bytes)}, {report.seconds:.1f} s"
        )
    )
    return Group(*parts)


def _rank(finding: Finding) -> int:
    return list(Severity).index(finding.severity)


def _row(finding: Finding) -> tuple[str, str, str, str, str]:
    where = f" [{finding.key}]" if finding.key else ""
    return (
        finding.severity.value,
        finding.defect.value,
        "" if finding.version is None else str(finding.version),
        one_line(finding.message + where),
        one_line(finding.remedy),
    )
