"""Eight ranks that each fetch and decode every version do it eight times: one stager does it once.

One process per host, outside the engine. It fetches, verifies, decodes and composes what lies
between the version a rank is at and HEAD, writes it to the spool, and says to the rank where it is
(`spool.py`). Ranks at the same version share one update; a rank that lags or was rolled back has
one of its own for a while.

What it leaves when it is killed lies in the spool and is removed by the next one; what a killed
rank leaves, as soon as the kernel lets go of its lock.

Disk or shared memory: `stage_max_bytes` of updates; when one does not fit, staging waits until
ranks have taken what is there. Memory: one version decoded, one update composed (a whole state, if
a full version was the way), and `cache_max_bytes` of bodies. A rank that maps an update keeps its
bytes until it lets go of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from deltastore.config import FollowerSettings
from deltastore.errors import DeltastoreError, Kind, StorageError
from deltastore.events import discard
from deltastore.format.staged_file import StagedContent, staged_bytes
from deltastore.pipeline.body_cache import BodyCache
from deltastore.pipeline.follower import Follower
from deltastore.pipeline.held_lock import HeldLock
from deltastore.pipeline.pace import Pace
from deltastore.pipeline.spool import (
    Offer,
    RankNote,
    SpooledUpdate,
    SpoolFolder,
    map_update,
)
from deltastore.pipeline.spool_use import UseFile
from deltastore.pipeline.staged import join_updates

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from deltastore.clock import Clock
    from deltastore.events import EventSink
    from deltastore.format.signing import TrustedKeys
    from deltastore.pipeline.copying import Backoff
    from deltastore.pipeline.staged import StagedUpdate
    from deltastore.repository.run import Run
    from deltastore.storage.store_use import UseCounter

CACHE_MAX_BYTES = 256 << 20
TURN_S = 0.1
"""How soon a rank's note is seen."""


@dataclass(slots=True, eq=False)
class _Lane:
    """What is staged for the ranks of one note."""

    note: RankNote
    follower: Follower
    backoff: Backoff
    ranks: list[str]
    spooled: SpooledUpdate | None = None
    kept: StagedUpdate | None = None
    """Fetched, and waiting for room."""
    needed_bytes: int = 0
    """Room that the composed update needs, once that is known."""
    current: bool = False
    trouble: tuple[str, str, str] | None = None
    next_poll_s: float = 0.0


class Stager:
    """The one stager of a host. `run` it in a process of its own; `turn` does one round.

    Args:
        run: in the host's own region.
        folder: where it meets its ranks.
        settings: `stage_max_bytes` limits the spool.
        hint_source: as the follower's.
        cache_max_bytes: of bodies, for announcements and ranks that lag.
        trusted: keys that must have signed versions and shortcuts; None trusts the bucket.
        use: counts what passes the run's store; the ranks are told of it.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        *,
        name: str,
        clock: Clock,
        settings: FollowerSettings | None = None,
        sink: EventSink = discard,
        hint_source: Callable[[int, float], int | None] | None = None,
        cache_max_bytes: int = CACHE_MAX_BYTES,
        seed: int | None = None,
        trusted: TrustedKeys | None = None,
        use: UseCounter | None = None,
    ) -> None:
        self._cache = BodyCache(run.store, run.name, max_bytes=cache_max_bytes)
        self._run = replace(run, store=self._cache)
        self._name = name
        self._clock = clock
        self._settings = settings or FollowerSettings()
        self._sink = sink
        self._hint_source = hint_source
        hinted, now_s = hint_source is not None, clock.monotonic_s()
        self._pace = Pace(self._settings, hinted=hinted, now_s=now_s, seed=seed)
        self._trusted = trusted
        self._lanes: list[_Lane] = []
        self._head_seen = -1
        self._offers: dict[str, Offer] = {}
        self.folder = SpoolFolder(folder)
        self._lock = HeldLock(self.folder.stager_lock, what="the stager of this host")
        self.folder.clear()
        self._use = None if use is None else UseFile(folder, use, run.region, clock)

    @property
    def spool_bytes(self) -> int:
        """Bytes of updates in the spool."""
        return sum(lane.spooled.size_bytes for lane in self._lanes if lane.spooled is not None)

    def announce(self, key: str, size_bytes: int) -> bool:
        """A segment that may become part of a version: read it ahead, if there is room."""
        return self._cache.announce(key, size_bytes)

    def run(self, stopping: threading.Event) -> None:
        """Stage until told to stop."""
        try:
            while not stopping.is_set():
                if not self.turn():
                    self._wait(stopping)
        finally:
            self.close()

    def turn(self) -> bool:
        """Do one round: see who lives, stage one version for each; whether anything was new."""
        self._see_ranks()
        new = False
        # The foremost first: the others find in the cache what it has read.
        for lane in sorted(self._lanes, key=lambda lane: -lane.follower.tip.version):
            new |= self._advance(lane)
        if self._lanes:
            self._cache.passed(min(lane.follower.tip.version for lane in self._lanes))
        self._tell()
        if self._use is not None:
            self._use.write()
        return new

    def close(self) -> None:
        """Remove the updates and let go of the folder."""
        if self._use is not None:
            self._use.write(now=True)
        self.folder.clear()
        self._lock.close()

    def _see_ranks(self) -> None:
        living = self.folder.living_ranks()
        kept = []
        for lane in self._lanes:
            lane.ranks = [rank for rank, note in living.items() if note == lane.note]
            if lane.ranks:
                kept.append(lane)
            else:
                self._discard(lane.spooled)
        known = {lane.note for lane in kept}
        for note in dict.fromkeys(living.values()):
            if note not in known:
                ranks = [rank for rank, told in living.items() if told == note]
                kept.append(_Lane(note, self._follower(note), self._pace.backoff(), ranks))
        self._lanes = kept
        self._offers = {rank: self._offers[rank] for rank in living if rank in self._offers}

    def _follower(self, note: RankNote) -> Follower:
        return Follower(
            self._run,
            note.active,
            name=self._name,
            clock=self._clock,
            settings=self._settings,
            sink=self._sink,
            trusted=self._trusted,
            until=note.until,
        )

    def _advance(self, lane: _Lane) -> bool:
        now_s = self._clock.monotonic_s()
        if now_s < lane.next_poll_s:
            return False
        try:
            if lane.kept is None:
                lane.trouble = None
                lane.kept = lane.follower.take() if lane.follower.poll() else None
                self._see_head(lane.follower.head_seen, now_s)
                lane.backoff.succeeded()
            if lane.kept is not None:
                return self._stage(lane, lane.kept)
        except DeltastoreError as err:
            lane.trouble = (type(err).__name__, err.kind.value, err.message)
            lane.next_poll_s = now_s + self._pace.failed_s(lane.backoff, now_s)
        else:
            lane.next_poll_s = now_s + self._pace.idle_s(now_s)
        lane.current = lane.trouble is None
        return False

    def _see_head(self, version: int, now_s: float) -> None:
        if version > self._head_seen >= 0:  # the first one seen is old
            self._pace.arrived(now_s)
        self._head_seen = max(self._head_seen, version)

    def _stage(self, lane: _Lane, update: StagedUpdate) -> bool:
        """Compose what was fetched with what is staged, and replace it in the spool."""
        limit = self._settings.stage_max_bytes
        before = lane.spooled
        if self.spool_bytes + lane.needed_bytes > limit:
            lane.current = before is not None
            return False  # kept: it is staged when ranks have taken what is there
        if before is not None:
            update = join_updates(self._run.layout, self._mapped(lane, before), update)
        lane.needed_bytes = staged_bytes(StagedContent({}, update.blocks, update.state))
        if lane.needed_bytes > limit and before is None:
            raise _too_large(update, lane.needed_bytes, limit)
        if self.spool_bytes + lane.needed_bytes > limit:
            lane.current = before is not None
            return False
        lane.spooled = self.folder.spool(self._run.layout, update)
        lane.kept, lane.needed_bytes, lane.trouble = None, 0, None
        lane.current = False
        self._discard(before)
        return True

    def _mapped(self, lane: _Lane, spooled: SpooledUpdate) -> StagedUpdate:
        update = map_update(spooled, self._run.layout, lane.note.active)
        if update.state is None:
            return update
        return replace(update, state=update.state.copy())  # later versions are applied to it

    def _discard(self, spooled: SpooledUpdate | None) -> None:
        if spooled is not None:
            Path(spooled.path).unlink(missing_ok=True)

    def _tell(self) -> None:
        for lane in self._lanes:
            offer = Offer(lane.note, lane.spooled, self._head_seen, lane.current, lane.trouble)
            for rank in lane.ranks:
                if self._offers.get(rank) != offer:
                    self.folder.write_offer(rank, offer)
                    self._offers[rank] = offer

    def _wait(self, stopping: threading.Event) -> None:
        if self._hint_source is None or not self._lanes:
            self._clock.wait(stopping, TURN_S)
            return
        tip = max(lane.follower.tip.version for lane in self._lanes)
        hinted = self._hint_source(tip, TURN_S)
        if hinted is not None and hinted > tip:
            for lane in self._lanes:
                if lane.trouble is None:  # else each hint would hit a store that is down
                    lane.next_poll_s = 0.0


def _too_large(update: StagedUpdate, needed: int, limit: int) -> StorageError:
    return StorageError(
        f"the update to version {update.target.version} needs {needed} bytes of {limit}",
        kind=Kind.LIMIT,
        version=update.target.version,
        hint="raise stage_max_bytes, or let the ranks rebuild from the bucket",
    )
