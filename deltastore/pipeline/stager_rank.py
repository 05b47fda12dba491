"""An engine that downloads is an engine that waits: a rank takes what its host's stager has staged.

The rank's side of the spool, with the methods of `Follower`, so that an actor may use either. It
says where its weights are, looks at the stager's offers, maps and checks what is offered in the
background, and hands it to the applier at a safe point.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from deltastore.errors import (
    DeltastoreError,
    FormatError,
    IntegrityError,
    Kind,
    StorageError,
    error_of,
)
from deltastore.pipeline.held_lock import HeldLock, is_locked
from deltastore.pipeline.spool import RankNote, SpoolFolder, map_update

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.clock import Clock
    from deltastore.format.layout import Layout
    from deltastore.pipeline.spool import Offer, SpooledUpdate
    from deltastore.pipeline.staged import StagedUpdate
    from deltastore.repository.points import ActiveVersion

LOOK_S = 0.1
RETRY_S = 1.0
"""After what nobody expected: it may be a bug, which looking more often would only repeat."""
_log = logging.getLogger(__name__)


class StagedFeed:
    """What a host's stager has for one rank. Thread-safe.

    Args:
        folder: in which the stager works.
        rank: this process's name on this host; two processes cannot have the same.
        active: the version that the rank's weights are at.
        catch_up_s: how long `catch_up` waits for the stager.

    Raises InvalidInputError(lease_held) when another process has the name.
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        active: ActiveVersion,
        *,
        rank: str,
        clock: Clock,
        catch_up_s: float = 120.0,
    ) -> None:
        self._folder = SpoolFolder(folder)
        self._layout = layout
        self._rank = rank
        self._clock = clock
        self._catch_up_s = catch_up_s
        self._held = HeldLock(self._folder.rank_lock(rank), what=f"the rank name {rank!r}")
        self._lock = threading.Lock()
        self._note = RankNote(active)
        self._asked_anew_at: ActiveVersion | None = None
        self._resets = 0
        self._staged: StagedUpdate | None = None
        self._spooled: SpooledUpdate | None = None  # what `_staged` was mapped from
        self._head_seen = active.version
        self._error: DeltastoreError | None = None
        self._current = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._folder.write_note(rank, self._note)

    @property
    def head_seen(self) -> int:
        """The newest version that the stager knows of."""
        return self._head_seen

    @property
    def tip(self) -> ActiveVersion:
        """The newest version staged or active."""
        staged = self._staged
        return self._note.active if staged is None else staged.target

    @property
    def error(self) -> DeltastoreError | None:
        """What keeps the stager from going on, until it goes on."""
        return self._error

    def staged(self) -> StagedUpdate | None:
        """What is ready for activation; it stays staged."""
        return self._staged

    @property
    def spooled(self) -> SpooledUpdate | None:
        """What `staged` was mapped from: it names the update to the other ranks of an engine."""
        return self._spooled

    @property
    def until(self) -> int | None:
        """The version beyond which nothing is staged."""
        return self._note.until

    def ask(self, until: int | None) -> None:
        """Have nothing staged beyond that version; None: everything. Cheap when nothing changes.

        With a version to end at, what is staged at or beyond it is offered anew: the stager
        removes what it staged for those who take everything, and stops at that version for others.
        """
        with self._lock:
            if until == self._note.until:
                return
            staged = self._staged
            if staged is not None and until is not None and staged.target.version >= until:
                self._staged = self._spooled = None
            self._say(replace(self._note, until=until))

    def take(self, expected: SpooledUpdate | None = None) -> StagedUpdate | None:
        """Take what is staged, to activate it; on failure call `reset`.

        Args:
            expected: the update that all ranks of an engine agreed on: while another one is staged
                here, nothing is taken.
        """
        with self._lock:
            update, spooled = self._staged, self._spooled
            if update is None or (expected is not None and not _same(spooled, expected)):
                return None
            self._staged = self._spooled = None
            self._say(RankNote(update.target, 0, self._note.until))
        return update

    def moved(self, active: ActiveVersion) -> None:
        """The weights came to `active` by another way: what is staged from elsewhere is dropped."""
        with self._lock:
            if active != self._note.active:
                self._staged = self._spooled = None
                self._say(RankNote(active, 0, self._note.until))

    def reset(self, active: ActiveVersion) -> None:
        """Begin again from `active`: what was staged or taken is fetched anew."""
        with self._lock:
            self._staged = self._spooled = None
            self._say(self._anew(active))

    def poll(self) -> bool:
        """Look at the stager's offer; return whether something new is staged.

        Raises what keeps it from being staged.
        """
        try:
            new = self._look()
        except DeltastoreError as err:
            self._error = err
            raise
        return new

    def catch_up(self) -> None:
        """Wait until the stager has staged all there is, or its spool is full.

        Raises StorageError(timeout) when it does not come to that, or what keeps it from it.
        """
        deadline_s = self._clock.monotonic_s() + self._catch_up_s
        while not self._stop.is_set():
            self.poll()
            if self._error is not None:
                raise self._error
            if self._current:
                return
            if self._clock.monotonic_s() >= deadline_s:
                raise StorageError(
                    f"the stager had not staged everything after {self._catch_up_s} s",
                    kind=Kind.TIMEOUT,
                    hint="see its log; it may be far behind, or its spool full",
                )
            self._clock.wait(self._stop, LOOK_S)

    def start(self) -> None:
        """Look in a background thread until `stop`."""
        self._thread = threading.Thread(target=self._watch, name="stager-feed", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop looking, and let the stager know that this rank is gone."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._held.close()

    def _look(self) -> bool:
        if not is_locked(self._folder.stager_lock):
            raise StorageError(
                f"no stager works in {self._folder.path}",
                kind=Kind.UNAVAILABLE,
                hint="start `deltastore stage` or `python -m workers.stager` on this host",
            )
        offer = self._folder.read_offer(self._rank)
        with self._lock:
            note, held = self._note, self._spooled
        if offer is None or offer.note != note:
            self._current = False
            return False
        self._head_seen = max(self._head_seen, offer.head_seen)
        with self._lock:
            if self._note != note:
                return False  # this rank has asked for something else meanwhile
            self._error = _trouble(offer)
        spooled = offer.update
        if spooled is None or spooled == held:
            self._current = offer.current
            return False
        try:
            update = map_update(spooled, self._layout, note.active)
        except StorageError:
            if self._folder.read_offer(self._rank) == offer:
                raise
            return False  # it was replaced meanwhile by one that leads further
        except (IntegrityError, FormatError):
            self._ask_anew(note)
            raise
        with self._lock:
            if self._note != note:
                return False  # `take` or `reset` came in between
            self._staged, self._spooled = update, spooled
        self._current = offer.current
        return True

    def _ask_anew(self, note: RankNote) -> None:
        """Have a damaged update staged once more; from one version no more than once."""
        with self._lock:
            if self._note == note and self._asked_anew_at != note.active:
                self._asked_anew_at = note.active
                self._say(self._anew(note.active))

    def _anew(self, active: ActiveVersion) -> RankNote:
        """A note that this rank has never written: no offer can be for it yet."""
        self._resets += 1
        return RankNote(active, self._resets, self._note.until)

    def _say(self, note: RankNote) -> None:
        self._note = note
        self._current = False
        self._error = None  # it was said of another note: of this one nothing is known yet
        self._folder.write_note(self._rank, note)

    def _watch(self) -> None:
        while not self._stop.is_set():
            wait_s = LOOK_S
            try:
                if self.poll():
                    continue
            except DeltastoreError as err:
                self._error = err  # shown to the actor; tried again after the wait
            except Exception as err:  # noqa: BLE001 - a dead thread would stage nothing
                _log.exception("%s cannot look at its stager's offers", self._rank)
                self._error = unexpected("looking at the stager's offers", err)
                wait_s = RETRY_S
            self._clock.wait(self._stop, wait_s)


def unexpected(what: str, err: Exception) -> StorageError:
    """What a background thread met and goes on after, as an error that people are shown."""
    return StorageError(
        f"{what} failed: {type(err).__name__}: {str(err)[:1000]}",
        kind=Kind.UNAVAILABLE,
        hint="it is tried again; see this process's log",
    )


def _same(one: SpooledUpdate | None, other: SpooledUpdate) -> bool:
    return one is not None and one.sha256 == other.sha256 and one.target == other.target


def _trouble(offer: Offer) -> DeltastoreError | None:
    """The stager's trouble as the error it was there."""
    if offer.trouble is None:
        return None
    name, kind, message = offer.trouble
    row = {"class": name, "kind": kind, "message": message, "hint": "see the stager's log"}
    return error_of(row) or DeltastoreError(message, kind=Kind.UNAVAILABLE)
