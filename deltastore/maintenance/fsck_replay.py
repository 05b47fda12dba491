"""An object with the right size can still hold other bytes: the deep check reads all and replays.

Versions are replayed in order on one state in memory. Every block's declared change is compared
with what it does to the old bits before it is written, so the running fingerprint is that of the
state; a pass over the whole state proves it after every full version and at the end. After damage
the objects are still read and their digests compared, and replay starts again at the next full one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from deltastore.chain.apply import apply_blocks
from deltastore.errors import (
    DeltastoreError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    Kind,
    NotFoundError,
)
from deltastore.format.manifest import VersionKind
from deltastore.format.mixing import fingerprint_state
from deltastore.maintenance.findings import Defect, Finding, Severity, finding_of
from deltastore.repository.fetch import fetch_blocks
from deltastore.repository.full import CHUNK_BYTES, WEIGHTS_SUFFIX, fetch_full_state
from deltastore.storage.store import ByteRange

if TYPE_CHECKING:
    from deltastore.format.layout import BitState
    from deltastore.format.manifest import VersionManifest
    from deltastore.maintenance.fsck_chain import Chain
    from deltastore.repository.run import Run

_OF_THE_RUN = (NotFoundError, FormatError, IntegrityError, InvalidInputError)


Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes checked so far and the bytes there are."""


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """A Progress that keeps nothing."""


def replay_chain(run: Run, chain: Chain, *, streams: int, progress: Progress) -> None:
    """Read every object of the chain and replay it, adding findings to `chain`."""
    total_bytes = sum(m.core.delta_bytes for m in chain.manifests.values())
    done_bytes = 0
    state: BitState | None = None
    last: VersionManifest | None = None
    before = -1
    for version, manifest in sorted(chain.manifests.items()):
        full = manifest.core.kind is VersionKind.FULL
        if full or version != before + 1 or version in chain.damaged:
            state = None  # before the next one is read: two states need twice the memory
        state = _replay_version(run, chain, manifest, state, streams)
        if state is not None:
            chain.replayed += 1
            last = manifest
        before = version
        done_bytes += manifest.core.delta_bytes
        progress(done_bytes, total_bytes)
    if state is not None and last is not None:
        _check_whole(chain, state, last)


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
    except _OF_THE_RUN as err:
        _require_run_fault(err)
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
            _check_digest(run, file.key, file.size_bytes, file.sha256)
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
    found = False
    known = {f.key for f in chain.findings if f.severity is Severity.ERROR}
    named = [(s.key, s.size_bytes, s.sha256) for s in core.segments]
    named += [(f.key, f.size_bytes, f.sha256) for f in core.files if f.key is not None]
    for key, size_bytes, sha256 in named:
        if key in known:
            found = True
            continue
        try:
            _check_digest(run, key, size_bytes, sha256)
        except _OF_THE_RUN as err:
            _require_run_fault(err)
            chain.damage(finding_of(err, version=core.version, key=key))
            found = True
    return found


def _check_digest(run: Run, key: str, size_bytes: int, sha256: str) -> None:
    """Read an object in pieces and compare its SHA-256: a shard need not fit into memory."""
    digest = hashlib.sha256()
    if size_bytes <= CHUNK_BYTES:
        digest.update(run.store.get(key))  # also the way to read an empty object: no range fits it
    else:
        for start in range(0, size_bytes, CHUNK_BYTES):
            end = min(start + CHUNK_BYTES, size_bytes)
            digest.update(run.store.get(key, ByteRange(start, end)))
    if digest.hexdigest() != sha256:
        raise IntegrityError(
            "the object has another SHA-256 than its manifest says", kind=Kind.DIGEST, key=key
        )


def _require_run_fault(error: DeltastoreError) -> None:
    """A bucket that vanished, or a wrong argument, says nothing of the run: let it pass."""
    shorter = error.kind is Kind.RANGE  # the object ends before its manifest says
    if error.kind is Kind.BUCKET_MISSING or (isinstance(error, InvalidInputError) and not shorter):
        raise error


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
