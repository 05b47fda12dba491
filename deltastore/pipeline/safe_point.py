"""An engine that is resumed while one rank holds other weights answers for no version: never here.

Drives one engine (`engine_control.py`) from version to version. Staging goes on in the engine's
workers; a turn of the driver finds a staged version and, when it is due,
  pauses (requests in flight by policy, caches cleared) -> writes -> asks every rank where it is
  -> resets prefix and connector caches -> resumes.
Whatever fails, every rank is asked again. All clean and agreed on the version before: the engine
resumes there, and the activation is tried again later. Anything else, the answer "unknown" and a
cache that does not reset included, *holds* the engine: it stays paused, its health says so, and
recovery is tried with growing pauses: re-anchor where weights are in doubt, reset, resume. After
`hold_max_s` requests that still wait are ended.

A crash of this process after the pause leaves the engine paused: the next driver asks every rank,
empties the caches and resumes it, or re-anchors it.
"""

from __future__ import annotations

import logging
import random
import threading
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from deltastore.errors import ApplyError, DeltastoreError, Kind
from deltastore.events import (
    ActivationFailed,
    EngineHeld,
    EngineReleased,
    SafePointPassed,
    discard,
)
from deltastore.pipeline.engine_control import NEWEST, PauseMode, agreed, doubt
from deltastore.pipeline.safe_point_view import SafePointSettings, SafePointView, Turn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deltastore.clock import Clock
    from deltastore.events import EventSink
    from deltastore.pipeline.engine_control import EngineControl, RankStatus, ServedVersion

__all__ = ["SafePointDriver", "SafePointSettings", "SafePointView", "Turn"]
_LOG = logging.getLogger(__name__)


class SafePointDriver:
    """Follows one engine from safe point to safe point. Thread-safe: turns exclude each other.

    Args:
        control: of the engine; every call of it is bounded.
        name: the engine's, for events.
        seed: of the jitter; None takes the system's.
    """

    def __init__(
        self,
        control: EngineControl,
        clock: Clock,
        *,
        name: str,
        settings: SafePointSettings | None = None,
        sink: EventSink = discard,
        seed: int | None = None,
    ) -> None:
        self.name = name
        self._control = control
        self._clock = clock
        self._settings = settings or SafePointSettings()
        self._sink = sink
        self._jitter = random.Random(seed)  # spreads pauses, protects nothing
        self._turning = threading.Lock()
        self._view = SafePointView()
        self._error: DeltastoreError | None = None
        self._started = False
        self._failing = False
        self._paused = False
        self._cut = False
        self._due_s: float | None = None
        self._passed_s = float("-inf")
        self._held_s = 0.0
        self._next_s = float("-inf")
        self._retry_s = 0.0

    def view(self) -> SafePointView:
        """Where the engine is now; does not wait for a turn."""
        return self._view

    @property
    def error(self) -> DeltastoreError | None:
        """What failed last, until something succeeds."""
        return self._error

    def run(self, stopping: threading.Event) -> None:
        """Turn until told to stop. A turn in progress is finished: it ends resumed, or held."""
        while not stopping.is_set():
            self.turn()
            self._clock.wait(stopping, self._settings.look_s)

    def turn(self) -> Turn:
        """Do what is due now. What fails is in `view()` and `error`, never raised."""
        with self._turning:
            self._end_waiting()
            if self._clock.monotonic_s() < self._next_s:
                return Turn.HELD if self._view.held else Turn.NOTHING
            try:
                return self._recover() if self._view.held else self._look()
            except DeltastoreError as err:
                self._note(err)
                return Turn.HELD if self._view.held else Turn.FAILED

    def resume(self) -> None:
        """Let forward passes in on behalf of whoever paused the engine.

        Waits for a turn in progress. Raises ApplyError(poisoned) when the engine is held.
        """
        with self._turning:
            if self._view.held:
                raise ApplyError(
                    f"{self.name} is held: {self._view.held}",
                    kind=Kind.POISONED,
                    hint="it resumes by itself when its weights are proved again",
                )
            self._control.resume()

    def _look(self) -> Turn:
        """See where the ranks are; activate what is due."""
        starting = not self._started
        if starting:
            self._initialise()
        statuses = self._control.status()
        if all(one.active is None and not one.poisoned for one in statuses):
            starting = True  # its workers were started again
            self._initialise()
            statuses = self._control.status()
        served = agreed(statuses)
        if served is None:
            # Found outside a pause: what such weights have answered shall not go on.
            self._hold(doubt(statuses), PauseMode.ABORT)
            return Turn.HELD
        if not self._failing:
            self._succeed()
        self._see(statuses, served)
        if starting:
            self._begin()
            return Turn.NOTHING
        return self._pass(served) if self._is_due(statuses, served) else Turn.NOTHING

    def _initialise(self) -> None:
        """Let ranks find their version; held when one broke off while it wrote another."""
        try:
            self._control.initialise()
        except DeltastoreError:
            statuses = self._control.status()
            if any(one.poisoned for one in statuses):
                self._hold(doubt(statuses), PauseMode.ABORT)
            raise

    def _begin(self) -> None:
        """Make a known state: ranks may have rebuilt themselves, a killed driver left a pause."""
        self._started = True
        try:
            self._pause(PauseMode.KEEP)
            self._reset()
            self._resume()
        except DeltastoreError as err:
            self._hold(f"it follows, but is not ready to serve: {err.message}", None)
            raise

    def _is_due(self, statuses: Sequence[RankStatus], served: ServedVersion) -> bool:
        targets = {one.staged for one in statuses}
        if not any(target is not None and target > served.version for target in targets):
            self._due_s = None
            return False
        now_s = self._clock.monotonic_s()
        if self._due_s is None:
            soonest_s = max(now_s, self._passed_s + self._settings.min_interval_s)
            self._due_s = soonest_s + self._jitter.uniform(0, self._settings.jitter_s)
        return now_s >= self._due_s + (self._settings.settle_s if len(targets) > 1 else 0)

    def _pass(self, base: ServedVersion) -> Turn:
        """Activate what is staged; `base` is what the engine serves."""
        seconds = dict.fromkeys(("pause_s", "write_s", "reset_s", "resume_s"), 0.0)
        self._passed_s, self._due_s = self._clock.monotonic_s(), None
        try:
            with self._timed(seconds, "pause_s"):
                self._pause(self._settings.mode)
            with self._timed(seconds, "write_s"):
                self._control.update(NEWEST)
                served = self._proved()
                if served == base:
                    raise _nothing_came(base)
            with self._timed(seconds, "reset_s"):
                self._reset()
            with self._timed(seconds, "resume_s"):
                self._resume()
        except DeltastoreError as err:
            return self._settle(base, err)
        mode = self._settings.mode.value
        passed = SafePointPassed(
            self.name, base.version, served.version, served.policy_hash, mode, **seconds
        )
        self._succeed()
        self._view = replace(self._view, served=served, staged=None, passed=passed)
        self._sink(passed)
        return Turn.ACTIVATED

    def _settle(self, base: ServedVersion, err: DeltastoreError) -> Turn:
        """After a failure: resume where every rank is proved to be at `base`, else hold."""
        self._failing = True
        target = self._view.staged if err.version is None else err.version
        failed = ActivationFailed(self.name, target or base.version, err.kind.value, err.message)
        self._sink(failed)
        _LOG.warning("activation of version %s on %s failed: %s", target, self.name, err)
        try:
            statuses = self._control.status()
            why = doubt(statuses)
            if not why and agreed(statuses) == base:
                self._resume()
                self._note(err)
                return Turn.FAILED
        except DeltastoreError as unknown:
            why = f"after a failed activation its state is unknown: {unknown.message}"
        self._hold(why or f"it is written, but not ready to serve: {err.message}", None)
        self._note(err)
        return Turn.HELD

    def _hold(self, why: str, mode: PauseMode | None) -> None:
        """Take the engine out of rotation. `mode`: of a pause that is still to be made."""
        _LOG.error("%s is held: %s", self.name, why)
        self._view = replace(self._view, held=why)
        self._held_s = self._clock.monotonic_s()
        self._cut = False
        self._sink(EngineHeld(self.name, self._served_version(), why))
        if mode is not None:
            self._pause(mode)

    def _recover(self) -> Turn:
        """Bring a held engine back: weights proved, caches empty, then resumed."""
        statuses = self._control.status()
        if doubt(statuses):
            if not self._paused:
                self._pause(self._holding_mode())
            if any(one.active is None for one in statuses):
                self._control.initialise()  # which rebuilds what no version can be
            else:
                self._control.re_anchor()
        self._pause(self._holding_mode())  # whoever rebuilt the weights may have let requests in
        served = self._proved()
        self._reset()
        self._resume()
        held_s = self._clock.monotonic_s() - self._held_s
        self._succeed()
        self._view = replace(self._view, served=served, staged=None, held="")
        self._sink(EngineReleased(self.name, served.version, served.policy_hash, held_s))
        _LOG.warning("%s serves again, at version %d", self.name, served.version)
        return Turn.RECOVERED

    def _end_waiting(self) -> None:
        """End requests that have waited too long for a held engine, once."""
        waited_s = self._clock.monotonic_s() - self._held_s
        if not self._view.held or self._cut or waited_s < self._settings.hold_max_s:
            return
        try:
            self._pause(PauseMode.ABORT)
            self._cut = True
        except DeltastoreError as err:
            _LOG.warning("requests on %s could not be ended: %s", self.name, err)

    def _holding_mode(self) -> PauseMode:
        """Nothing may finish on weights in doubt, so `wait` is none for a held engine."""
        return PauseMode.KEEP if self._settings.mode is PauseMode.WAIT else self._settings.mode

    def _pause(self, mode: PauseMode) -> None:
        self._control.pause(mode)
        self._paused = True

    def _resume(self) -> None:
        self._control.resume()
        self._paused = False

    def _proved(self) -> ServedVersion:
        """Where all ranks are; ApplyError(poisoned) when they do not agree."""
        statuses = self._control.status()
        served = agreed(statuses)
        if served is None:
            raise ApplyError(doubt(statuses), kind=Kind.POISONED, hint="re-anchor")
        return served

    def _reset(self) -> None:
        """Caches hold what other weights computed: not empty is not active (CASE R7)."""
        for attempt in range(self._settings.reset_attempts):
            if attempt:
                self._clock.sleep_s(self._settings.reset_retry_s)
            if self._control.reset_caches():
                return
        raise ApplyError(
            f"caches of {self.name} could not be reset {self._settings.reset_attempts} times",
            kind=Kind.CACHE_RESET,
            hint="an external connector may still hold blocks; see the engine's log",
        )

    def _see(self, statuses: Sequence[RankStatus], served: ServedVersion) -> None:
        troubles = dict.fromkeys(one.trouble for one in statuses if one.trouble)
        self._view = replace(
            self._view,
            served=served,
            ranks=tuple(statuses),
            staged=max((one.staged for one in statuses if one.staged is not None), default=None),
            head=max((one.head for one in statuses if one.head is not None), default=None),
            trouble="; ".join(troubles) or ("" if self._error is None else _told(self._error)),
        )

    def _note(self, err: DeltastoreError) -> None:
        """Remember a failure, and wait longer after each."""
        settings = self._settings
        self._error = err
        self._view = replace(self._view, trouble=_told(err))
        self._retry_s = min(max(2 * self._retry_s, settings.retry_min_s), settings.retry_max_s)
        self._next_s = self._clock.monotonic_s() + self._retry_s

    def _succeed(self) -> None:
        self._error, self._failing = None, False
        self._retry_s, self._next_s = 0.0, float("-inf")
        self._view = replace(self._view, trouble="")

    def _served_version(self) -> int:
        served = self._view.served
        return -1 if served is None else served.version

    @contextmanager
    def _timed(self, seconds: dict[str, float], stage: str) -> Iterator[None]:
        started_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            seconds[stage] = self._clock.monotonic_s() - started_s


def _told(err: DeltastoreError) -> str:
    """Kind, message and way out, for people."""
    return f"{err.kind.value}: {err}"


def _nothing_came(base: ServedVersion) -> ApplyError:
    return ApplyError(
        f"the engine took an update and is still at version {base.version}",
        kind=Kind.NOT_STAGED,
        hint="the ranks' status and what they have staged contradict each other: see their log",
    )
