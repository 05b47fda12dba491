"""A check whose exit code is always 0 is not run by anyone's script: errors here exit with 6.

Damage that can be mended is listed with what would be done about it. `--repair` does it, then the
run is checked again: exit code and report are those of the second check.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from deltastore.cli.exits import ExitCode
from deltastore.cli.history import run_document
from deltastore.cli.progress import progress
from deltastore.cli.verify_table import report_table
from deltastore.clock import SystemClock
from deltastore.format.signing import unsigned
from deltastore.maintenance.fsck import check_run
from deltastore.maintenance.repair import (
    Repair,
    RepairAction,
    Repaired,
    mend_run,
    plan_repair,
)
from deltastore.maintenance.repair_record import restore_opening
from deltastore.repository.run import open_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltastore.cli.connection import Connection
    from deltastore.cli.output import Document, Output
    from deltastore.format.signing import Signer, TrustedKeys
    from deltastore.maintenance.findings import Report
    from deltastore.repository.run import Run
    from deltastore.storage.store import ObjectStore

PLANNED = "not done: --repair does it"


@dataclass(frozen=True, slots=True)
class Verifying:
    """What to check and to do.

    Args:
        source: URL of the same run in another region and how to reach it.
        signer: of anchors that a repair cuts.
    """

    deep: bool = False
    repair: bool = False
    source: tuple[str, Connection] | None = None
    streams: int = 8
    trusted: TrustedKeys | None = None
    signer: Signer = unsigned


def verify_run(run_url: str, connection: Connection, verifying: Verifying, output: Output) -> None:
    """Check a run and print what was found; exits with 6 when a finding is an error."""
    with ExitStack() as stack:
        place = connection.store(run_url, streams=verifying.streams)
        store, name = stack.enter_context(place)
        source, opened = None, list[Repaired]()
        if verifying.source is not None:
            url, other = verifying.source
            source = stack.enter_context(other.run(url, streams=verifying.streams))
            if verifying.repair:
                opened = _make_openable(store, name, source)
        run = open_run(store, name)
        report = _check(run, verifying)
        repairs = opened
        if not report.ok and not verifying.repair:
            repairs = [Repaired(step, False, PLANNED) for step in plan_repair(run, report, source)]
        elif not report.ok:
            with progress(f"repair {run.name}"):
                report, mended = mend_run(
                    run,
                    report,
                    source,
                    check=lambda: _check(run, verifying),
                    clock=SystemClock(),
                    streams=verifying.streams,
                    signer=verifying.signer,
                    trusted=verifying.trusted,
                )
            repairs = opened + mended
        document = {**run_document(run, run_url), **report_document(report, repairs)}
        output.emit(document, lambda: report_table(report, repairs))
    if not report.ok:
        raise typer.Exit(ExitCode.INTEGRITY)


def report_document(report: Report, repairs: Sequence[Repaired]) -> Document:
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
        "repairs": [
            {
                "action": one.repair.action.value,
                "key": one.repair.key,
                "version": one.repair.version,
                "reason": one.repair.reason,
                "done": one.done,
                "message": one.message,
            }
            for one in repairs
        ],
    }


def _make_openable(store: ObjectStore, name: str, source: Run) -> list[Repaired]:
    """Restore run.json and the layout, without which nothing can be checked."""
    reason = "the run cannot be opened without it"
    return [
        Repaired(Repair(RepairAction.COPY, key, 0, reason), True, f"copied from {source.store.url}")
        for key in restore_opening(store, name, source)
    ]


def _check(run: Run, verifying: Verifying) -> Report:
    with progress(f"verify {run.name}") as meter:
        return check_run(
            run,
            deep=verifying.deep,
            streams=verifying.streams,
            clock=SystemClock(),
            progress=meter.reached,
            trusted=verifying.trusted,
        )
