"""A trainer that waits for its upload loses steps; one that does not check it loses versions.

capture -> diff -> encode -> spool -> upload -> commit, overlapped. The source is compared with the
bits of the last *committed* version. A version that fails leaves that baseline alone, so its
changes travel with the next one (CASE R1).

One writer: opening commits HEAD + 1 at once (possibly empty): whoever published before meets a
foreign manifest and stops with LeaseError. No Redis is needed for that.

Memory: baseline (dense bytes) + decoded blocks of the pending version + what `Outbox` says.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from deltastore.chain.diff import diff_box, diff_run
from deltastore.config import OnBacklog, PublisherSettings
from deltastore.errors import (
    DeltastoreError,
    InvalidInputError,
    Kind,
    LeaseError,
    StorageError,
)
from deltastore.events import PublishFailed, RegionFailed, VersionPublished, discard
from deltastore.format.block import total_change
from deltastore.format.box import MAX_BOX_ELEMENTS
from deltastore.format.coverage import match_entries
from deltastore.format.manifest import VersionCore, VersionKind, VersionManifest
from deltastore.format.segment import SegmentIdentity
from deltastore.ids import new_token
from deltastore.pipeline.baseline import Baseline
from deltastore.pipeline.outbox import Outbox
from deltastore.pipeline.publication import Publication
from deltastore.pipeline.replay import Held, replay
from deltastore.pipeline.replicator import Region, RegionReplicator, behind
from deltastore.repository.commit import write_head_hint
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion
from deltastore.repository.resolve import find_head
from deltastore.storage.transfer import Uploader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deltastore.clock import Clock
    from deltastore.events import EventSink
    from deltastore.format.block import Block
    from deltastore.format.layout import BitState
    from deltastore.pipeline.outbox import SentSegment
    from deltastore.pipeline.protocols import SourceBox, WeightSource
    from deltastore.repository.run import Run

FENCE_TIMEOUT_S = 3600.0


class Publisher:
    """Publishes a source's state as versions of one run. Use `open`; close it when done."""

    def __init__(
        self,
        home: Run,
        source: WeightSource,
        *,
        head: VersionManifest,
        baseline: BitState,
        regions: Sequence[Region],
        settings: PublisherSettings,
        clock: Clock,
        sink: EventSink,
    ) -> None:
        self._home = home
        self._source = source
        self._baseline = Baseline(
            home,
            head,
            baseline,
            commit_deadline_s=settings.commit_deadline_s,
            clock=clock,
        )
        self._settings = settings
        self._clock = clock
        self._sink = sink
        self._generation = head.core.generation + 1
        self._nonce = new_token()
        self._fatal: LeaseError | None = None
        self._pending: Publication | None = None
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._encoders = ThreadPoolExecutor(settings.encode_threads, thread_name_prefix="encode")
        self._uploader = Uploader(
            streams=settings.streams, max_pending_bytes=settings.spool_max_bytes
        )
        self._replicators = [
            RegionReplicator(
                region,
                home,
                target=head.core.version,
                streams=settings.streams,
                backlog_max_bytes=settings.spool_max_bytes,
                clock=clock,
                sink=sink,
            )
            for region in regions
        ]

    @classmethod
    def open(
        cls,
        home: Run,
        source: WeightSource,
        *,
        clock: Clock,
        step: int = 0,
        regions: Sequence[Region] = (),
        settings: PublisherSettings | None = None,
        sink: EventSink = discard,
        baseline: Held | None = None,
    ) -> Publisher:
        """Take over a run: find HEAD, rebuild the baseline, commit HEAD + 1 as the fence.

        Args:
            home: the run in the region where versions are committed.
            step: the optimizer step that the source's state is at.
            baseline: a state already held; used if it is HEAD's, and owned by the publisher.

        Raises InvalidInputError when the source does not fit the layout, LeaseError when another
        writer was faster, IntegrityError when the chain in the bucket is broken.
        """
        match_entries(home.layout, source.entries())
        head = load_manifest(home, find_head(home))
        held = baseline if baseline and baseline.point == ActiveVersion.of(head) else None
        if held is None:
            held = replay(home, head.core.version, clock=clock, held=baseline).held
        publisher = cls(
            home,
            source,
            head=head,
            baseline=held.state,
            regions=regions,
            settings=settings or PublisherSettings(),
            clock=clock,
            sink=sink,
        )
        try:
            publisher._baseline.check()
            fence = publisher._submit(step)
            fence.result(FENCE_TIMEOUT_S)
        except BaseException:
            publisher.close()
            raise
        return publisher

    @property
    def head(self) -> VersionManifest:
        """The newest version this publisher has committed."""
        return self._baseline.head

    def publish(self, step: int) -> Publication | None:
        """Begin to publish the source's present state, after optimizer step `step`.

        Returns None when a version is still on its way and `on_backlog` is `skip`: the next
        version covers this step too. The weights must not change before
        `Publication.wait_captured()` has returned.

        Raises LeaseError when this writer has lost the run.
        """
        pending = self._pending
        if pending is not None and not pending.done():
            if self._settings.on_backlog is OnBacklog.SKIP:
                return None
            self._wait_for(pending)
        return self._submit(step)

    def flush(self, timeout_s: float) -> None:
        """Wait until nothing is on its way to home; raises what went wrong with it."""
        if self._pending is not None:
            self._pending.result(timeout_s)

    def wait_regions(self, timeout_s: float) -> list[str]:
        """Wait until every region holds HEAD; return the names of those that do not."""
        return behind(self._replicators, self._baseline.head.core.version, timeout_s, self._clock)

    def close(self) -> None:
        """Stop the threads. A version on its way is finished or fails; regions may be behind."""
        self._worker.shutdown(wait=True)
        self._encoders.shutdown(wait=True)
        self._uploader.close()
        for region in self._replicators:
            region.close()

    def _wait_for(self, pending: Publication) -> None:
        try:
            pending.result(self._settings.backlog_wait_s)
        except DeltastoreError as err:
            if not pending.done():
                raise StorageError(
                    f"the version before is still on its way after"
                    f" {self._settings.backlog_wait_s} s",
                    kind=Kind.BACKLOG,
                    run=self._home.name,
                    hint="raise backlog_wait_s, or use on_backlog = skip",
                ) from err
            # It failed, and was reported to whoever holds its handle: this one covers it.

    def _submit(self, step: int) -> Publication:
        with self._lock:
            if self._fatal is not None:
                raise self._fatal
            last = self._baseline.head.core.step_last
            publication = Publication(min(last + 1, step), step)
            self._pending = publication
        self._worker.submit(self._work, publication)
        return publication

    def _work(self, publication: Publication) -> None:
        """Run one publication on the worker thread; its future always resolves."""
        try:
            manifest = self._publish(publication)
        except LeaseError as err:
            self._fatal = err
            self._fail(publication, err)
        except BaseException as err:  # noqa: BLE001 - it is handed to whoever waits for the result
            self._fail(publication, err)
        else:
            publication.captured.set()
            publication.future.set_result(manifest)

    def _fail(self, publication: Publication, err: BaseException) -> None:
        kind = err.kind.value if isinstance(err, DeltastoreError) else type(err).__name__
        self._sink(PublishFailed(self._baseline.head.core.version + 1, kind, str(err)))
        publication.future.set_exception(err)
        publication.captured.set()

    def _publish(self, publication: Publication) -> VersionManifest:
        started_s = self._clock.monotonic_s()
        settled = self._baseline.settle()
        if settled is not None:
            self._announce(settled)
        head = self._baseline.head
        if (head.core.version + 1) % self._settings.baseline_check_every_versions == 0:
            self._baseline.check()
        version = head.core.version + 1
        identity = SegmentIdentity(self._home.layout.digest, head.core.version, version)
        outbox = Outbox(
            self._home,
            identity,
            pool=self._encoders,
            encode_threads=self._settings.encode_threads,
            uploader=self._uploader,
            target_bytes=self._segment_bytes(),
            offer=lambda key, body: self._offer(version, key, body),
            clock=self._clock,
        )
        try:
            for block in self._diff():
                outbox.add(block)
            publication.captured.set()
            captured_s = self._clock.monotonic_s()
            outbox.flush()
            sent = outbox.confirm()
        except BaseException:
            outbox.abandon()
            for region in self._replicators:
                region.abandon(version)
            raise
        uploaded_s = self._clock.monotonic_s()
        manifest = VersionManifest(self._core(publication, sent, outbox.blocks))
        self._baseline.commit(manifest, outbox.blocks, uploading_since_s=started_s)
        self._announce(manifest)
        done_s = self._clock.monotonic_s()
        self._sink(
            VersionPublished(
                version=version,
                step_first=publication.step_first,
                step_last=publication.step_last,
                policy_hash=manifest.policy_hash,
                nnz=manifest.core.nnz,
                elements=self._home.layout.elements,
                delta_bytes=manifest.core.delta_bytes,
                dense_bytes=self._home.dense_bytes,
                capture_s=captured_s - started_s,
                encode_s=sum(s.encode_s for s in sent),
                upload_s=self._uploader_span(sent, uploaded_s, started_s),
                commit_s=done_s - uploaded_s,
                total_s=done_s - started_s,
            )
        )
        return manifest

    @staticmethod
    def _uploader_span(sent: list[SentSegment], uploaded_s: float, started_s: float) -> float:
        first_s = min((s.sent_s for s in sent), default=uploaded_s)
        return uploaded_s - max(first_s, started_s)

    def _diff(self) -> Iterator[Block]:
        """Blocks of all that differs from the baseline; checks that the source covers it all."""
        layout = self._home.layout
        covered = [0] * len(layout)
        for box in self._source.boxes(layout):
            covered[box.tensor] += box.box.elements
            yield from self._diff_box(box)
        short = [
            spec.name
            for spec, elements in zip(layout.tensors, covered, strict=True)
            if elements != spec.elements
        ]
        if short:
            raise InvalidInputError(
                f"the source does not cover {len(short)} tensors exactly once: {short[:5]}",
                kind=Kind.TENSOR_SHAPE,
                run=self._home.name,
                hint="its boxes must partition every tensor of the layout",
            )

    def _diff_box(self, source: SourceBox) -> Iterator[Block]:
        layout, tensor, box = self._home.layout, source.tensor, source.box
        base = self._baseline.state.arrays[tensor]
        if not box.flat:
            offsets = box.offsets_of(None, layout.tensors[tensor].element_shape)
            block = diff_box(layout, tensor, box, base[offsets], source.bits)
            if block is not None:
                yield block
            return
        start, count = box.start[0], box.shape[0]
        for low in range(0, count, MAX_BOX_ELEMENTS):
            high = min(low + MAX_BOX_ELEMENTS, count)
            block = diff_run(
                layout,
                tensor,
                start + low,
                base[start + low : start + high],
                source.bits[low:high],
            )
            if block is not None:
                yield block

    def _core(
        self, publication: Publication, sent: list[SentSegment], blocks: list[Block]
    ) -> VersionCore:
        base = self._baseline.head.core
        return VersionCore(
            run=base.run,
            run_id=base.run_id,
            version=base.version + 1,
            kind=VersionKind.DELTA,
            base_version=base.version,
            base_policy_hash=self._baseline.head.policy_hash,
            layout_digest=base.layout_digest,
            segments=tuple(s.ref for s in sent),
            files=(),
            nnz=sum(block.nnz for block in blocks),
            fingerprint_before=base.fingerprint_after,
            fingerprint_after=base.fingerprint_after + total_change(blocks),
            encodings=tuple(sorted(frozenset().union(*(s.encodings for s in sent)))),
            step_first=publication.step_first,
            step_last=publication.step_last,
            generation=self._generation,
            writer_nonce=self._nonce,
            created_ms=int(self._clock.utc_s() * 1000),
        )

    def _announce(self, manifest: VersionManifest) -> None:
        """Tell the regions and write the hint: a hint that fails costs a poll, nothing else."""
        for region in self._replicators:
            region.committed(manifest)
        try:
            write_head_hint(self._home, manifest)
        except StorageError as err:
            self._sink(
                RegionFailed(
                    self._home.record.home, manifest.core.version, err.kind.value, str(err)
                )
            )

    def _segment_bytes(self) -> int:
        """Target size of a segment: so that every stream gets two (DESIGN section 5)."""
        core = self._baseline.head.core
        last = core.delta_bytes if core.kind is VersionKind.DELTA else 0
        wanted = last // (2 * self._settings.streams)
        return max(self._settings.segment_min_bytes, min(wanted, self._settings.segment_max_bytes))

    def _offer(self, version: int, key: str, body: bytes) -> None:
        for region in self._replicators:
            region.offer(version, key, body)
