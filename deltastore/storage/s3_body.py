"""A part that trickles breaks no timeout, and when it is all there its signature is too old.

The client's timeouts count the silence between two pieces, not the whole: this body counts that,
and ends before the 15 minutes after which S3 no longer takes a signature (S12). It is sent straight
from the memory it lies in, piece by piece: a part in flight costs no copy (S20).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deltastore.clock import Clock


class BodyTooSlowError(Exception):
    """The deadline passed before the body was sent."""


class TimedBody:
    """A view as the file that botocore wants, readable until the deadline.

    Args:
        view: what is sent; it may be read more than once (to sign it, then to send it).
        deadline_s: from now, by the clock.
        sha256: of the view, in hex, if it is known; see s3_signing.
    """

    def __init__(
        self, view: memoryview, *, clock: Clock, deadline_s: float, sha256: str | None = None
    ) -> None:
        self.sha256 = sha256
        self._view = view
        self._at = 0
        self._clock = clock
        self._deadline_s = deadline_s
        self._started_s = clock.monotonic_s()

    def __len__(self) -> int:
        return len(self._view)

    def read(self, size: int | None = -1) -> memoryview:
        """The next bytes, none at the end: a view of them, for hashes and sockets take views."""
        if self._clock.monotonic_s() - self._started_s > self._deadline_s:
            raise BodyTooSlowError(
                f"{self._at} of {len(self._view)} bytes in {self._deadline_s:g} s"
            )
        end = len(self._view) if size is None or size < 0 else self._at + size
        piece = self._view[self._at : end]
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move, as files do."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._view)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at
