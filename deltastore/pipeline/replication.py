"""When the trainer is gone its regions stay behind for ever: this brings them up from home alone.

Watches home for new versions (computed keys; one listing at the start) and tells one
`RegionReplicator` per region, the same that a trainer uses. With patience it leaves new versions to
the trainer and does only what was left undone. Running beside a trainer, or twice, does no harm:
every put is create-only, of the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.errors import DeltastoreError, Kind, NotFoundError
from deltastore.events import RegionFailed
from deltastore.pipeline.fanout import Fanout
from deltastore.pipeline.replicator import Region, RegionLimits, RegionReplicator
from deltastore.repository.fetch import load_manifest
from deltastore.repository.resolve import find_head

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence

    from deltastore.clock import Clock
    from deltastore.events import EventSink
    from deltastore.repository.run import Run


class Replication:
    """Keeps every region other than home at home's version. Close it when done.

    Args:
        limits: what each region may use; its backlog is not, as bodies come from home.
        poll_s: between looks for a new version.

    Memory: of each stream one body. Raises what opening home's chain raises.
    """

    def __init__(
        self,
        home: Run,
        regions: Sequence[Region],
        *,
        limits: RegionLimits,
        poll_s: float,
        clock: Clock,
        sink: EventSink,
    ) -> None:
        self._home = home
        self._poll_s = poll_s
        self._clock = clock
        self._sink = sink
        self._head = find_head(home)
        self._fanout = Fanout(
            [
                RegionReplicator(r, home, target=self._head, limits=limits, clock=clock, sink=sink)
                for r in regions
            ],
            clock,
        )

    @property
    def head(self) -> int:
        """The newest version of home that was seen."""
        return self._head

    def look(self) -> bool:
        """See whether home has a new version; one request when there is none."""
        try:
            manifest = load_manifest(self._home, self._head + 1)
        except NotFoundError as err:
            if err.kind is not Kind.VERSION_MISSING:
                raise
            return False
        self._head = manifest.core.version
        self._fanout.committed(manifest)
        return True

    def behind(self, timeout_s: float) -> list[str]:
        """Wait until every region holds `head`; the names of those that do not."""
        return self._fanout.behind(self._head, timeout_s)

    def run(self, stopping: threading.Event) -> None:
        """Replicate until told to stop. While home does not answer, what is known goes on."""
        while not stopping.is_set():
            try:
                if self.look():
                    continue
            except DeltastoreError as err:
                home = self._home.record.home
                self._sink(RegionFailed(home, self._head + 1, err.kind.value, str(err)))
            self._clock.wait(stopping, self._poll_s)

    def close(self) -> None:
        """Stop after the requests in flight."""
        self._fanout.close()
