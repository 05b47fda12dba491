"""What dead writers leave is billed for ever; what live ones are writing must not be touched.

Orphans are bodies that no manifest names: of a publish or a shortcut that was cut short, or that
lost a race. At and below HEAD every manifest is final, so whatever it does not name never will be.
Attempts at shortcuts go when their youngest body is older than `grace_s`, at least twice the time
after which a writer gives them up itself. Above HEAD a trainer may come back after a long outage
and commit what it uploaded before: there `abandoned_s` counts. Ages are the store's own dates; a
store without dates has no old objects.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.config import require
from deltastore.errors import FormatError, IntegrityError, Kind, NotFoundError
from deltastore.events import discard
from deltastore.format.keys import KeyKind, ParsedKey, parse_key
from deltastore.format.shortcut import AnchorManifest, CompositeManifest
from deltastore.maintenance.decisions import Decision, Verdict, carry_out, delete, keep
from deltastore.repository.fetch import load_manifest
from deltastore.repository.floor import Floor, Raise, read_floor, store_now_ms
from deltastore.repository.resolve import find_head
from deltastore.storage.uploads import LEAST_IDLE_S, abort_idle_uploads

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deltastore.events import EventSink
    from deltastore.repository.run import Run
    from deltastore.storage.store import ObjectInfo
    from deltastore.storage.uploads import IncompleteUpload

_BODIES = {KeyKind.SEGMENT, KeyKind.ANCHOR_FILE, KeyKind.COMPOSITE_SEGMENT}


@dataclass(frozen=True, slots=True)
class JanitorPolicy:
    """How old an orphan must be.

    Args:
        commit_deadline_s: after which every writer gives its bodies up (its own setting).
        grace_s: for attempts at shortcuts, and bodies at or below HEAD.
        abandoned_s: for bodies above HEAD.
        uploads_idle_s: for multipart uploads to which no part has been added, and temporary files
            of a file store to which nothing has been written.
    """

    commit_deadline_s: float = 1800.0
    grace_s: float = 3600.0
    abandoned_s: float = 7 * 86400.0  # longer than any outage a trainer survives
    uploads_idle_s: float = 86400.0

    def __post_init__(self) -> None:
        deadline = self.commit_deadline_s
        require(deadline > 0, "commit_deadline_s", deadline, "positive")
        require(
            self.grace_s >= 2 * deadline, "grace_s", self.grace_s, "at least 2 x commit_deadline_s"
        )
        require(
            self.abandoned_s >= self.grace_s, "abandoned_s", self.abandoned_s, "at least grace_s"
        )
        least = LEAST_IDLE_S
        require(
            self.uploads_idle_s >= least, "uploads_idle_s", self.uploads_idle_s, f">= {least:.0f}"
        )


@dataclass(frozen=True, slots=True)
class JanitorDone:
    """What one round found and did.

    Args:
        decisions: one per body.
        deleted: objects deleted; 0 in a dry run.
        uploads: unfinished uploads that were ended (in a dry run: would be).
    """

    decisions: tuple[Decision, ...]
    deleted: int
    uploads: tuple[IncompleteUpload, ...]

    @property
    def orphaned_bytes(self) -> int:
        """What old orphans take."""
        return sum(d.size_bytes for d in self.decisions if d.verdict is Verdict.DELETE)


def run_janitor(
    run: Run,
    policy: JanitorPolicy,
    *,
    dry_run: bool = True,
    sink: EventSink = discard,
    streams: int = 8,
) -> JanitorDone:
    """Find old orphans and, unless `dry_run`, delete them. Safe to run twice, and at once.

    Raises what reading the run raises: nothing is deleted from a run without a version.
    """
    now_ms = None if dry_run else store_now_ms(run, read_floor(run) or Floor((Raise(0, 0),)))
    decisions = plan_janitor(run, policy, now_ms=now_ms, streams=streams)
    deleted = 0 if dry_run else carry_out(run, decisions, by="janitor", sink=sink)
    uploads = abort_idle_uploads(
        run.store, run.keys.root, idle_s=policy.uploads_idle_s, dry_run=dry_run
    )
    return JanitorDone(decisions, deleted, uploads)


def plan_janitor(
    run: Run, policy: JanitorPolicy, *, now_ms: int | None = None, streams: int = 8
) -> tuple[Decision, ...]:
    """One decision per body of the run; changes nothing.

    Args:
        now_ms: the store's own time; by default that of its newest object.
    """
    # The listing comes first: what is committed afterwards is named when its manifest is read.
    objects = list(run.store.list(run.keys.root))
    head = find_head(run)
    if now_ms is None:
        now_ms = int(max((i.last_modified_s for i in objects), default=0.0) * 1000)
    attempts: dict[tuple[KeyKind, int | None, int, str], list[ObjectInfo]] = {}
    for info in objects:
        parsed = _parse(info.key)
        if parsed is None or parsed.kind not in _BODIES or parsed.version is None:
            continue
        attempt = "" if parsed.kind is KeyKind.SEGMENT else str(parsed.name).partition("/")[0]
        where = (parsed.kind, parsed.base_version, parsed.version, attempt)
        attempts.setdefault(where, []).append(info)
    places = {(kind, base, version) for kind, base, version, _attempt in attempts}
    with ThreadPoolExecutor(streams, thread_name_prefix="janitor") as pool:
        read = pool.map(lambda place: (place, _named(run, head, *place)), places)
        named = dict(read)
    decisions: list[Decision] = []
    for (kind, base, version, _attempt), infos in attempts.items():
        published = kind is not KeyKind.COMPOSITE_SEGMENT
        limit_s = policy.abandoned_s if published and version > head else policy.grace_s
        age_s = _age_s(infos, now_ms)
        decisions += _judge(infos, named[(kind, base, version)], age_s, limit_s)
    return tuple(sorted(decisions, key=lambda one: one.key))


def _judge(
    infos: Iterable[ObjectInfo], named: set[str] | None, age_s: float | None, limit_s: float
) -> list[Decision]:
    result: list[Decision] = []
    for info in infos:
        if named is None:
            result.append(keep(info.key, info.size_bytes, "its manifest cannot be read"))
        elif info.key in named:
            result.append(keep(info.key, info.size_bytes, "named by its manifest"))
        elif age_s is None:
            result.append(keep(info.key, info.size_bytes, "the store has no dates"))
        elif age_s < limit_s:
            result.append(keep(info.key, info.size_bytes, f"may be in use: {age_s:.0f} s old"))
        else:
            reason = f"named by nothing for {age_s:.0f} s"
            result.append(delete(info.key, info.size_bytes, reason))
    return result


def _age_s(infos: Iterable[ObjectInfo], now_ms: int) -> float | None:
    """Age of the youngest: an attempt is in use as long as anything is added to it."""
    dates = [info.last_modified_s for info in infos]
    if min(dates) <= 0:
        return None
    return now_ms / 1000 - max(dates)


def _named(run: Run, head: int, kind: KeyKind, base: int | None, version: int) -> set[str] | None:
    """The keys that manifests name there; None when one is damaged: then nothing is an orphan."""
    names: set[str] = set()
    try:
        if kind is not KeyKind.COMPOSITE_SEGMENT and version <= head:
            core = load_manifest(run, version).core
            names |= {segment.key for segment in core.segments}
            names |= {file.key for file in core.files if file.key is not None}
        if kind is KeyKind.ANCHOR_FILE:
            names |= _anchor_names(run, version)
        if kind is KeyKind.COMPOSITE_SEGMENT and base is not None:
            names |= _composite_names(run, base, version)
    except (FormatError, IntegrityError):
        return None
    except NotFoundError as err:
        if err.kind is not Kind.VERSION_MISSING:
            raise
        return None  # a hole: repair comes first
    return names


def _anchor_names(run: Run, version: int) -> set[str]:
    text = _read(run, run.keys.anchor(version))
    if text is None:
        return set()
    return {str(file.key) for file in AnchorManifest.from_bytes(text).core.files}


def _composite_names(run: Run, base: int, version: int) -> set[str]:
    text = _read(run, run.keys.composite(base, version))
    if text is None:
        return set()
    return {segment.key for segment in CompositeManifest.from_bytes(text).core.segments}


def _read(run: Run, key: str) -> bytes | None:
    try:
        return run.store.get(key)
    except NotFoundError as err:
        if err.kind is not Kind.OBJECT_MISSING:
            raise
        return None


def _parse(key: str) -> ParsedKey | None:
    try:
        return parse_key(key)
    except FormatError:
        return None
