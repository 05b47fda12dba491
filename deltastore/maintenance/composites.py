"""A laggard that fetches eight deltas pays eight times for what changed eight times.

Makes the composites that `chain/lattice.py` wants and a region lacks, from that region's own
bucket: from deltas and smaller composites, merged as they flow through (`merge.py`), committed by
one create-only put (`shortcut_commit.py`). Any number may run at once, and be killed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.chain.lattice import Span, wanted_composites
from deltastore.errors import DeltastoreError, IntegrityError, Kind, NotFoundError, StorageError
from deltastore.events import ChainLag, CompositeWritten, MaintenanceFailed, discard
from deltastore.format.fingerprint import ZERO
from deltastore.format.manifest import SegmentRef, VersionKind
from deltastore.format.segment import (
    SegmentIdentity,
    encode_segment,
    estimated_bytes,
    segment_encodings,
)
from deltastore.format.shortcut import CompositeCore, CompositeManifest, Point
from deltastore.format.signing import unsigned
from deltastore.ids import new_token
from deltastore.maintenance.merge import merged_blocks
from deltastore.maintenance.settings import MaintenanceSettings
from deltastore.maintenance.shortcut_commit import commit_shortcut, is_there
from deltastore.repository.floor import read_floor
from deltastore.repository.resolve import find_head
from deltastore.repository.shortcuts import Listed, point_of
from deltastore.repository.way import Survey, Way, survey
from deltastore.storage.store import PutMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltastore.clock import Clock
    from deltastore.events import EventSink
    from deltastore.format.block import Block
    from deltastore.format.signing import Signer, TrustedKeys
    from deltastore.repository.run import Run

MAX_INPUTS = 16
"""Links merged at once: memory grows with them, and more are never needed once tiles exist."""


@dataclass(frozen=True, slots=True)
class CompositesDone:
    """What one round did.

    Args:
        written: spans made by this worker.
        lost: spans that another worker made first.
        failed: spans that could not be made; each was reported as an event.
        missing: spans still wanted.
    """

    written: tuple[Span, ...]
    lost: tuple[Span, ...]
    failed: tuple[Span, ...]
    missing: tuple[Span, ...]


def due_composites(found: Survey, *, lowest: int) -> list[Span]:
    """The composites that a surveyed chain should have and has not, in the order to make them."""
    full = [v for v, m in found.manifests.items() if m.core.kind is VersionKind.FULL]
    anchors = [one.version for one in found.shortcuts if one.base is None]
    present = {(one.base, one.version) for one in found.shortcuts}
    wanted = wanted_composites(found.version, lowest=lowest, anchors=anchors, full=full)
    return [span for span in wanted if (span.base, span.version) not in present]


def run_composites(
    run: Run,
    *,
    clock: Clock,
    settings: MaintenanceSettings | None = None,
    sink: EventSink = discard,
    signer: Signer = unsigned,
    trusted: TrustedKeys | None = None,
    limit: int | None = None,
) -> CompositesDone:
    """Make what is missing, smallest first.

    Args:
        limit: most composites to make in this round.

    A composite that cannot be made (a body is missing or damaged) is reported and left out; what
    the store itself refuses is raised.
    """
    settings = settings or MaintenanceSettings()
    head = find_head(run)
    lowest = lowest_version(run, head)
    found = survey(run, head, lowest=lowest, streams=settings.streams, trusted=trusted)
    lowest = max(lowest, min(found.manifests))
    written: list[Span] = []
    lost: list[Span] = []
    failed: list[Span] = []
    for span in due_composites(found, lowest=lowest)[:limit]:
        try:
            listed = write_composite(
                run,
                found,
                span,
                clock=clock,
                settings=settings,
                sink=sink,
                signer=signer,
                trusted=trusted,
            )
        except StorageError:
            raise
        except DeltastoreError as err:
            if err.kind in {Kind.BUCKET_MISSING, Kind.RUN_MISSING}:
                raise
            failed.append(span)
            sink(MaintenanceFailed("composite", span.version, err.kind.value, str(err)))
            continue
        (lost if listed is None else written).append(span)
        found.shortcuts.append(listed or Listed(span.base, span.version, 0))
    missing = tuple(due_composites(found, lowest=lowest))
    tiles = [s for s in missing if s.is_tile]
    sink(
        ChainLag(
            head=head,
            composites_missing=len(missing),
            composite_lag_versions=head - min((s.base for s in tiles), default=head - head % 8),
        )
    )
    return CompositesDone(tuple(written), tuple(lost), tuple(failed), missing)


def lowest_version(run: Run, head: int) -> int:
    """The oldest version whose successors still have bodies, as far as the floor says."""
    floor = read_floor(run)
    return floor.version if floor is not None and floor.version <= head else 0


def write_composite(
    run: Run,
    found: Survey,
    span: Span,
    *,
    clock: Clock,
    settings: MaintenanceSettings,
    sink: EventSink = discard,
    signer: Signer = unsigned,
    trusted: TrustedKeys | None = None,
) -> Listed | None:
    """Make one composite of a surveyed chain; None when another worker's is there.

    Args:
        trusted: keys that must have signed the composites it is made of: a signer that merges what
            it does not trust vouches for it.
    """
    key = run.keys.composite(span.base, span.version)
    if is_there(run, key):
        return None
    base, target = _point(found, span.base), _point(found, span.version)
    way = _inputs(run, found, span, clock, settings, sink, signer, trusted)
    started_s = clock.monotonic_s()
    attempt = new_token()
    writer = _SegmentWriter(run, span, attempt, settings.segment_bytes)
    for blocks in merged_blocks(run, way.steps, streams=settings.streams):
        writer.add(blocks)
    writer.finish()
    if writer.change != target.fingerprint - base.fingerprint:
        run.store.delete([ref.key for ref in writer.refs])
        raise IntegrityError(
            f"the composite {span.base}-{span.version} does not lead from state to state",
            kind=Kind.FINGERPRINT,
            run=run.name,
            version=span.version,
            hint="run `deltastore verify --deep`",
        )
    core = CompositeCore(
        run=run.name,
        run_id=run.record.run_id,
        layout_digest=run.layout.digest,
        base=base,
        target=target,
        segments=tuple(writer.refs),
        nnz=sum(ref.nnz for ref in writer.refs),
        encodings=tuple(sorted(writer.encodings)),
        attempt=attempt,
        created_ms=int(clock.utc_s() * 1000),
    )
    manifest = CompositeManifest(core, signer(core.canonical_bytes()))
    won = commit_shortcut(
        run,
        key,
        manifest.to_bytes(),
        [ref.key for ref in writer.refs],
        started_s=started_s,
        deadline_s=settings.commit_deadline_s,
        clock=clock,
    )
    if not won:
        return None
    sink(
        CompositeWritten(
            base_version=span.base,
            version=span.version,
            inputs=len(way.steps),
            input_bytes=way.size_bytes,
            size_bytes=core.size_bytes,
            seconds=clock.monotonic_s() - started_s,
        )
    )
    return Listed(span.base, span.version, core.size_bytes)


def _point(found: Survey, version: int) -> Point:
    return point_of(found.manifests[version])


def _inputs(
    run: Run,
    found: Survey,
    span: Span,
    clock: Clock,
    settings: MaintenanceSettings,
    sink: EventSink,
    signer: Signer,
    trusted: TrustedKeys | None,
) -> Way:
    """The cheapest links from base to target, at most MAX_INPUTS.

    Where there are more (the first round on an old chain) composites from the same base are made on
    the way there: retention deletes them later as superseded.
    """

    def choose() -> Way:
        return found.choose(
            run, base=span.base, version=span.version, starts=False, trusted=trusted
        )

    way = choose()
    while len(way.steps) > MAX_INPUTS:
        part = Span(span.base, way.steps[MAX_INPUTS - 1].version)
        made = write_composite(
            run,
            found,
            part,
            clock=clock,
            settings=settings,
            sink=sink,
            signer=signer,
            trusted=trusted,
        )
        found.shortcuts.append(made or Listed(part.base, part.version, 0))
        shorter = choose()
        if len(shorter.steps) >= len(way.steps):
            raise NotFoundError(
                f"the composite {part.base}-{part.version} cannot be used for a longer one",
                kind=Kind.GONE,
                run=run.name,
                version=span.version,
                hint="`deltastore verify` says what is wrong with it",
            )
        way = shorter
    return way


class _SegmentWriter:
    """Gathers blocks to segments and puts them, one in memory at a time."""

    def __init__(self, run: Run, span: Span, attempt: str, target_bytes: int) -> None:
        self._run = run
        self._span = span
        self._attempt = attempt
        self._target_bytes = target_bytes
        self._identity = SegmentIdentity(run.layout.digest, span.base, span.version)
        self._gathered: list[Block] = []
        self._gathered_bytes = 0
        self.refs: list[SegmentRef] = []
        self.encodings: set[str] = set()
        self.change = ZERO

    def add(self, blocks: Sequence[Block]) -> None:
        """Take the blocks of a cell: they stay in one segment."""
        for block in blocks:
            self._gathered.append(block)
            self._gathered_bytes += estimated_bytes(block)
            self.change = self.change + block.fingerprint_change
        if self._gathered_bytes >= self._target_bytes:
            self.finish()

    def finish(self) -> None:
        """Put what is gathered."""
        if not self._gathered:
            return
        body = encode_segment(self._run.layout, self._identity, self._gathered)
        digest = hashlib.sha256(body).hexdigest()
        key = self._run.keys.composite_segment(
            self._span.base, self._span.version, self._attempt, len(self.refs), digest
        )
        self._run.store.put(key, body, mode=PutMode.CREATE, sha256=digest)
        nnz = sum(block.nnz for block in self._gathered)
        self.refs.append(SegmentRef(key, len(body), digest, nnz))
        self.encodings |= segment_encodings(body)
        self._gathered, self._gathered_bytes = [], 0
