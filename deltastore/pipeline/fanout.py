"""A publisher that loops over its regions waits for one some day: it speaks to all through this.

Nothing here blocks but `behind`, which says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltastore.clock import Clock
    from deltastore.format.manifest import SegmentRef, VersionManifest
    from deltastore.pipeline.replicator import RegionReplicator


class Fanout:
    """All regions but home, as the publisher sees them: told everything, waited for never."""

    def __init__(self, regions: Sequence[RegionReplicator], clock: Clock) -> None:
        self._regions = list(regions)
        self._clock = clock

    def offer(self, version: int, ref: SegmentRef, body: bytes) -> None:
        """A body of a version that is on its way to home."""
        for region in self._regions:
            region.offer(version, ref, body)

    def committed(self, manifest: VersionManifest) -> None:
        """Home holds this version now."""
        for region in self._regions:
            region.committed(manifest)

    def abandon(self, version: int) -> None:
        """The version will not be committed with the bodies offered for it."""
        for region in self._regions:
            region.abandon(version)

    def behind(self, version: int, timeout_s: float) -> list[str]:
        """Names of the regions that do not hold `version` after at most `timeout_s`."""
        deadline_s = self._clock.monotonic_s() + timeout_s
        return [
            region.name
            for region in self._regions
            if not region.wait_until(version, max(0.0, deadline_s - self._clock.monotonic_s()))
        ]

    def close(self) -> None:
        """Stop them all."""
        for region in self._regions:
            region.close()
