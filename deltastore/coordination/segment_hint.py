"""Who waits for a manifest downloads nothing meanwhile: segments are announced as home gets them.

An announcement is untrusted and may be lost: whoever reads a segment ahead uses it only once a
manifest names it, and only under its own digest.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltastore.coordination.records import check_count, check_hash
from deltastore.ids import check_version

MAX_SEGMENT_NUMBER = 99_999
MAX_SEGMENT_BYTES = 1 << 40


@dataclass(frozen=True, slots=True)
class SegmentHint:
    """A segment that is in home, of a version that may come to exist.

    Args:
        number: of the segment in its version.
        sha256, size_bytes: of its bytes.
    """

    version: int
    number: int
    sha256: str
    size_bytes: int

    def __post_init__(self) -> None:
        """Refuse what no key could be made of."""
        check_version(self.version)
        check_count(self.number, "segment number", MAX_SEGMENT_NUMBER)
        check_count(self.size_bytes, "segment size", MAX_SEGMENT_BYTES, 1)
        check_hash(self.sha256)
