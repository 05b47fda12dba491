"""Diff, then encode, then send, one after the other, triples the time: here they overlap.

Blocks come in, segments go out. Blocks are gathered to segments of the target size, encoded on a
thread pool (the kernels release the GIL) and handed to the uploader and the regions at once.

Memory: the decoded blocks of the version (4 bytes and one element per change), for each encoder
thread about four times a segment while it is at it, and the uploader's `spool_max_bytes` of encoded
bytes. At most `encode_threads` + 2 segments wait for an encoder: a full uploader blocks the
encoders, those block `add`.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.format.manifest import SegmentRef
from deltastore.format.segment import (
    SegmentIdentity,
    encode_segment,
    estimated_sizes,
    segment_encodings,
)
from deltastore.storage.store import PutMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future, ThreadPoolExecutor

    from deltastore.clock import Clock
    from deltastore.format.block import Block
    from deltastore.repository.run import Run
    from deltastore.storage.store import PutOutcome
    from deltastore.storage.transfer import Uploader


@dataclass(frozen=True, slots=True)
class SentSegment:
    """A segment that was encoded and whose upload is on its way."""

    ref: SegmentRef
    encodings: frozenset[str]
    encode_s: float
    sent_s: float
    upload: Future[PutOutcome]


class Outbox:
    """Segments of one version, on their way to home and the regions.

    Args:
        run, identity: the run in home and what the segments turn into what.
        target_bytes: size at which gathered blocks become a segment.
        offer: called with (segment, body) of every encoded segment; must not block.
        confirmed: called with every segment that is in home now; must not block.
    """

    def __init__(
        self,
        run: Run,
        identity: SegmentIdentity,
        *,
        pool: ThreadPoolExecutor,
        encode_threads: int,
        uploader: Uploader,
        target_bytes: int,
        offer: Callable[[SegmentRef, bytes], None],
        confirmed: Callable[[SegmentRef], None],
        clock: Clock,
    ) -> None:
        self._run = run
        self._identity = identity
        self._pool = pool
        self._uploader = uploader
        self._target_bytes = target_bytes
        self._offer = offer
        self._confirmed = confirmed
        self._clock = clock
        self._room = threading.Semaphore(encode_threads + 2)
        self._gathered: list[Block] = []
        self._gathered_bytes = 0
        self._jobs: list[Future[SentSegment]] = []
        self.blocks: list[Block] = []

    def add(self, blocks: Sequence[Block]) -> None:
        """Take blocks; blocks while encoders and uploader are full."""
        self.blocks.extend(blocks)
        for block, size_bytes in zip(blocks, estimated_sizes(blocks), strict=True):
            self._gathered.append(block)
            self._gathered_bytes += size_bytes
            if self._gathered_bytes >= self._target_bytes:
                self.flush()

    def flush(self) -> None:
        """Send what has been gathered as a segment of its own."""
        if not self._gathered:
            return
        self._room.acquire()
        number, blocks = len(self._jobs), self._gathered
        self._gathered, self._gathered_bytes = [], 0
        job = self._pool.submit(self._encode_and_send, number, blocks)
        job.add_done_callback(lambda _: self._room.release())
        self._jobs.append(job)

    def confirm(self) -> list[SentSegment]:
        """Wait until every body is confirmed in home; raises the first failure."""
        sent = [job.result() for job in self._jobs]
        for segment in sent:
            segment.upload.result()
        return sent

    def abandon(self) -> None:
        """Stop what has not begun; what has been uploaded stays behind as orphans."""
        for job in self._jobs:
            job.cancel()
        for job in self._jobs:
            if not job.cancelled() and job.exception() is None:
                job.result().upload.cancel()

    def _encode_and_send(self, number: int, blocks: list[Block]) -> SentSegment:
        started_s = self._clock.monotonic_s()
        body = encode_segment(self._run.layout, self._identity, blocks)
        digest = hashlib.sha256(body).hexdigest()
        key = self._run.keys.segment(self._identity.version, number, digest)
        ref = SegmentRef(key, len(body), digest, sum(block.nnz for block in blocks))
        encode_s = self._clock.monotonic_s() - started_s
        sent_s = self._clock.monotonic_s()
        self._offer(ref, body)  # before home's queue, which may be full: regions do not wait for it
        upload = self._uploader.submit(
            self._run.store, key, body, mode=PutMode.CREATE, sha256=digest
        )
        upload.add_done_callback(lambda done: self._tell(done, ref))
        return SentSegment(ref, segment_encodings(body), encode_s, sent_s, upload)

    def _tell(self, upload: Future[PutOutcome], ref: SegmentRef) -> None:
        if not upload.cancelled() and upload.exception() is None:
            self._confirmed(ref)
