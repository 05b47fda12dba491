"""A manifest put together in the middle of an upload forgets a field: it is drafted in one place.

From what a publication has sent to the manifest that makes it a version, and to the events that say
what it took.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from deltastore.events import StageFinished, VersionPublished
from deltastore.format.block import total_change
from deltastore.format.manifest import (
    FileRef,
    SegmentRef,
    VersionCore,
    VersionKind,
    VersionManifest,
)
from deltastore.format.mixing import fingerprint_state
from deltastore.ids import new_token

if TYPE_CHECKING:
    from deltastore.events import EventSink
    from deltastore.format.block import Block
    from deltastore.format.layout import BitState
    from deltastore.format.signing import Signer
    from deltastore.pipeline.outbox import SentSegment
    from deltastore.repository.run import Run

Announce: TypeAlias = Callable[[int, SegmentRef], None]
"""Told of a version that may come to exist, and of a segment of it that home has."""


Files: TypeAlias = tuple[FileRef, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """What a version will consist of: every body is in home."""

    step_first: int
    step_last: int
    sent: list[SentSegment]
    blocks: list[Block]


@dataclass(frozen=True, slots=True)
class Writer:
    """The identity under which one process writes versions of a run.

    Args:
        generation: one more than that of the newest version found at its start.
        nonce: 128 random bits.
        signer: signs manifests; None: they stay unsigned.
    """

    generation: int
    nonce: str
    signer: Signer | None = None

    @classmethod
    def above(cls, head: VersionManifest, *, signer: Signer | None) -> Writer:
        """A new writer that takes over at `head`."""
        return cls(head.core.generation + 1, new_token(), signer)

    def full_manifest(
        self,
        head: VersionManifest,
        steps: tuple[int, int],
        state: BitState,
        files: Files,
        *,
        created_s: float,
    ) -> VersionManifest:
        """The manifest of a version after `head` that carries the whole state."""
        base = head.core
        core = VersionCore(
            run=base.run,
            run_id=base.run_id,
            version=base.version + 1,
            kind=VersionKind.FULL,
            base_version=base.version,
            base_policy_hash=head.policy_hash,
            layout_digest=base.layout_digest,
            segments=(),
            files=files,
            nnz=0,
            fingerprint_before=base.fingerprint_after,
            fingerprint_after=fingerprint_state(state),
            encodings=(),
            step_first=steps[0],
            step_last=steps[1],
            generation=self.generation,
            writer_nonce=self.nonce,
            created_ms=int(created_s * 1000),
        )
        return self._signed(core)

    def manifest(self, head: VersionManifest, draft: Draft, *, created_s: float) -> VersionManifest:
        """The manifest of the version after `head`."""
        base = head.core
        core = VersionCore(
            run=base.run,
            run_id=base.run_id,
            version=base.version + 1,
            kind=VersionKind.DELTA,
            base_version=base.version,
            base_policy_hash=head.policy_hash,
            layout_digest=base.layout_digest,
            segments=tuple(segment.ref for segment in draft.sent),
            files=(),
            nnz=sum(block.nnz for block in draft.blocks),
            fingerprint_before=base.fingerprint_after,
            fingerprint_after=base.fingerprint_after + total_change(draft.blocks),
            encodings=tuple(sorted(frozenset().union(*(s.encodings for s in draft.sent)))),
            step_first=draft.step_first,
            step_last=draft.step_last,
            generation=self.generation,
            writer_nonce=self.nonce,
            created_ms=int(created_s * 1000),
        )
        return self._signed(core)

    def _signed(self, core: VersionCore) -> VersionManifest:
        signatures = () if self.signer is None else self.signer(core.canonical_bytes())
        return VersionManifest(core, signatures)


def report_published(
    sink: EventSink,
    home: Run,
    manifest: VersionManifest,
    sent: list[SentSegment],
    times_s: tuple[float, float, float, float],
) -> None:
    """Tell what a version took.

    Args:
        times_s: when it was begun, captured, uploaded and committed.
    """
    started_s, captured_s, uploaded_s, committed_s = times_s
    core = manifest.core
    first_s = max(min((s.sent_s for s in sent), default=uploaded_s), started_s)
    stages = {
        "capture": captured_s - started_s,
        "encode": sum(s.encode_s for s in sent),
        "upload": uploaded_s - first_s,
        "commit": committed_s - uploaded_s,
    }
    region = home.record.home
    for stage, seconds in stages.items():
        parts = 1 if stage == "commit" else len(sent)
        size_bytes = home.dense_bytes if stage == "capture" else core.delta_bytes
        sink(StageFinished(region, core.version, stage, parts, size_bytes, seconds))
    sink(
        VersionPublished(
            version=core.version,
            step_first=core.step_first,
            step_last=core.step_last,
            policy_hash=manifest.policy_hash,
            nnz=core.nnz,
            elements=home.layout.elements,
            delta_bytes=core.delta_bytes,
            dense_bytes=home.dense_bytes,
            capture_s=stages["capture"],
            encode_s=stages["encode"],
            upload_s=stages["upload"],
            commit_s=stages["commit"],
            total_s=committed_s - started_s,
        )
    )
