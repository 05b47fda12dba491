"""Damage mended by hand is damaged twice: a repair is a plan first, then says which steps held.

Goes by what `check_run` found. An object of a version is copied from another region: same key, same
digest (`repair_copy`). A damaged shortcut is copied if the other region has the same one, else it
is given up: a composite is deleted, an anchor is cut again. Versions that copying cannot save are
lost, but the chain goes on from an anchor of the last of them, cut from the other region's state.

Each step is safe to repeat; a crash in between is a repair cut short. Memory: one state, for an
anchor.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from deltastore.errors import (
    DeltastoreError,
    FormatError,
    IntegrityError,
    Kind,
    NotFoundError,
    StorageError,
)
from deltastore.format.keys import KeyKind, parse_key
from deltastore.format.signing import unsigned
from deltastore.maintenance.anchors import write_anchor
from deltastore.maintenance.findings import Defect, Severity
from deltastore.maintenance.fsck_bodies import OF_THE_RUN, require_run_fault
from deltastore.maintenance.repair_copy import (
    bodies_of,
    copy_body,
    has_object,
    require_same_run,
    shortcut_body,
    vouched_manifests,
    write_manifest,
)
from deltastore.maintenance.shortcut_commit import is_there
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion
from deltastore.repository.rebuild import replay
from deltastore.repository.resolve import version_exists

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from deltastore.clock import Clock
    from deltastore.format.signing import Signer, TrustedKeys
    from deltastore.maintenance.findings import Finding, Report
    from deltastore.maintenance.settings import MaintenanceSettings
    from deltastore.repository.rebuild import Replayed
    from deltastore.repository.run import Run


MAX_ROUNDS = 8
"""Checks that may each find what the damage before had hidden: more are not made."""


class RepairAction(StrEnum):
    """What is done about damage. Append only: scripts match on these."""

    COPY = "copy"
    """An object is copied from the other region."""
    COPY_MANIFEST = "copy_manifest"
    """A version's manifest, and the bodies it names, are copied from the other region."""
    DELETE_SHORTCUT = "delete_shortcut"
    """A composite's manifest is deleted; its bodies are the janitor's."""
    CUT_ANCHOR = "cut_anchor"
    """An anchor is made, in place of a damaged one or where the chain was lost."""


@dataclass(frozen=True, slots=True)
class Repair:
    """One step. `reason` says what it mends, for people."""

    action: RepairAction
    key: str
    version: int
    reason: str
    body: tuple[str, int, str] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes to copy, as far as known before."""
        return 0 if self.body is None else self.body[1]


@dataclass(frozen=True, slots=True)
class Repaired:
    """What became of a step."""

    repair: Repair
    done: bool
    message: str


def plan_repair(
    run: Run, report: Report, source: Run | None, *, cut_lost: bool = True
) -> tuple[Repair, ...]:
    """What can be done about the errors of a report, in order. Nothing is changed.

    Args:
        source: the same run in another region; None: only shortcuts can be mended.
        cut_lost: whether an anchor is cut where copying cannot be enough.

    Raises IntegrityError(broken_chain) when `source` is another run.
    """
    if source is not None:
        require_same_run(run, source)
    manifests: dict[str, Repair] = {}
    bodies: dict[str, Repair] = {}
    shortcuts: dict[str, Repair] = {}
    for finding in report.findings:
        if finding.severity is not Severity.ERROR or finding.key is None:
            continue
        for repair in _mend(run, report, source, finding):
            table = {RepairAction.COPY_MANIFEST: manifests, RepairAction.COPY: bodies}
            table.get(repair.action, shortcuts).setdefault(repair.key, repair)
    # What a damaged manifest says of bodies is not believed: they come with the whole one.
    unsure = {step.version for step in manifests.values()}
    others = (*bodies.values(), *shortcuts.values())
    plan = [*manifests.values(), *(step for step in others if step.version not in unsure)]
    if source is not None and cut_lost and not _may_be_enough(source, plan):
        plan += _cuts(run, report, without=shortcuts.keys())
    return tuple(plan)


def mend_run(
    run: Run,
    report: Report,
    source: Run | None,
    *,
    check: Callable[[], Report],
    clock: Clock,
    streams: int = 8,
    settings: MaintenanceSettings | None = None,
    signer: Signer = unsigned,
    trusted: TrustedKeys | None = None,
) -> tuple[Report, list[Repaired]]:
    """Repair and check again, as long as that finds something else: one damage can hide another.

    Anchors for versions that are lost are cut at the end, when nothing more can be copied.

    Args:
        report: of a check just made.
        check: makes another one like it.

    Returns the last report, and what became of each step when it was last taken.
    """
    outcomes: dict[tuple[RepairAction, str], Repaired] = {}
    may_cut = False
    for _ in range(MAX_ROUNDS):
        if report.ok:
            break
        plan = plan_repair(run, report, source, cut_lost=may_cut)
        for one in execute_repair(
            run,
            plan,
            source,
            clock=clock,
            streams=streams,
            settings=settings,
            signer=signer,
            trusted=trusted,
        ):
            outcomes[(one.repair.action, one.repair.key)] = one
        before, report = report, check()
        if may_cut:
            break
        may_cut = report.findings == before.findings
    return report, list(outcomes.values())


def execute_repair(
    run: Run,
    plan: Iterable[Repair],
    source: Run | None,
    *,
    clock: Clock,
    streams: int = 8,
    settings: MaintenanceSettings | None = None,
    signer: Signer = unsigned,
    trusted: TrustedKeys | None = None,
) -> list[Repaired]:
    """Carry a plan out; a step that fails says why and does not keep the others back.

    Raises StorageError: then nothing is known about the rest.
    """
    steps = list(plan)
    numbers = [s.version for s in steps if s.action is RepairAction.COPY_MANIFEST]
    vouched = {} if source is None else vouched_manifests(run, source, numbers, trusted=trusted)

    def carry_out(step: Repair) -> str:
        match step.action:
            case RepairAction.COPY:
                return _copy(run, source, step, streams)
            case RepairAction.COPY_MANIFEST:
                found = vouched.get(step.version)
                if found is None or source is None:
                    raise _no_source(step)
                if isinstance(found, DeltastoreError):
                    raise found
                copied = [copy_body(run, source, b, streams=streams) for b in bodies_of(found)]
                write_manifest(run, found)
                return f"copied, with {sum(copied)} bodies"
            case RepairAction.DELETE_SHORTCUT:
                run.store.delete([step.key])
                return "deleted: `deltastore maintain --only composites` makes it again"
            case RepairAction.CUT_ANCHOR:
                return _cut(run, source, step, clock, streams, settings, signer, trusted)

    return [_attempt(step, carry_out) for step in steps]


def _attempt(step: Repair, carry_out: Callable[[Repair], str]) -> Repaired:
    try:
        return Repaired(step, True, carry_out(step))
    except StorageError:
        raise
    except DeltastoreError as err:
        if err.kind is Kind.BUCKET_MISSING:
            raise
        return Repaired(step, False, str(err))


def _mend(run: Run, report: Report, source: Run | None, finding: Finding) -> list[Repair]:
    """The steps that one finding asks for; none when nothing can be done about it."""
    key = str(finding.key)
    try:
        parsed = parse_key(key)
    except FormatError:
        return []
    version = parsed.version
    if version is None:
        return []
    if parsed.kind is KeyKind.VERSION:
        if source is None:
            return []
        numbers = [version]
        if finding.defect is Defect.HOLE:
            numbers = _absent_from(run, report, version)
        return [
            Repair(RepairAction.COPY_MANIFEST, run.keys.version(n), n, finding.message)
            for n in numbers
        ]
    body = _body(run, version, key)
    if body is not None:
        if source is None:
            return []
        return [Repair(RepairAction.COPY, key, version, finding.message, body)]
    body = shortcut_body(run, parsed, key)
    if body is not None and source is not None and has_object(source, key, body[1]):
        return [Repair(RepairAction.COPY, key, version, finding.message, body)]
    if parsed.kind in {KeyKind.COMPOSITE, KeyKind.COMPOSITE_SEGMENT}:
        at = run.keys.composite(parsed.base_version or 0, version)
        return [Repair(RepairAction.DELETE_SHORTCUT, at, version, finding.message)]
    if parsed.kind in {KeyKind.ANCHOR, KeyKind.ANCHOR_FILE}:
        at = run.keys.anchor(version)
        return [Repair(RepairAction.CUT_ANCHOR, at, version, finding.message)]
    return []


def _absent_from(run: Run, report: Report, first: int) -> list[int]:
    """The numbers of a hole: from the first that is missing up to the next that is there."""
    head = first if report.head is None else report.head
    numbers = []
    while first <= head and not version_exists(run, first):
        numbers.append(first)
        first += 1
    return numbers


def _body(run: Run, version: int, key: str) -> tuple[str, int, str] | None:
    """What the version's own manifest says of a body; None when it does not name it."""
    try:
        manifest = load_manifest(run, version)
    except OF_THE_RUN as err:
        require_run_fault(err)
        return None
    return next((body for body in bodies_of(manifest) if body[0] == key), None)


def _cuts(run: Run, report: Report, *, without: Iterable[str]) -> list[Repair]:
    """An anchor at the end of each run of lost versions."""
    present = set(without)
    steps = []
    for first, last in report.lost:
        key = run.keys.anchor(last)
        which = f"version {first}" if first == last else f"versions {first} to {last}"
        reason = f"{which} cannot be rebuilt here: the chain goes on from {last}"
        if key not in present:
            steps.append(Repair(RepairAction.CUT_ANCHOR, key, last, reason))
    return steps


def _may_be_enough(source: Run, plan: Iterable[Repair]) -> bool:
    """Whether the other region has, by name and size, all that is to be copied."""
    copies = [s for s in plan if s.action in {RepairAction.COPY, RepairAction.COPY_MANIFEST}]
    for step in copies:
        if not has_object(source, step.key, None if step.body is None else step.size_bytes):
            return False
    return bool(copies)


def _copy(run: Run, source: Run | None, step: Repair, streams: int) -> str:
    if source is None or step.body is None:
        raise _no_source(step)
    if copy_body(run, source, step.body, streams=streams):
        return f"copied {step.size_bytes} bytes from {source.store.url}"
    return "is whole already"


def _cut(
    run: Run,
    source: Run | None,
    step: Repair,
    clock: Clock,
    streams: int,
    settings: MaintenanceSettings | None,
    signer: Signer,
    trusted: TrustedKeys | None,
) -> str:
    """Make an anchor; one that is in its place is deleted when the new one's state is at hand."""
    found, where = _replayed(run, source, step.version, clock, streams, trusted)
    point = ActiveVersion.of(load_manifest(run, step.version))
    if found.held.point != point:
        raise IntegrityError(
            f"{where} has another version {step.version}",
            kind=Kind.BROKEN_CHAIN,
            run=run.name,
            version=step.version,
            hint="restore the manifests first",
        )
    if is_there(run, step.key):
        run.store.delete([step.key])
    write_anchor(
        run,
        step.version,
        clock=clock,
        settings=settings,
        signer=signer,
        trusted=trusted,
        held=found.held,
    )
    return f"cut an anchor of version {step.version} from {where}"


def _replayed(
    run: Run,
    source: Run | None,
    version: int,
    clock: Clock,
    streams: int,
    trusted: TrustedKeys | None,
) -> tuple[Replayed, str]:
    """The state of a version, from here if it can be rebuilt here, else from the other region."""
    try:
        return replay(run, version, clock=clock, streams=streams, trusted=trusted), "here"
    except OF_THE_RUN as err:
        require_run_fault(err)
        if source is None:
            raise
    other = replay(source, version, clock=clock, streams=streams, trusted=trusted)
    return other, source.store.url


def _no_source(step: Repair) -> NotFoundError:
    return NotFoundError(
        "no other region was named to copy from",
        kind=Kind.OBJECT_MISSING,
        version=step.version,
        key=step.key,
        hint="name one: `deltastore verify --repair --from URL`",
    )
