"""A checkpoint that cannot be rebuilt from the bucket alone is not a checkpoint: this rebuilds it.

Replays the chain to any version, bit for bit, proving the state's fingerprint at every version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.chain.apply import apply_blocks
from deltastore.errors import IntegrityError, Kind
from deltastore.format.manifest import VersionKind
from deltastore.pipeline.history import links_to
from deltastore.repository.fetch import fetch_blocks, load_manifest
from deltastore.repository.full import fetch_full_state
from deltastore.repository.points import ActiveVersion
from deltastore.repository.resolve import find_head

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.clock import Clock
    from deltastore.format.layout import BitState
    from deltastore.format.manifest import VersionManifest
    from deltastore.repository.run import Run


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A state on the host and the version it is at."""

    state: BitState
    point: ActiveVersion


@dataclass(frozen=True, slots=True)
class JoinReport:
    """From what a version was reached, and what it cost.

    Args:
        via: for people, for example "full v0 + 8 deltas".
        size_bytes: bytes of bodies read from the bucket.
        links: deltas applied.
    """

    via: str
    size_bytes: int
    links: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """A rebuilt state, the manifest that names it, and how it was reached."""

    state: BitState
    manifest: VersionManifest
    report: JoinReport

    @property
    def held(self) -> Held:
        """The state as something to build on."""
        return Held(self.state, ActiveVersion.of(self.manifest))


def replay(
    run: Run,
    version: int | None = None,
    *,
    clock: Clock,
    held: Held | None = None,
    streams: int = 8,
    progress: Callable[[int], None] | None = None,
) -> Replayed:
    """Rebuild a version (None: HEAD) from the bucket.

    Args:
        held: a state to build on if the version's history passes through it; it is changed in
            place and must not be used afterwards.
        progress: called with the bytes of each piece read.

    Raises NotFoundError(version_missing), IntegrityError, FormatError, StorageError.
    """
    started_s = clock.monotonic_s()
    target = find_head(run) if version is None else version
    links = links_to(run, target, held=None if held is None else held.point, streams=streams)
    size_bytes = sum(m.core.delta_bytes for m in links)
    if links and links[0].core.kind is VersionKind.FULL:
        first = links[0]
        state = fetch_full_state(run, first, streams=streams, progress=progress)
        start, deltas, last = f"full v{first.core.version}", links[1:], first
    elif held is not None:
        state, start, deltas = held.state, f"held v{held.point.version}", links
        last = links[-1] if links else load_manifest(run, held.point.version)
    else:
        raise IntegrityError("a plan without a start", kind=Kind.BROKEN_CHAIN, run=run.name)
    for manifest in deltas:
        _apply_delta(run, manifest, state, streams, progress)
        last = manifest
    report = JoinReport(
        via=f"{start} + {len(deltas)} deltas" if deltas else start,
        size_bytes=size_bytes,
        links=len(deltas),
        seconds=clock.monotonic_s() - started_s,
    )
    return Replayed(state, last, report)


def _apply_delta(
    run: Run,
    manifest: VersionManifest,
    state: BitState,
    streams: int,
    progress: Callable[[int], None] | None,
) -> None:
    """Apply one delta. A failure leaves `state` half changed: the caller throws it away."""
    for number, blocks in enumerate(fetch_blocks(run, manifest, streams=streams)):
        apply_blocks(state, blocks)
        if progress is not None:
            progress(manifest.core.segments[number].size_bytes)
