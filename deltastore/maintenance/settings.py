"""Maintenance that is set by feel deletes too early or never: its limits are validated together."""

from __future__ import annotations

from dataclasses import dataclass

from deltastore.config import require


@dataclass(frozen=True, slots=True)
class MaintenanceSettings:
    """How anchors and composites are made.

    Args:
        streams: requests in flight.
        segment_bytes: size at which a composite's blocks become a segment.
        shard_max_bytes: of an anchor's safetensors files; one larger tensor has a file of its own.
        commit_deadline_s: from the first body to the manifest; the janitor waits twice that.
    """

    streams: int = 8
    segment_bytes: int = 32 << 20
    shard_max_bytes: int = 1 << 30  # two of them are in memory while an anchor is written
    commit_deadline_s: float = 1800.0

    def __post_init__(self) -> None:
        require(1 <= self.streams <= 256, "streams", self.streams, "1 to 256")
        require(
            1 <= self.segment_bytes <= 1 << 30, "segment_bytes", self.segment_bytes, "1 to 2^30"
        )
        require(self.shard_max_bytes >= 1, "shard_max_bytes", self.shard_max_bytes, "at least 1")
        require(self.commit_deadline_s > 0, "commit_deadline_s", self.commit_deadline_s, "positive")
