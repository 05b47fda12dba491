"""A bad setting found at hour three costs the run: settings are frozen and validated.

No setting reads the environment and none imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from deltastore.errors import InvalidInputError, Kind


class OnBacklog(StrEnum):
    """What `publish` does while a version is still on its way."""

    SKIP = "skip"
    """Return nothing: the next version covers several steps."""
    WAIT = "wait"
    """Wait up to `backlog_wait_s`."""


def require(condition: bool, name: str, value: object, rule: str) -> None:
    """Raise InvalidInputError(setting) naming the setting and its rule unless `condition`."""
    if not condition:
        raise InvalidInputError(
            f"setting {name} = {value!r} is not allowed", kind=Kind.SETTING, hint=rule
        )


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """How versions are made and sent."""

    streams: int = 8  # one stream loses 85 % of a lossy link; more than 8 gain little (ANCHORS)
    diff_threads: int = 2  # one scans about 3 GB/s; memory feeds two
    encode_threads: int = 2
    segment_min_bytes: int = 4 << 20  # below this, requests cost more than bytes
    segment_max_bytes: int = 32 << 20  # above this, streams starve at the end
    spool_max_bytes: int = 1 << 30  # encoded bytes waiting in memory for home
    spool_folder: str | None = None  # where a slow region's backlog goes; None: memory only
    region_memory_bytes: int = 256 << 20  # of a region's backlog in memory
    backlog_max_bytes: int = 8 << 30  # of a region's backlog on disk; beyond it, copied from home
    on_backlog: OnBacklog = OnBacklog.SKIP
    backlog_wait_s: float = 60.0
    commit_deadline_s: float = 1800.0  # bodies older than this are put again before the commit
    baseline_check_every_versions: int = 64

    def __post_init__(self) -> None:
        require(1 <= self.streams <= 256, "streams", self.streams, "1 to 256")
        for name in ("diff_threads", "encode_threads"):
            require(1 <= getattr(self, name) <= 256, name, getattr(self, name), "1 to 256")
        require(
            1 << 16 <= self.segment_min_bytes <= self.segment_max_bytes <= 1 << 30,
            "segment_min_bytes",
            self.segment_min_bytes,
            "65536 <= segment_min_bytes <= segment_max_bytes <= 2^30",
        )
        require(
            self.spool_max_bytes >= self.segment_max_bytes,
            "spool_max_bytes",
            self.spool_max_bytes,
            "at least segment_max_bytes",
        )
        for name in ("region_memory_bytes", "backlog_max_bytes"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "not negative")
        require(self.backlog_wait_s >= 0, "backlog_wait_s", self.backlog_wait_s, "not negative")
        require(self.commit_deadline_s > 0, "commit_deadline_s", self.commit_deadline_s, "positive")
        require(
            self.baseline_check_every_versions >= 1,
            "baseline_check_every_versions",
            self.baseline_check_every_versions,
            "at least 1",
        )


@dataclass(frozen=True, slots=True)
class FollowerSettings:
    """How an actor watches, stages and activates."""

    streams: int = 8
    poll_min_s: float = 1.0  # an eighth of the observed interval, but at least this
    poll_hinted_s: float = 10.0  # while hints arrive, polling is only a safety net
    stage_max_bytes: int = 2 << 30  # decoded changes waiting for a safe point
    undo_max_bytes: int = 1 << 30  # old bits kept for non-reversible blocks
    scratch_max_bytes: int = 64 << 20  # old bits kept from the first pass for the second
    full_check_every_versions: int = 64

    def __post_init__(self) -> None:
        require(1 <= self.streams <= 256, "streams", self.streams, "1 to 256")
        require(self.poll_min_s > 0, "poll_min_s", self.poll_min_s, "positive")
        require(
            self.poll_hinted_s >= self.poll_min_s,
            "poll_hinted_s",
            self.poll_hinted_s,
            "at least poll_min_s",
        )
        require(self.stage_max_bytes > 0, "stage_max_bytes", self.stage_max_bytes, "positive")
        for name in ("undo_max_bytes", "scratch_max_bytes"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "not negative")
        require(
            self.full_check_every_versions >= 1,
            "full_check_every_versions",
            self.full_check_every_versions,
            "at least 1",
        )
