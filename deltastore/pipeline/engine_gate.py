"""An engine resumed on behalf of somebody who paused it on purpose runs what was to wait: never.

Keeps apart whose pause it is that keeps forward passes out, and notices a pause that somebody else
ended while weights were being written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.errors import ApplyError, Kind
from deltastore.pipeline.engine_control import PauseMode, asleep, doubt, unfollowed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltastore.pipeline.engine_control import EngineControl, RankStatus


class EngineGate:
    """Pauses and resumes one engine. Whoever uses it excludes other users.

    A pause that is found before the first resume is taken for one of a predecessor that was killed.

    Args:
        name: the engine's, for messages.
    """

    def __init__(self, control: EngineControl, name: str) -> None:
        self._control = control
        self._name = name
        self._owed = True  # a resume, by this gate or by its predecessor
        self._closed = False  # the engine has said that it is paused
        self.theirs = False
        """Whether somebody else paused the engine; then `open` leaves it paused."""
        self.asleep = False
        """Whether memory of the engine was away when it was looked at last."""

    def look(self) -> list[RankStatus]:
        """What all ranks say; notes whether the engine sleeps, and whose a pause is."""
        paused = self._control.is_paused()
        statuses = self.look_again()
        if self.asleep:
            self.theirs = False  # waking up ends that pause
        elif unfollowed(statuses) or not doubt(statuses):  # else the engine core may have paused
            self.theirs = paused and not self._owed
        return statuses

    def look_again(self) -> list[RankStatus]:
        """The same of an engine that is kept paused here, for whose pause does not change."""
        statuses = self._control.status()
        self.asleep = asleep(statuses)
        return statuses

    def close(self, mode: PauseMode) -> None:
        """Pause, whoever has paused it already: a resume may have come in between."""
        self._owed, self._closed = True, False
        self._control.pause(mode)
        self._closed = True

    def open(self) -> None:
        """End the own pause; one of somebody else goes on."""
        if not self.theirs:
            self._control.resume()
        self._owed = self._closed = False

    def open_unwritten(self, statuses: Sequence[RankStatus]) -> None:
        """The same where nothing was written: an engine that fell asleep resumes as it wakes."""
        if asleep(statuses):
            self._owed = self._closed = False
            return
        if self._closed:
            self.require_closed()
        self.open()

    def require_closed(self) -> None:
        """ApplyError(engine) when somebody has resumed the engine since it was paused.

        Requests that were let in have met weights of no version: they are ended.
        """
        if not self._control.is_paused():
            self.close(PauseMode.ABORT)
            raise ApplyError(
                f"somebody resumed {self._name} while its weights were being written:"
                " the requests in it were ended",
                kind=Kind.ENGINE,
                hint="leave pausing and resuming to the driver while it follows",
            )

    def close_again(self, mode: PauseMode) -> None:
        """Pause after a rebuild; requests that were let in meanwhile are ended."""
        self.close(mode if self._control.is_paused() else PauseMode.ABORT)

    def yield_to_owner(self) -> None:
        """Forget somebody else's pause when they have ended it."""
        self.theirs = self.theirs and self._control.is_paused()

    def open_by_hand(self) -> None:
        """Resume for whoever paused. ApplyError(engine) while the engine sleeps."""
        if asleep(self._control.status()):
            raise ApplyError(
                f"{self._name} sleeps: its memory is not there",
                kind=Kind.ENGINE,
                hint="wake it up: that resumes it",
            )
        self.theirs = False
        self.open()
