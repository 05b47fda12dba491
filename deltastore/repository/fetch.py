"""Bytes from a bucket are not yet a version: everything read here is checked before it is believed.

A manifest must be of this run, layout and number and may only name keys of its own version; a
segment must have the manifest's size and SHA-256, say the same base and target, and its blocks
must be disjoint and add up to the declared changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.errors import FormatError, IntegrityError, Kind, NotFoundError
from deltastore.format.block import total_change
from deltastore.format.disjoint import check_disjoint
from deltastore.format.fingerprint import ZERO
from deltastore.format.keys import KeyKind, parse_key
from deltastore.format.layout import require_same_layout
from deltastore.format.manifest import VersionCore, VersionKind, VersionManifest
from deltastore.format.segment import SegmentIdentity, decode_segment
from deltastore.storage.transfer import FetchItem, fetch_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deltastore.format.block import Block
    from deltastore.format.box import Box
    from deltastore.format.fields import SegmentRef
    from deltastore.format.fingerprint import Fingerprint
    from deltastore.format.shortcut import CompositeManifest
    from deltastore.repository.run import Run


def load_manifest(run: Run, version: int) -> VersionManifest:
    """The manifest of a version, checked against the run.

    Raises NotFoundError(version_missing), FormatError, IntegrityError(broken_chain) when it is of
    another run or number, IntegrityError(layout_mismatch).
    """
    key = run.keys.version(version)
    try:
        text = run.store.get(key)
    except NotFoundError as err:
        if err.kind is not Kind.OBJECT_MISSING:
            raise
        raise NotFoundError(
            f"version {version} does not exist",
            kind=Kind.VERSION_MISSING,
            run=run.name,
            version=version,
            key=key,
            hint="`deltastore log` lists the versions there are",
        ) from err
    manifest = VersionManifest.from_bytes(text)
    core = manifest.core
    if (core.run, core.run_id, core.version) != (run.name, run.record.run_id, version):
        raise IntegrityError(
            f"the manifest says run {core.run!r} ({core.run_id[:8]}) version {core.version}",
            kind=Kind.BROKEN_CHAIN,
            run=run.name,
            version=version,
            key=key,
            hint="a foreign object lies under this key: restore it from another region",
        )
    require_same_layout(run.layout.digest, core.layout_digest, what=f"version {version}")
    _check_keys(run, core)
    return manifest


def fetch_blocks(run: Run, manifest: VersionManifest, *, streams: int) -> Iterator[list[Block]]:
    """The verified blocks of a delta, segment by segment, at most `streams` segments in memory.

    The last check (that all blocks are disjoint and add up) is made before the last list is
    yielded: a consumer that writes as it reads must be able to undo, or collect first.
    """
    core = manifest.core
    if core.kind is not VersionKind.DELTA or core.base_version is None:
        raise IntegrityError(
            f"version {core.version} is a full version, not a delta",
            kind=Kind.BROKEN_CHAIN,
            run=run.name,
            version=core.version,
        )
    if core.fingerprint_before is None:
        raise IntegrityError(
            f"delta {core.version} names no state before it", kind=Kind.FINGERPRINT, run=run.name
        )
    identity = SegmentIdentity(core.layout_digest, core.base_version, core.version)
    change = core.fingerprint_after - core.fingerprint_before
    return _fetch_segments(run, identity, core.segments, change, streams)


def fetch_composite_blocks(
    run: Run, manifest: CompositeManifest, *, streams: int
) -> Iterator[list[Block]]:
    """The verified blocks of a composite, like `fetch_blocks`.

    Blocks of one tensor may declare the right change only in sum, over several segments.
    """
    core = manifest.core
    identity = SegmentIdentity(core.layout_digest, core.base.version, core.target.version)
    change = core.target.fingerprint - core.base.fingerprint
    return _fetch_segments(run, identity, core.segments, change, streams)


def _fetch_segments(
    run: Run,
    identity: SegmentIdentity,
    segments: Sequence[SegmentRef],
    change: Fingerprint,
    streams: int,
) -> Iterator[list[Block]]:
    items = [FetchItem(s.key, s.size_bytes, s.sha256) for s in segments]
    total = ZERO
    boxes: list[tuple[int, Box]] = []
    fetched = fetch_all(run.store, items, streams=streams)
    for number, (ref, got) in enumerate(zip(segments, fetched, strict=True)):
        decoded = decode_segment(run.layout, got.body, expect=identity)
        if sum(block.nnz for block in decoded.blocks) != ref.nnz:
            raise IntegrityError(
                "the segment holds another number of changes than the manifest says",
                kind=Kind.BROKEN_CHAIN,
                run=run.name,
                version=identity.version,
                key=ref.key,
            )
        total = total + total_change(decoded.blocks)
        boxes.extend((block.tensor, block.box) for block in decoded.blocks)
        if number == len(segments) - 1:
            check_disjoint(run.layout, boxes)
            _check_total(run, identity, total, change)
        yield decoded.blocks
    if not segments:
        _check_total(run, identity, total, change)


def _check_total(
    run: Run, identity: SegmentIdentity, total: Fingerprint, change: Fingerprint
) -> None:
    if total != change:
        raise IntegrityError(
            f"the blocks of version {identity.version} do not add up to its fingerprint",
            kind=Kind.FINGERPRINT,
            run=run.name,
            version=identity.version,
        )


def _check_keys(run: Run, core: VersionCore) -> None:
    """Refuse references that leave the version's own part of the run."""
    for number, ref in enumerate(core.segments):
        if ref.key != run.keys.segment(core.version, number, ref.sha256):
            _refuse_key(run, core, ref.key)
    for file in core.files:
        if file.key is None:
            continue
        parsed = parse_key(file.key)
        at = (parsed.kind, parsed.run, parsed.version)
        if at != (KeyKind.ANCHOR_FILE, run.name, core.version):
            _refuse_key(run, core, file.key)


def _refuse_key(run: Run, core: VersionCore, key: str) -> None:
    raise FormatError(
        "the manifest names an object outside its own version",
        kind=Kind.KEY,
        run=run.name,
        version=core.version,
        key=key[:200],
    )
