"""A report that scrolls away is not read: the worst comes first, and the verdict last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.cli.output import one_line, size_text
from deltastore.maintenance.findings import Finding, Report, Severity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from deltastore.maintenance.repair import Repaired

MAX_ROWS = 200  # a table longer than this is not read: --json has them all
_STYLES = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def report_table(report: Report, repairs: Sequence[Repaired]) -> RenderableType:
    """What was found, what was or can be done about it, and the verdict."""
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
    if repairs:
        parts.append(_repairs_table(repairs))
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


def _repairs_table(repairs: Sequence[Repaired]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("repair", "version", "object", "done", "outcome"):
        table.add_column(name, overflow="fold", justify="left")
    for one in repairs[:MAX_ROWS]:
        table.add_row(
            one.repair.action.value,
            str(one.repair.version),
            one_line(one.repair.key),
            "yes" if one.done else "no",
            one_line(one.message),
        )
    return table


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
