"""A run whose joins are cheap never needs an anchor, and so never frees a byte: this asks for one.

Retention can delete only what lies below a whole state. Where the deltas that an anchor would let
it delete are larger than the anchor itself, the anchor pays for itself in storage, whatever it
spares joiners.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.maintenance.anchors import write_anchor
from deltastore.repository.resolve import find_head
from deltastore.repository.way import survey

if TYPE_CHECKING:
    from deltastore.clock import Clock
    from deltastore.events import EventSink
    from deltastore.format.shortcut import AnchorManifest
    from deltastore.format.signing import Signer, TrustedKeys
    from deltastore.maintenance.anchors import AnchorPolicy
    from deltastore.maintenance.retention_plan import RetentionPolicy
    from deltastore.maintenance.settings import MaintenanceSettings
    from deltastore.repository.run import Run


def room_due(
    run: Run,
    policy: AnchorPolicy,
    retention: RetentionPolicy,
    *,
    streams: int,
    trusted: TrustedKeys | None = None,
) -> int | None:
    """The version at which an anchor would free more than it takes, or None.

    The highest multiple that retention may raise the floor to. Reads manifests only.
    """
    head = find_head(run)
    needed = head - retention.keep_versions + 1
    candidate = needed - needed % policy.multiple
    if candidate <= 0:
        return None
    found = survey(run, candidate, streams=streams, trusted=trusted)
    start = max((v for v in found.whole_states() if v <= candidate), default=candidate)
    freed_bytes = sum(m.core.delta_bytes for v, m in found.manifests.items() if v > start)
    return candidate if start < candidate and freed_bytes > run.dense_bytes else None


def make_room(
    run: Run,
    policy: AnchorPolicy,
    retention: RetentionPolicy,
    *,
    clock: Clock,
    settings: MaintenanceSettings,
    sink: EventSink,
    signer: Signer,
    trusted: TrustedKeys | None = None,
) -> AnchorManifest | None:
    """Make that anchor if it is due; None when it is not, or another worker was faster."""
    version = room_due(run, policy, retention, streams=settings.streams, trusted=trusted)
    if version is None:
        return None
    return write_anchor(
        run,
        version,
        clock=clock,
        settings=settings,
        sink=sink,
        signer=signer,
        trusted=trusted,
    )
