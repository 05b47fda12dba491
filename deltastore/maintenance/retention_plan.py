"""Deleting by age alone cuts the chain under its readers: what may go follows from what must stay.

The newest `keep_versions` versions must stay replayable, and every region must be able to copy what
it lacks. So the newest whole state at or below all of these stays, with everything above it: its
version is the *floor*. Below it deltas, older whole states and composites may go, but only where
the floor has been advertised for `grace_s`; version manifests stay for ever. Cumulative composites
go when a longer one has been there for `grace_s`, and results of old steps.

Planning reads and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deltastore.chain.lattice import Span, superseded
from deltastore.config import require
from deltastore.errors import FormatError, IntegrityError, Kind, NotFoundError
from deltastore.format.keys import KeyKind, ParsedKey, parse_key
from deltastore.format.manifest import VersionKind
from deltastore.format.shortcut import AnchorManifest, CompositeManifest
from deltastore.maintenance.decisions import Decision, Verdict, delete, keep
from deltastore.repository.fetch import load_manifest
from deltastore.repository.floor import Floor, read_floor
from deltastore.repository.full import WEIGHTS_SUFFIX
from deltastore.repository.history import walk_down
from deltastore.repository.resolve import find_head
from deltastore.repository.shortcuts import load_anchor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from deltastore.format.fields import FileRef
    from deltastore.format.manifest import VersionManifest
    from deltastore.format.signing import TrustedKeys
    from deltastore.repository.run import Run
    from deltastore.storage.store import ObjectInfo


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """What stays.

    Args:
        keep_versions: the newest ones that must stay replayable.
        grace_s: how long readers are told before bodies go: longer than the longest plan takes.
        keep_version_zero: whether the first checkpoint stays whole (its small files always do).
        rollout_keep_versions: results of older versions go.
        readers_max_versions: a reader further behind than this delays nothing.
    """

    keep_versions: int = 256
    grace_s: float = 6 * 3600.0
    keep_version_zero: bool = True
    rollout_keep_versions: int = 64
    readers_max_versions: int = 1024

    def __post_init__(self) -> None:
        require(self.keep_versions >= 1, "keep_versions", self.keep_versions, "at least 1")
        require(self.grace_s > 0, "grace_s", self.grace_s, "positive")
        rollouts = self.rollout_keep_versions
        require(
            rollouts >= 2, "rollout_keep_versions", rollouts, "at least 2: v and v - 1 are live"
        )
        readers = self.readers_max_versions
        require(readers >= 0, "readers_max_versions", readers, "not negative")


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What retention would do to one bucket.

    Args:
        head: the newest version.
        floor: what the floor should be: the version of the whole state that everything kept
            builds on.
        files: of that whole state.
        advertised: the floor that readers know of now; None when they know of none.
        settled: everything below this has been known to go for long enough.
        decisions: every object under the run's prefix, by key.
    """

    head: int
    floor: int
    files: tuple[FileRef, ...]
    advertised: Floor | None
    settled: int
    decisions: tuple[Decision, ...]

    @property
    def deleted_bytes(self) -> int:
        """What would be freed."""
        return sum(d.size_bytes for d in self.decisions if d.verdict is Verdict.DELETE)

    @property
    def raises_floor(self) -> bool:
        """Whether readers must be told of a higher floor."""
        return self.advertised is None or self.floor > self.advertised.version


@dataclass(slots=True)
class _Facts:
    """What the rules for single objects go by."""

    run: Run
    policy: RetentionPolicy
    head: int
    settled: int
    now_ms: int
    objects: dict[str, ObjectInfo]
    spans: list[Span] = field(default_factory=list)
    doomed: set[str] = field(default_factory=set)  # bodies named by shortcuts that go

    def is_old(self, key: str) -> bool:
        """Whether an object is older than the grace time; a store without dates has none."""
        info = self.objects.get(key)
        if info is None or info.last_modified_s <= 0:
            return False
        return self.now_ms - info.last_modified_s * 1000 >= self.policy.grace_s * 1000


def plan_retention(
    run: Run,
    policy: RetentionPolicy,
    *,
    now_ms: int | None = None,
    regions: Mapping[str, Run] | None = None,
    behind: frozenset[str] = frozenset(),
    readers: Sequence[int] = (),
    streams: int = 8,
    trusted: TrustedKeys | None = None,
) -> RetentionPlan:
    """Decide for every object of a run in one bucket. Nothing is changed.

    Args:
        now_ms: the store's own time (`store_now_ms`); by default that of its newest object, which
            is never too late.
        regions: where this bucket is home: the regions that copy from it.
        behind: names of regions that will start again from an anchor of their own.
        readers: versions that announced readers hold: they lengthen the wait, up to a limit.

    Raises what reading the chain raises: nothing is deleted from a chain that cannot be read.
    """
    head = find_head(run)
    needed = max(0, head - policy.keep_versions + 1)
    for name, region in (regions or {}).items():
        if name not in behind:
            needed = min(needed, find_head(region))
    objects = {info.key: info for info in run.store.list(run.keys.root)}
    floor, files = _newest_start(run, head, needed, objects, streams, trusted)
    if now_ms is None:
        now_ms = int(max((i.last_modified_s for i in objects.values()), default=0.0) * 1000)
    advertised = read_floor(run)
    known = None if advertised is None else advertised.settled(now_ms, policy.grace_s)
    settled = min(floor, known or 0)
    waiting = [v for v in readers if head - v <= policy.readers_max_versions]
    settled = min([settled, *waiting])
    facts = _Facts(run, policy, head, settled, now_ms, objects)
    decisions = _decide(facts)
    return RetentionPlan(head, floor, files, advertised, settled, decisions)


def _newest_start(
    run: Run,
    head: int,
    needed: int,
    objects: Mapping[str, ObjectInfo],
    streams: int,
    trusted: TrustedKeys | None,
) -> tuple[int, tuple[FileRef, ...]]:
    """The newest whole state at or below `needed` that is there, and its files."""
    for target in _down_to_the_start(run, head, streams, trusted):
        version = target.core.version
        if version > needed:
            continue
        candidates: list[tuple[FileRef, ...]] = []
        if target.core.kind is VersionKind.FULL:
            candidates.append(target.core.files)
        if run.keys.anchor(version) in objects:
            try:
                candidates.append(load_anchor(run, target, trusted=trusted).core.files)
            except (FormatError, IntegrityError, NotFoundError):
                candidates.append(())  # one that does not hold is no start
        for files in candidates:
            if files and all(_is_whole(objects, file) for file in files):
                return version, files
    return 0, ()


def _down_to_the_start(
    run: Run, head: int, streams: int, trusted: TrustedKeys | None
) -> Iterator[VersionManifest]:
    """The manifests from HEAD down; a region's chain may begin above 0, `find_head` saw no hole."""
    try:
        yield from walk_down(run, head, streams=streams, trusted=trusted)
    except NotFoundError as err:
        if err.kind is not Kind.VERSION_MISSING:
            raise


def _is_whole(objects: Mapping[str, ObjectInfo], file: FileRef) -> bool:
    info = None if file.key is None else objects.get(file.key)
    return info is not None and info.size_bytes == file.size_bytes


def _decide(facts: _Facts) -> tuple[Decision, ...]:
    parsed: dict[str, ParsedKey | None] = {}
    for key in facts.objects:
        try:
            parsed[key] = parse_key(key)
        except FormatError:
            parsed[key] = None
    facts.spans = [
        Span(p.base_version, p.version)
        for p in parsed.values()
        if p is not None
        and p.kind is KeyKind.COMPOSITE
        and p.base_version is not None
        and p.version is not None
    ]
    manifests = {KeyKind.ANCHOR, KeyKind.COMPOSITE}
    # Manifests first: which bodies go with them is what they say.
    ordered = sorted(parsed, key=lambda key: (p := parsed[key]) is None or p.kind not in manifests)
    decided = {key: _decide_one(facts, key, parsed[key]) for key in ordered}
    return tuple(decided[key] for key in sorted(decided))


def _decide_one(facts: _Facts, key: str, parsed: ParsedKey | None) -> Decision:
    size_bytes = facts.objects[key].size_bytes
    if parsed is None or parsed.version is None:
        known = parsed is not None
        return keep(key, size_bytes, "the run's own record" if known else "not one of ours")
    match parsed.kind:
        case KeyKind.SEGMENT:
            return _segment(facts, key, size_bytes, parsed.version)
        case KeyKind.ANCHOR:
            return _anchor(facts, key, size_bytes, parsed.version)
        case KeyKind.ANCHOR_FILE:
            return _anchor_file(facts, key, size_bytes, parsed.version)
        case KeyKind.COMPOSITE:
            base = 0 if parsed.base_version is None else parsed.base_version
            return _composite(facts, key, size_bytes, Span(base, parsed.version))
        case KeyKind.COMPOSITE_SEGMENT:
            if key in facts.doomed:
                return delete(key, size_bytes, "its composite goes")
            return keep(key, size_bytes, "part of a composite, or the janitor's")
        case KeyKind.ROLLOUT:
            return _rollout(facts, key, size_bytes, parsed.version)
        case _:
            return keep(key, size_bytes, "version manifests stay for ever")


def _segment(facts: _Facts, key: str, size_bytes: int, version: int) -> Decision:
    if version > facts.head:
        return keep(key, size_bytes, "not committed: being published, or the janitor's")
    if version <= facts.settled:
        return delete(key, size_bytes, f"leads to {version}, the floor is {facts.settled}")
    return keep(key, size_bytes, f"version {version} needs it")


def _anchor(facts: _Facts, key: str, size_bytes: int, version: int) -> Decision:
    if version >= facts.settled:
        return keep(key, size_bytes, f"joiners start from anchor {version}")
    try:
        core = AnchorManifest.from_bytes(facts.run.store.get(key)).core
        facts.doomed.update(file.key for file in core.files if file.key is not None)
    except (FormatError, NotFoundError) as err:
        _let_pass(err)  # its bodies are orphans once it is gone
    reason = f"whole state of {version}, the floor is {facts.settled}"
    return delete(key, size_bytes, reason, first=True)


def _anchor_file(facts: _Facts, key: str, size_bytes: int, version: int) -> Decision:
    if version == 0 and (facts.policy.keep_version_zero or not key.endswith(WEIGHTS_SUFFIX)):
        return keep(key, size_bytes, "version 0 is what every checkpoint of the run looks like")
    if version >= facts.settled:
        return keep(key, size_bytes, f"part of the whole state of {version}, or the janitor's")
    if key in facts.doomed or key in _full_files(facts, version):
        reason = f"whole state of {version}, the floor is {facts.settled}"
        return delete(key, size_bytes, reason)
    return keep(key, size_bytes, "named by nothing: the janitor's")


def _full_files(facts: _Facts, version: int) -> set[str]:
    """Keys of the files of a full version; empty for a delta."""
    core = load_manifest(facts.run, version).core
    return {file.key for file in core.files if file.key is not None}


def _composite(facts: _Facts, key: str, size_bytes: int, span: Span) -> Decision:
    longer = superseded(span, facts.spans)
    if span.base < facts.settled:
        reason = f"starts at {span.base}, the floor is {facts.settled}"
    elif longer is not None and facts.is_old(facts.run.keys.composite(longer.base, longer.version)):
        reason = f"{longer.base}-{longer.version} has replaced it"
    else:
        return keep(key, size_bytes, f"leads from {span.base} to {span.version}")
    try:
        core = CompositeManifest.from_bytes(facts.run.store.get(key)).core
        facts.doomed.update(segment.key for segment in core.segments)
    except (FormatError, NotFoundError) as err:
        _let_pass(err)
    return delete(key, size_bytes, reason, first=True)


def _rollout(facts: _Facts, key: str, size_bytes: int, version: int) -> Decision:
    if version >= facts.head - facts.policy.rollout_keep_versions or not facts.is_old(key):
        return keep(key, size_bytes, "a result that may still be read")
    return delete(key, size_bytes, f"a result of version {version}, HEAD is {facts.head}")


def _let_pass(err: FormatError | NotFoundError) -> None:
    """A manifest that is garbage, or was deleted meanwhile, names nothing; other errors count."""
    if err.kind in {Kind.BUCKET_MISSING, Kind.RUN_MISSING}:
        raise err
