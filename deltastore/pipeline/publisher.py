"""A trainer that waits for its upload loses steps; one that does not check it loses versions.

capture -> diff -> encode -> spool -> upload -> commit, overlapped. The source is compared with the
bits of the last *committed* version. A version that fails leaves that baseline alone, so its
changes travel with the next one (CASE R1).

One writer: opening commits HEAD + 1 at once (possibly empty): whoever published before meets a
foreign manifest and stops with LeaseError. No Redis is needed for that.

Memory, beside the source:
    baseline         dense bytes
  + pending version  nnz * (4 + element bytes), the decoded blocks
  + diff             2 * diff_threads runs of 2^22 elements that changed throughout, at most
  + encode           encode_threads * 4 * segment_max_bytes
  + upload           spool_max_bytes, and of each region region_memory_bytes
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from deltastore.config import OnBacklog, PublisherSettings
from deltastore.errors import (
    DeltastoreError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    Kind,
    LeaseError,
    NotFoundError,
    StorageError,
)
from deltastore.events import BaselineLost, PublishFailed, RegionFailed, discard
from deltastore.format.coverage import match_entries
from deltastore.format.manifest import VersionKind
from deltastore.format.segment import SegmentIdentity
from deltastore.pipeline.baseline import Baseline
from deltastore.pipeline.differ import Differ
from deltastore.pipeline.draft import Draft, Writer, report_published
from deltastore.pipeline.fanout import Fanout
from deltastore.pipeline.outbox import Outbox
from deltastore.pipeline.publication import Publication, check_step
from deltastore.pipeline.replay import Held, replay
from deltastore.pipeline.replicator import Region, RegionLimits, RegionReplicator
from deltastore.pipeline.whole import read_source, upload_whole
from deltastore.repository.body_checks import have_bodies_checked
from deltastore.repository.commit import advertise
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion
from deltastore.repository.resolve import find_head
from deltastore.storage.transfer import Uploader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deltastore.clock import Clock
    from deltastore.events import EventSink
    from deltastore.format.layout import BitState
    from deltastore.format.manifest import SegmentRef, VersionManifest
    from deltastore.format.signing import Signer
    from deltastore.pipeline.draft import Announce
    from deltastore.pipeline.protocols import WeightSource
    from deltastore.repository.run import Run
    from deltastore.storage.transfer import OnBytes

FENCE_TIMEOUT_S = 3600.0


class Publisher:
    """Publishes a source's state as versions of one run. Use `open`; close it when done."""

    def __init__(
        self,
        home: Run,
        source: WeightSource,
        *,
        head: VersionManifest,
        baseline: BitState | None,
        regions: Sequence[Region],
        settings: PublisherSettings,
        clock: Clock,
        sink: EventSink,
        signer: Signer | None = None,
        announce: Announce | None = None,
        on_bytes: OnBytes | None = None,
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
        self._announce_segment = announce
        self._writer = Writer.above(head, signer=signer)
        self._fatal: LeaseError | None = None
        self._pending: Publication | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._encoders = ThreadPoolExecutor(settings.encode_threads, thread_name_prefix="encode")
        self._differ = Differ(home.layout, threads=settings.diff_threads)
        self._on_bytes = on_bytes
        self._uploader = Uploader(
            streams=settings.streams,
            max_pending_bytes=settings.spool_max_bytes,
            on_bytes=on_bytes,
        )
        limits = RegionLimits.of(settings)
        target = head.core.version
        self._fanout = Fanout(
            [
                RegionReplicator(r, home, target=target, limits=limits, clock=clock, sink=sink)
                for r in regions
            ],
            clock,
        )

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
        signer: Signer | None = None,
        announce: Announce | None = None,
        on_bytes: OnBytes | None = None,
        on_read: Callable[[int], None] | None = None,
    ) -> Publisher:
        """Take over a run: find HEAD, rebuild the baseline, commit HEAD + 1 as the fence.

        Args:
            home: the run in the region where versions are committed.
            step: the optimizer step that the source's state is at.
            baseline: a state already held; used if it is HEAD's, and owned by the publisher.
            signer: makes the signatures of a version manifest from its core's bytes.
            announce: told of every segment once home has it, before its version exists: followers
                may fetch it ahead. Called on an upload thread; must not block.
            on_bytes: told what is on its way to home, and what has arrived there.
            on_read: told the bytes of each piece that is read to rebuild HEAD.

        Where bodies are missing, so that HEAD cannot be rebuilt, that version is a full one.

        Raises InvalidInputError when the source does not fit the layout, LeaseError when another
        writer was faster, IntegrityError when manifests are missing in the bucket.
        """
        match_entries(home.layout, source.entries())
        have_bodies_checked(home.store, home.keys)
        head = load_manifest(home, find_head(home))
        held = baseline if baseline and baseline.point == ActiveVersion.of(head) else None
        if held is None:
            held = _rebuilt(home, head, baseline, clock, on_read)
        publisher = cls(
            home,
            source,
            head=head,
            baseline=None if held is None else held.state,
            regions=regions,
            settings=settings or PublisherSettings(),
            clock=clock,
            sink=sink,
            signer=signer,
            announce=announce,
            on_bytes=on_bytes,
        )
        try:
            fence = publisher._submit(step, check=True)
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

        Raises LeaseError when this writer has lost the run, InvalidInputError when `step` is no
        whole number of 53 bits, or the publisher is closed.
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
        return self._fanout.behind(self._baseline.head.core.version, timeout_s)

    def close(self) -> None:
        """Stop the threads. A version on its way is finished or fails; regions may be behind."""
        with self._lock:
            self._closed = True
        self._worker.shutdown(wait=True)
        self._differ.close()
        self._encoders.shutdown(wait=True)
        self._uploader.close()
        self._fanout.close()

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

    def _submit(self, step: int, *, check: bool = False) -> Publication:
        step = check_step(step)
        with self._lock:
            if self._fatal is not None:
                raise self._fatal
            if self._closed:
                raise InvalidInputError(
                    "this publisher is closed",
                    kind=Kind.SETTING,
                    run=self._home.name,
                    hint="open another one for the run",
                )
            last = self._baseline.head.core.step_last
            publication = Publication(step)
            publication.cover_after(last)
            self._pending = publication
            self._worker.submit(self._work, publication, check)
        return publication

    def _work(self, publication: Publication, check: bool) -> None:
        """Run one publication on the worker thread; its future always resolves."""
        try:
            manifest = self._publish(publication, check)
        except LeaseError as err:
            self._fatal = err
            self._fail(publication, err)
        except BaseException as err:  # noqa: BLE001 - it is handed to whoever waits for the result
            self._fail(publication, err)
        else:
            publication.captured.set()
            publication.future.set_result(manifest)
            self._baseline.promote()  # whoever waits for the version need not wait for this

    def _fail(self, publication: Publication, err: BaseException) -> None:
        kind = err.kind.value if isinstance(err, DeltastoreError) else type(err).__name__
        try:
            self._sink(PublishFailed(self._baseline.head.core.version + 1, kind, str(err)))
        finally:  # a full event log must not leave the trainer waiting
            publication.future.set_exception(err)
            publication.captured.set()

    def _publish(self, publication: Publication, check: bool) -> VersionManifest:
        started_s = self._clock.monotonic_s()
        settled = self._baseline.settle()
        if settled is not None:
            self._announce(settled)
            publication.cover_after(settled.core.step_last)
        head = self._baseline.head
        every = self._settings.baseline_check_every_versions
        try:
            if check or (head.core.version + 1) % every == 0:
                self._baseline.check()
            base = self._baseline.state
        except IntegrityError as err:
            if err.kind is not Kind.BASELINE:
                raise
            self._sink(BaselineLost(head.core.version, str(err)))
            return self._publish_full(publication, started_s)
        version = head.core.version + 1
        identity = SegmentIdentity(self._home.layout.digest, head.core.version, version)
        outbox = Outbox(
            self._home,
            identity,
            pool=self._encoders,
            encode_threads=self._settings.encode_threads,
            uploader=self._uploader,
            target_bytes=self._segment_bytes(),
            offer=lambda ref, body: self._fanout.offer(version, ref, body),
            confirmed=lambda ref: self._confirmed(version, ref),
            clock=self._clock,
        )
        try:
            for blocks in self._differ.batches(self._source, base, head.core.fingerprint_after):
                outbox.add(blocks)
            publication.captured.set()
            captured_s = self._clock.monotonic_s()
            outbox.flush()
            sent = outbox.confirm()
        except BaseException:
            outbox.abandon()
            self._fanout.abandon(version)
            raise
        uploaded_s = self._clock.monotonic_s()
        draft = Draft(publication.step_first, publication.step_last, sent, outbox.blocks)
        manifest = self._writer.manifest(head, draft, created_s=self._clock.utc_s())
        self._baseline.commit(manifest, outbox.blocks, uploading_since_s=started_s)
        self._announce(manifest)
        times = (started_s, captured_s, uploaded_s, self._clock.monotonic_s())
        report_published(self._sink, self._home, manifest, sent, times)
        return manifest

    def _publish_full(self, publication: Publication, started_s: float) -> VersionManifest:
        """The way out of a lost baseline: the next version carries the whole state."""
        head = self._baseline.head
        state = read_source(self._source, self._home.layout)
        publication.captured.set()
        captured_s = self._clock.monotonic_s()
        streams = self._settings.streams
        version, told = head.core.version + 1, self._on_bytes
        files = upload_whole(self._home, state, version, streams=streams, on_bytes=told)
        uploaded_s = self._clock.monotonic_s()
        steps = (publication.step_first, publication.step_last)
        now_s = self._clock.utc_s()
        manifest = self._writer.full_manifest(head, steps, state, files, created_s=now_s)
        self._baseline.commit(manifest, state, uploading_since_s=started_s)
        self._announce(manifest)
        times = (started_s, captured_s, uploaded_s, self._clock.monotonic_s())
        report_published(self._sink, self._home, manifest, [], times)
        return manifest

    def _confirmed(self, version: int, ref: SegmentRef) -> None:
        if self._announce_segment is not None:
            self._announce_segment(version, ref)

    def _announce(self, manifest: VersionManifest) -> None:
        """Tell the regions and write the hint: a hint that fails costs a poll, nothing else."""
        self._fanout.committed(manifest)
        err = advertise(self._home, manifest)
        if err is not None:
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


def _rebuilt(
    home: Run,
    head: VersionManifest,
    held: Held | None,
    clock: Clock,
    on_read: Callable[[int], None] | None,
) -> Held | None:
    """HEAD's bits from the bucket; None when its bodies do not give them."""
    try:
        return replay(home, head.core.version, clock=clock, held=held, progress=on_read).held
    except (IntegrityError, FormatError, NotFoundError) as err:
        if err.kind not in {Kind.OBJECT_MISSING, Kind.GONE, Kind.DIGEST, Kind.FINGERPRINT}:
            raise
        return None
