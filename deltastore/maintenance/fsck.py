"""Damage found by the joiner that needs the object comes too late: this walks the whole run first.

The check reads one listing and every manifest: manifests readable and of this run, chain without a
hole, hashes linked, every named object there with its size, shortcuts (`fsck_shortcuts`) leading
where they say. A deep check (`fsck_replay`) also reads every object and replays every version.
Listings may be stale, so an object is only called missing after the store was asked for that key.
What retention deleted is not missing. Nothing is written or repaired (see `repair`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.errors import FormatError, Kind, NotFoundError
from deltastore.format.keys import Hint, KeyKind, ParsedKey, parse_key
from deltastore.format.manifest import VersionKind
from deltastore.maintenance.findings import RESTORE, Defect, Finding, Report, Severity
from deltastore.maintenance.fsck_chain import Chain, check_start, read_chain
from deltastore.maintenance.fsck_replay import Progress, no_progress, replay_chain
from deltastore.maintenance.fsck_shortcuts import check_bodies, read_shortcuts
from deltastore.maintenance.fsck_signatures import check_signatures

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.clock import Clock
    from deltastore.format.manifest import VersionCore
    from deltastore.format.signing import TrustedKeys
    from deltastore.repository.run import Run


def check_run(
    run: Run,
    *,
    deep: bool,
    streams: int,
    clock: Clock,
    progress: Progress = no_progress,
    trusted: TrustedKeys | None = None,
) -> Report:
    """Check a run in one store and report everything that is not as it should be.

    Args:
        deep: also read every object and replay every version, in memory for one state.
        streams: objects to read at once.
        progress: called with bytes read and bytes to read, when deep.
        trusted: keys that should have signed versions and shortcuts; None: signatures are not
            looked at.

    Memory when deep: one state. Raises StorageError when the store itself fails: that says nothing
    of the run.
    """
    began_s = clock.monotonic_s()
    listing = {info.key: info.size_bytes for info in run.store.list(run.keys.root)}
    chain = read_chain(run, streams=streams)
    read_shortcuts(run, chain, listing, streams=streams)
    check_start(run, chain)
    named = _check_named(run, chain, listing)
    named |= check_bodies(run, chain, lambda key: _size_of(run, listing, key))
    _check_rest(run, chain, listing, named)
    _check_head_hint(run, chain)
    if trusted is not None:
        check_signatures(run, chain, trusted)
    if deep:
        replay_chain(run, chain, streams=streams, clock=clock, progress=progress)
    chain.report_unreachable()
    whole = [shortcut for shortcut in chain.shortcuts if shortcut.whole]
    return Report(
        findings=tuple(chain.findings),
        deep=deep,
        head=chain.head,
        versions=len(chain.manifests),
        replayed=chain.replayed,
        objects=len(listing),
        size_bytes=sum(listing.values()),
        seconds=clock.monotonic_s() - began_s,
        floor=chain.floor,
        gone=len(chain.gone),
        shortcuts=len(whole),
        proved=sum(shortcut.proved for shortcut in whole),
        lost=tuple(chain.unreachable()),
    )


def _check_named(run: Run, chain: Chain, listing: dict[str, int]) -> set[str]:
    """Check that every object a manifest names is there with its size; return their keys."""
    named = {run.keys.run_json, run.keys.layout(run.layout.digest)}
    for version, manifest in sorted(chain.manifests.items()):
        named.add(run.keys.version(version))
        for key, size_bytes in _objects_of(manifest.core):
            named.add(key)
            present_bytes = _size_of(run, listing, key)
            if present_bytes == size_bytes:
                continue
            absent = present_bytes is None
            if absent and _may_be_gone(chain, manifest.core):
                chain.gone.add(version)
                continue
            chain.damage(
                Finding(
                    severity=Severity.ERROR,
                    defect=Defect.MISSING if absent else Defect.SIZE,
                    key=key,
                    version=version,
                    message=f"version {version} names an object that is not there"
                    if absent
                    else f"the object has {present_bytes} bytes, its manifest says {size_bytes}",
                    remedy=RESTORE,
                )
            )
        if any(file.key is None for file in manifest.core.files):
            chain.findings.append(
                Finding(
                    severity=Severity.NOTE,
                    defect=Defect.EXTERNAL,
                    key=run.keys.version(version),
                    version=version,
                    message=f"the files of version {version} are not in this bucket",
                    remedy="keep that checkpoint: joiners must start from a local copy of it",
                )
            )
    return named


def _may_be_gone(chain: Chain, core: VersionCore) -> bool:
    """Whether retention may have taken the version's bodies, or a region never had them."""
    if core.version in chain.gone:
        return True
    if core.kind is VersionKind.FULL:
        return core.version < chain.floor
    return core.version <= chain.floor


def _objects_of(core: VersionCore) -> Iterator[tuple[str, int]]:
    for segment in core.segments:
        yield segment.key, segment.size_bytes
    for file in core.files:
        if file.key is not None:
            yield file.key, file.size_bytes


def _size_of(run: Run, listing: dict[str, int], key: str) -> int | None:
    """The object's size; the store is asked again before anything is called missing."""
    if key in listing:
        return listing[key]
    try:
        return run.store.head(key).size_bytes
    except NotFoundError as err:
        if err.kind is not Kind.OBJECT_MISSING:
            raise
        return None


def _check_rest(run: Run, chain: Chain, listing: dict[str, int], named: set[str]) -> None:
    """Judge the objects that no version names."""
    for key in listing:
        if key in named:
            continue
        try:
            parsed = parse_key(key)
        except FormatError:
            chain.findings.append(_stray(key))
            continue
        finding = _judge_unnamed(chain, key, parsed, listing)
        if finding is not None:
            chain.findings.append(finding)


def _judge_unnamed(
    chain: Chain, key: str, parsed: ParsedKey, listing: dict[str, int]
) -> Finding | None:
    match parsed.kind:
        case KeyKind.RUN | KeyKind.VERSION | KeyKind.HINT | KeyKind.ROLLOUT:
            return None  # manifests were read one by one; results belong to no version
        case KeyKind.ANCHOR | KeyKind.COMPOSITE:
            return None  # read one by one, too
        case KeyKind.ANCHOR_FILE | KeyKind.COMPOSITE_SEGMENT:
            shortcut = f"{key.rsplit('/', 2)[0]}.json"
            if shortcut in listing and all(s.key != shortcut for s in chain.shortcuts):
                return None  # its manifest is the finding
        case KeyKind.SEGMENT | KeyKind.LAYOUT:
            pass
    if chain.is_unread(parsed.version):
        return None  # its manifest is the finding
    ahead = chain.head is not None and parsed.version is not None and parsed.version > chain.head
    return Finding(
        severity=Severity.NOTE,
        defect=Defect.ORPHAN,
        key=key,
        version=parsed.version,
        message="being published now, or left by a publish that was cut short"
        if ahead
        else "left by an attempt that was not committed",
        remedy="none needed: it may be deleted when nobody publishes",
    )


def _stray(key: str) -> Finding:
    return Finding(
        severity=Severity.WARNING,
        defect=Defect.FOREIGN,
        key=key,
        version=None,
        message="no deltastore writes an object under this key",
        remedy="find out who did; the run's prefix should be its own",
    )


def _check_head_hint(run: Run, chain: Chain) -> None:
    """A hint decides nothing, but it is the only other witness of the newest version's hash."""
    if chain.hint is None or chain.head is None:
        return
    version, policy_hash = chain.hint
    manifest = chain.manifests.get(version)
    key = run.keys.hint(Hint.HEAD)
    if version > chain.head:
        chain.findings.append(
            Finding(
                severity=Severity.NOTE,
                defect=Defect.HINT,
                key=key,
                version=version,
                message=f"the hint names version {version}, HEAD is {chain.head}",
                remedy="none needed: the next publish writes it again",
            )
        )
    elif manifest is not None and manifest.policy_hash != policy_hash:
        chain.findings.append(
            Finding(
                severity=Severity.WARNING,
                defect=Defect.HINT,
                key=key,
                version=version,
                message=f"the hint names another policy hash for version {version}",
                remedy="compare the version's manifest with that of another region",
            )
        )
