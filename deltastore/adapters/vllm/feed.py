"""Index arithmetic inside the pause is paid by every request: updates are prepared before it.

What one rank has of its host's stager (`pipeline/stager_rank.py`), and beside it the work that
needs no live weights: an offered update is mapped, checked, and its places in this rank's memory
are found, in the background, so that an activation only reads and writes.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from deltastore.errors import ApplyError, DeltastoreError, Kind
from deltastore.pipeline.spool import map_update
from deltastore.pipeline.stager_rank import RETRY_S, unexpected

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.clock import Clock
    from deltastore.format.layout import Layout
    from deltastore.pipeline.rank_applier import PreparedUpdate
    from deltastore.pipeline.spool import SpooledUpdate
    from deltastore.pipeline.staged import StagedUpdate
    from deltastore.pipeline.stager_rank import StagedFeed
    from deltastore.repository.points import ActiveVersion

LOOK_S = 0.05
_log = logging.getLogger(__name__)


class PreparedFeed:
    """One rank's staged updates, prepared. Thread-safe.

    Args:
        feed: of this rank; started and stopped here.
        prepare: locates an update in this rank's memory; touches no live weights.
    """

    def __init__(
        self,
        feed: StagedFeed,
        layout: Layout,
        prepare: Callable[[StagedUpdate], PreparedUpdate[Any]],
        clock: Clock,
    ) -> None:
        self._feed = feed
        self._layout = layout
        self._prepare = prepare
        self._clock = clock
        self._lock = threading.Lock()
        self._ready: tuple[SpooledUpdate, PreparedUpdate[Any]] | None = None
        self._refused: SpooledUpdate | None = None
        self._error: DeltastoreError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="prepare", daemon=True)

    def start(self) -> None:
        """Look and prepare in the background until `stop`."""
        self._feed.start()
        self._thread.start()

    def stop(self) -> None:
        """Stop, and let the stager know that this rank is gone."""
        self._stop.set()
        self._thread.join()
        self._feed.stop()
        self._ready = None

    @property
    def ready(self) -> int | None:
        """The version that an activation would bring now."""
        ready = self._ready
        return None if ready is None else ready[0].target.version

    @property
    def offered(self) -> SpooledUpdate | None:
        """What is staged, whether it has been prepared or not."""
        return self._feed.spooled

    @property
    def head_seen(self) -> int:
        """The newest version that the stager knows of."""
        return self._feed.head_seen

    @property
    def error(self) -> DeltastoreError | None:
        """What keeps the next version from being staged or prepared, until it is."""
        return self._feed.error or self._error

    def ask(self, until: int | None) -> None:
        """Have nothing staged beyond that version; None: everything."""
        self._feed.ask(until)

    def prepared(self, spooled: SpooledUpdate, active: ActiveVersion) -> PreparedUpdate[Any]:
        """That update, prepared, whatever this rank's own feed has.

        Raises StorageError(unavailable) when it is gone, IntegrityError (digest, wrong_base),
        FormatError, ApplyError(rolled_back).
        """
        with self._lock:
            if self._ready is not None and _same(self._ready[0], spooled):
                return self._ready[1]
        return self._prepare(map_update(spooled, self._layout, active))

    def moved(self, active: ActiveVersion, taken: SpooledUpdate | None = None) -> None:
        """The weights have come to `active`, by the update `taken` or by another way."""
        self._forget()
        if taken is None or self._feed.take(taken) is None:
            self._feed.moved(active)

    def reset(self, active: ActiveVersion) -> None:
        """What was staged could not be activated: have it fetched anew."""
        self._forget()
        self._feed.reset(active)

    def _forget(self) -> None:
        with self._lock:
            self._ready = self._refused = self._error = None

    def _watch(self) -> None:
        wait_s = LOOK_S
        while not self._clock.wait(self._stop, wait_s):
            wait_s = LOOK_S
            try:
                self._look()
            except Exception as err:  # noqa: BLE001 - a dead thread would prepare nothing
                _log.exception("an update cannot be prepared")
                with self._lock:
                    self._error = unexpected("preparing an update", err)
                wait_s = RETRY_S

    def _look(self) -> None:
        spooled, update = self._feed.spooled, self._feed.staged()
        with self._lock:
            ready, refused = self._ready, self._refused
        if spooled is None or update is None or update.target != spooled.target:
            return
        if any(
            known is not None and _same(known, spooled) for known in (ready and ready[0], refused)
        ):
            return
        try:
            prepared = self._prepare(update)
        except DeltastoreError as err:
            _log.warning("version %s cannot be prepared: %s", update.target.version, err)
            with self._lock:
                self._refused, self._error = spooled, err
            return
        with self._lock:
            if self._feed.spooled == spooled:
                self._ready, self._refused, self._error = (spooled, prepared), None, None


def not_staged(version: int | str, why: str) -> ApplyError:
    """The error of an update that has nothing to activate."""
    return ApplyError(
        f"version {version} is not staged: {why}",
        kind=Kind.NOT_STAGED,
        hint="the weights are at the version before; ask again when it is staged",
    )


def _same(one: SpooledUpdate, other: SpooledUpdate) -> bool:
    return one.sha256 == other.sha256 and one.target == other.target
