"""Upkeep that deletes by default is run once: shortcuts are made, deletions are shown until asked.

One round of everything that `deltastore.maintenance` does to one bucket, and of replication. With
`--dry-run` nothing is written at all; without it anchors, composites and copies are made; only
`--execute` deletes. Any number may run at once, and be stopped.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import typer

from deltastore.cli.connection import split_relays
from deltastore.cli.exits import ExitCode
from deltastore.cli.history import run_document
from deltastore.cli.maintain_table import Document, outcome_table
from deltastore.cli.progress import progress
from deltastore.clock import SystemClock
from deltastore.errors import InvalidInputError, Kind
from deltastore.events import AnchorWritten, Event, RegionFailed
from deltastore.format.signing import unsigned
from deltastore.maintenance.anchors import AnchorPolicy, chain_facts, write_anchor
from deltastore.maintenance.composites import due_composites, lowest_version, run_composites
from deltastore.maintenance.decisions import deletions
from deltastore.maintenance.janitor import JanitorPolicy, run_janitor
from deltastore.maintenance.retention import run_retention
from deltastore.maintenance.retention_plan import RetentionPolicy
from deltastore.maintenance.room import room_due
from deltastore.maintenance.settings import MaintenanceSettings
from deltastore.pipeline.replication import Replication
from deltastore.pipeline.replicator import Region, RegionLimits
from deltastore.repository.body_checks import have_bodies_checked
from deltastore.repository.resolve import find_head
from deltastore.repository.way import survey

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from deltastore.chain.lattice import Span
    from deltastore.cli.connection import Connection
    from deltastore.cli.output import Output
    from deltastore.clock import Clock
    from deltastore.format.signing import Signer, TrustedKeys
    from deltastore.maintenance.decisions import Decision
    from deltastore.repository.run import Run

LOOK_S = 1.0


class Task(StrEnum):
    """What `--only` names, in the order in which a round does it."""

    REPLICATE = "replicate"
    ANCHORS = "anchors"
    COMPOSITES = "composites"
    RETENTION = "retention"
    JANITOR = "janitor"


class Mode(StrEnum):
    """How far a round goes."""

    PLAN = "plan"
    MAKE = "make"
    EXECUTE = "execute"


@dataclass(frozen=True, slots=True)
class Upkeep:
    """One round, as the command line described it.

    Args:
        tasks: what to do; empty: everything, replication only with relays.
        relays: `NAME=URL` of the other regions, when this bucket is home.
        behind: names of relays that retention does not wait for.
        wait_s: for relays to catch up.
    """

    tasks: Sequence[Task] = ()
    mode: Mode = Mode.MAKE
    anchors: AnchorPolicy = field(default_factory=AnchorPolicy)
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    janitor: JanitorPolicy = field(default_factory=JanitorPolicy)
    relays: Sequence[str] = ()
    behind: Sequence[str] = ()
    wait_s: float = 600.0
    streams: int = 8
    signer: Signer = unsigned
    trusted: TrustedKeys | None = None

    def wants(self, task: Task) -> bool:
        """Whether the round does this task."""
        if self.tasks:
            return task in self.tasks
        return task is not Task.REPLICATE or bool(self.relays)


def maintain_run(run_url: str, connection: Connection, upkeep: Upkeep, output: Output) -> None:
    """Do one round and print what it did and what it would delete."""
    clock = SystemClock()
    began_s = clock.monotonic_s()
    with ExitStack() as stack:
        run = stack.enter_context(connection.run(run_url, streams=upkeep.streams))
        if upkeep.mode is not Mode.PLAN:
            have_bodies_checked(run.store, run.keys)
        regions = _open_relays(stack, connection, run, upkeep)
        round_ = _Round(run, regions, upkeep, clock)
        document: Document = {**run_document(run, run_url), "mode": upkeep.mode.value}
        for task in Task:
            work = getattr(round_, task.value)
            document[task.value] = None
            if upkeep.wants(task):
                with progress(f"{task.value} {run.name}"):
                    document[task.value] = work()
        document["seconds"] = round(clock.monotonic_s() - began_s, 3)
        output.emit(document, lambda: outcome_table(document))
    replicated = document[Task.REPLICATE.value]
    if replicated is not None and replicated["behind"] and upkeep.mode is not Mode.PLAN:
        raise typer.Exit(ExitCode.STORAGE)


class _Round:
    """The tasks of a round; each returns its part of the document."""

    def __init__(self, run: Run, regions: Mapping[str, Run], upkeep: Upkeep, clock: Clock) -> None:
        self._run = run
        self._regions = regions
        self._upkeep = upkeep
        self._clock = clock
        self._settings = MaintenanceSettings(streams=upkeep.streams)
        self._events: list[Event] = []

    def anchors(self) -> Document:
        """Make an anchor if one is due, for joiners or for retention."""
        up, run = self._upkeep, self._run
        facts = chain_facts(run, up.anchors, streams=up.streams, trusted=up.trusted)
        due = up.anchors.due(facts)
        if due is None:
            due = room_due(run, up.anchors, up.retention, streams=up.streams, trusted=up.trusted)
        if due is not None and up.mode is not Mode.PLAN:
            write_anchor(
                run,
                due,
                clock=self._clock,
                settings=self._settings,
                sink=self._events.append,
                signer=up.signer,
                trusted=up.trusted,
                chain_bytes=facts.chain_bytes,
            )
        written = [e for e in self._events if isinstance(e, AnchorWritten)]
        return {
            "start": facts.start,
            "chain_bytes": facts.chain_bytes,
            "chain_links": facts.chain_links,
            "due": due,
            "written": written[0].version if written else None,
            "size_bytes": written[0].size_bytes if written else 0,
        }

    def composites(self) -> Document:
        """Make the composites that are missing."""
        up, run = self._upkeep, self._run
        if up.mode is Mode.PLAN:
            head = find_head(run)
            lowest = lowest_version(run, head)
            found = survey(run, head, lowest=lowest, streams=up.streams, trusted=up.trusted)
            missing = due_composites(found, lowest=max(lowest, min(found.manifests)))
            return {"written": [], "lost": [], "failed": [], "missing": _spans(missing)}
        done = run_composites(
            run,
            clock=self._clock,
            settings=self._settings,
            sink=self._events.append,
            signer=up.signer,
            trusted=up.trusted,
        )
        return {
            "written": _spans(done.written),
            "lost": _spans(done.lost),
            "failed": _spans(done.failed),
            "missing": _spans(done.missing),
        }

    def retention(self) -> Document:
        """Plan what is below what must stay, and delete it if asked to."""
        up = self._upkeep
        done = run_retention(
            self._run,
            up.retention,
            dry_run=up.mode is not Mode.EXECUTE,
            regions=self._regions,
            behind=frozenset(up.behind),
            sink=self._events.append,
            streams=up.streams,
            trusted=up.trusted,
        )
        return {
            "head": done.plan.head,
            "floor": done.floor,
            "planned_floor": done.plan.floor,
            "settled_floor": done.plan.settled,
            **_deletions(done.plan.decisions, done.deleted),
        }

    def janitor(self) -> Document:
        """Find old orphans, and delete them if asked to."""
        up = self._upkeep
        dry_run = up.mode is not Mode.EXECUTE
        done = run_janitor(
            self._run,
            up.janitor,
            dry_run=dry_run,
            sink=self._events.append,
            streams=up.streams,
        )
        uploads = [upload.key for upload in done.uploads]
        return {**_deletions(done.decisions, done.deleted), "idle_uploads": uploads}

    def replicate(self) -> Document:
        """Bring the relays up to this bucket's HEAD."""
        up = self._upkeep
        if not self._regions:
            raise InvalidInputError(
                "there is nowhere to replicate to",
                kind=Kind.SETTING,
                hint="name the other regions: --relay NAME=URL",
            )
        if up.mode is Mode.PLAN:
            head = find_head(self._run)
            behind = [n for n, region in self._regions.items() if find_head(region) < head]
            return {"head": head, "behind": behind, "problems": []}
        replication = Replication(
            self._run,
            [Region(name, region) for name, region in self._regions.items()],
            limits=RegionLimits(streams=up.streams, memory_max_bytes=0, disk_max_bytes=0),
            poll_s=LOOK_S,
            clock=self._clock,
            sink=self._events.append,
        )
        try:
            behind = replication.behind(up.wait_s)
        finally:
            replication.close()
        failed = {e.region: e for e in self._events if isinstance(e, RegionFailed)}
        problems = [
            {"region": e.region, "kind": e.kind, "message": e.message}
            for e in failed.values()
            if e.region in behind
        ]
        return {"head": replication.head, "behind": behind, "problems": problems}


def _open_relays(
    stack: ExitStack, connection: Connection, run: Run, upkeep: Upkeep
) -> dict[str, Run]:
    regions: dict[str, Run] = {}
    for name, url in split_relays(upkeep.relays).items():
        regions[name] = stack.enter_context(connection.run(url, streams=upkeep.streams))
        if regions[name].record != run.record:
            raise InvalidInputError(
                f"the run at {url} is another one than {run.name!r}",
                kind=Kind.URL,
                hint="name a region of the same run",
            )
    unknown = [name for name in upkeep.behind if name not in regions]
    if unknown:
        raise InvalidInputError(
            f"--behind {unknown[0]} names no relay", kind=Kind.SETTING, hint="see --relay"
        )
    return regions


def _spans(spans: Iterable[Span]) -> list[list[int]]:
    return [[span.base, span.version] for span in spans]


def _deletions(decisions: Iterable[Decision], deleted: int) -> Document:
    doomed = deletions(decisions)
    return {
        "deleted": deleted,
        "deletions": [
            {"key": one.key, "size_bytes": one.size_bytes, "reason": one.reason} for one in doomed
        ],
        "deletions_bytes": sum(one.size_bytes for one in doomed),
    }
