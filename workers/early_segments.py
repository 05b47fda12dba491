"""A host that waits for the manifest downloads after everybody else: it is told of segments before.

The trainer tells the fleet of each segment as home gets it, through coordination; a host's stager
reads it ahead. Both ends treat it as advice: what is not told, not read or not true costs a later
download and nothing else. The key is made here, of numbers and a digest, never taken from Redis.
"""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

from deltastore.coordination.backend import MAX_SEGMENT_HINTS, SegmentHint
from deltastore.coordination.outage import is_outage
from deltastore.errors import CoordinationError, FormatError
from deltastore.format.keys import parse_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.coordination.backend import Coordination
    from deltastore.format.keys import RunKeys
    from deltastore.format.manifest import SegmentRef

_LOG = logging.getLogger(__name__)
CLOSE_WAIT_S = 5.0


class SegmentTeller:
    """Tells the fleet of a publisher's segments, on a thread of its own. Close it when done."""

    def __init__(self, coordination: Coordination) -> None:
        self._coordination = coordination
        self._waiting: queue.Queue[SegmentHint | None] = queue.Queue(MAX_SEGMENT_HINTS)
        self.untold = 0
        """Segments that nobody was told of: too many at once, or Redis was away."""
        self._thread = threading.Thread(target=self._work, name="tell-segments", daemon=True)
        self._thread.start()

    def tell(self, version: int, ref: SegmentRef) -> None:
        """Home has this segment. Never blocks."""
        number = str(parse_key(ref.key).name).partition("-")[0]
        try:
            hint = SegmentHint(version, int(number), ref.sha256, ref.size_bytes)
            self._waiting.put_nowait(hint)
        except queue.Full:
            self.untold += 1

    def close(self) -> None:
        """Stop; what still waits may stay untold."""
        try:
            self._waiting.put(None, timeout=CLOSE_WAIT_S if self._thread.is_alive() else 0)
        except queue.Full:
            _LOG.warning("segments are still waiting to be told")
        self._thread.join(CLOSE_WAIT_S)

    def _work(self) -> None:
        while (hint := self._waiting.get()) is not None:
            try:
                self._coordination.announce_segment(hint)
            except CoordinationError as err:
                self.untold += 1
                if not is_outage(err):
                    _LOG.warning("segments are not told any more: %s", err)
                    return


class SegmentListener:
    """What the fleet was told of, as a stager's source of hints: it looks before it waits.

    Args:
        hints: where to wait for a newer version.
    """

    def __init__(
        self,
        coordination: Coordination,
        keys: RunKeys,
        hints: Callable[[int, float], int | None],
    ) -> None:
        self._coordination = coordination
        self._keys = keys
        self._hints = hints
        self._known: set[SegmentHint] = set()
        self.announce: Callable[[str, int], bool] | None = None
        """The stager's own; set once there is one."""

    def wait(self, known: int, timeout_s: float) -> int | None:
        """Pass on what is new of versions above `known`, then wait for a newer version."""
        for hint in self._told():
            if hint.version > known and self.announce is not None:
                key = self._keys.segment(hint.version, hint.number, hint.sha256)
                self.announce(key, hint.size_bytes)
        return self._hints(known, timeout_s)

    def _told(self) -> list[SegmentHint]:
        try:
            told = self._coordination.announced_segments()
        except FormatError:  # somebody else wrote there: advice that cannot be read is none
            return []
        except CoordinationError as err:
            if not is_outage(err):
                raise
            return []
        new = [hint for hint in told if hint not in self._known]
        self._known = set(told)
        return new
