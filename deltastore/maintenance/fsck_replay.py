"""An object with the right size can still hold other bytes: the deep check reads all and replays.

Versions are replayed in order on one state in memory. Every block's declared change is compared
with what it does to the old bits before it is written, so the running fingerprint is that of the
state; a pass over the whole state proves it after every full version and at the end. After damage
the objects are still read and their digests compared, and replay starts again at the next full one,
or where a shortcut leads. Composites are tried, unwritten, on the state they start from; anchors
are read when the chain is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from deltastore.chain.apply import apply_blocks
from deltastore.errors import IntegrityError, Kind
from deltastore.format.manifest import VersionKind
from deltastore.format.mixing import fingerprint_state
from deltastore.maintenance.findings import Defect, Finding, Severity, finding_of
from deltastore.maintenance.fsck_bodies import (
    OF_THE_RUN,
    bad_bodies,
    check_anchor,
    check_composite,
    check_digest,
    require_run_fault,
)
from deltastore.repository.fetch import fetch_blocks
from deltastore.repository.full import WEIGHTS_SUFFIX, fetch_full_state
from deltastore.repository.rebuild import replay

if TYPE_CHECKING:
    from deltastore.clock import Clock
    from deltastore.format.layout import BitState
    from deltastore.format.manifest import VersionManifest
    from deltastore.maintenance.fsck_chain import Chain, CheckedShortcut
    from deltastore.repository.run import Run


Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes checked so far and the bytes there are."""


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """A Progress that keeps nothing."""


def replay_chain(run: Run, chain: Chain, *, streams: int, clock: Clock, progress: Progress) -> None:
    """Read every object of the chain and its shortcuts, and replay, adding findings to `chain`."""
    meter = _Meter(
        sum(m.core.delta_bytes for v, m in chain.manifests.items() if v not in chain.gone)
        + sum(s.size_bytes for s in chain.shortcuts if s.whole),
        progress,
    )
    state: BitState | None = None
    last: VersionManifest | None = None
    before = -1
    ways = _ways(chain)
    for version, manifest in sorted(chain.manifests.items()):
        full = manifest.core.kind is VersionKind.FULL
        if full or version != before + 1 or version in chain.damaged or version in chain.gone:
            state = None  # before the next one is read: two states need twice the memory
        if version not in chain.gone:
            state = _replay_version(run, chain, manifest, state, streams)
            meter.advance(manifest.core.delta_bytes)
        if state is None and version in ways.targets:
            state = _take_shortcut(run, chain, ways, version, streams, clock)
        if state is not None:
            chain.replayed += 1
            last = manifest
        for shortcut in ways.composites.get(version, ()):
            check_composite(run, chain, shortcut, state, streams=streams)
            meter.advance(shortcut.size_bytes)
        before = version
    if state is not None and last is not None:
        _check_whole(chain, state, last)
    state = None
    for shortcut in ways.anchors.values():
        check_anchor(run, chain, shortcut, streams=streams)
        meter.advance(shortcut.size_bytes)


class _Meter:
    def __init__(self, total_bytes: int, progress: Progress) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._progress = progress

    def advance(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        self._progress(self._done_bytes, self._total_bytes)


@dataclass(frozen=True, slots=True)
class _Ways:
    """The whole shortcuts: anchors by version, composites by where they start, all targets."""

    anchors: dict[int, CheckedShortcut]
    composites: dict[int, list[CheckedShortcut]]
    targets: set[int]


def _ways(chain: Chain) -> _Ways:
    anchors: dict[int, CheckedShortcut] = {}
    composites: dict[int, list[CheckedShortcut]] = {}
    for shortcut in chain.shortcuts:
        if not shortcut.whole:
            continue
        if shortcut.base is None:
            anchors[shortcut.version] = shortcut
        else:
            composites.setdefault(shortcut.base, []).append(shortcut)
    targets = {shortcut.version for shortcut in chain.shortcuts if shortcut.whole}
    return _Ways(anchors, composites, targets)


def _take_shortcut(
    run: Run, chain: Chain, ways: _Ways, version: int, streams: int, clock: Clock
) -> BitState | None:
    """Where the chain itself does not lead: the state by an anchor, or by any other way there is.

    None when that fails too: what is wrong is, or will be, a finding of its own.
    """
    anchor = ways.anchors.get(version)
    if anchor is not None:
        state = check_anchor(run, chain, anchor, streams=streams)
        if state is not None:
            return state
    if version not in chain.reachable():
        return None
    try:
        return replay(run, version, clock=clock, streams=streams).state
    except OF_THE_RUN as err:
        require_run_fault(err)
        return None


def _replay_version(
    run: Run, chain: Chain, manifest: VersionManifest, state: BitState | None, streams: int
) -> BitState | None:
    """The state after this version, or None when it could not be made."""
    core = manifest.core
    damaged_before = core.version in chain.damaged
    try:
        if core.kind is VersionKind.FULL:
            made = _read_full(run, manifest, streams)
        else:
            made = _apply_delta(run, manifest, state, streams)
    except OF_THE_RUN as err:
        require_run_fault(err)
        found = _read_each(run, chain, manifest)
        if not found and not damaged_before:
            chain.damage(finding_of(err, version=core.version, key=err.key))
        return None
    return None if damaged_before else made


def _read_full(run: Run, manifest: VersionManifest, streams: int) -> BitState | None:
    """The state of a full version, all its files read; None when they are not in this bucket."""
    files = manifest.core.files
    if any(file.key is None for file in files):
        return None
    state = fetch_full_state(run, manifest, streams=streams)
    for file in files:
        if file.key is not None and not file.name.endswith(WEIGHTS_SUFFIX):
            check_digest(run, file.key, file.size_bytes, file.sha256)
    return state


def _apply_delta(
    run: Run, manifest: VersionManifest, state: BitState | None, streams: int
) -> BitState | None:
    """Read the delta, and apply it when there is a state to apply it to."""
    core = manifest.core
    at = core.fingerprint_before
    for blocks in fetch_blocks(run, manifest, streams=streams):
        if state is not None and at is not None:
            at = at + apply_blocks(state, blocks)
    if state is not None and at != core.fingerprint_after:
        raise IntegrityError(
            f"version {core.version} leads to state {at}, not {core.fingerprint_after}",
            kind=Kind.FINGERPRINT,
            run=run.name,
            version=core.version,
        )
    return state


def _read_each(run: Run, chain: Chain, manifest: VersionManifest) -> bool:
    """After a failure: read the version's objects one by one, so that every bad one is named."""
    core = manifest.core
    named = [(s.key, s.size_bytes, s.sha256) for s in core.segments]
    named += [(f.key, f.size_bytes, f.sha256) for f in core.files if f.key is not None]
    known = {f.key for f in chain.findings if f.severity is Severity.ERROR}
    found = False
    for key, err in bad_bodies(run, named, known):
        found = True
        if err is not None:
            chain.damage(finding_of(err, version=core.version, key=key))
    return found


def _check_whole(chain: Chain, state: BitState, manifest: VersionManifest) -> None:
    core = manifest.core
    got = fingerprint_state(state)
    if got != core.fingerprint_after:
        chain.damage(
            Finding(
                severity=Severity.ERROR,
                defect=Defect.FINGERPRINT,
                key=None,
                version=core.version,
                message=f"the replayed state is {got}, not {core.fingerprint_after}",
                remedy="report this: the blocks said otherwise",
            )
        )
