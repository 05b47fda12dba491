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

An engine finds its version while it is paused, too: it may have to write one. While an engine
sleeps, or is paused by somebody else, it is left alone, and it is never resumed for them. A resume
by somebody else during a write cannot be prevented everywhere; it is noticed before the own resume,
and ends the requests that it let in.

A crash of this process after the pause leaves the engine paused: the next driver asks every rank,
empties the caches and resumes it, or re-anchors it. So a pause found at its start counts as such.
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
    ActorJoined,
    EngineHeld,
    EngineReleased,
    SafePointPassed,
    discard,
)
from deltastore.pipeline.engine_control import (
    NEWEST,
    PauseMode,
    agreed,
    doubt,
    unfollowed,
)
from deltastore.pipeline.engine_gate import EngineGate
from deltastore.pipeline.safe_point_view import (
    SafePointSettings,
    SafePointView,
    Turn,
    nothing_came,
    told,
)

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
        self._gate = EngineGate(control, name)
        self._clock = clock
        self._settings = settings or SafePointSettings()
        self._sink = sink
        self._jitter = random.Random(seed)  # spreads pauses, protects nothing
        self._turning = threading.Lock()
        self._view = SafePointView()
        self._error: DeltastoreError | None = None
        self._started = False
        self._failing = False
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

        Waits for a turn in progress. Raises ApplyError: `poisoned` when the engine is held,
        `engine` when it sleeps.
        """
        with self._turning:
            if self._view.held:
                raise ApplyError(
                    f"{self.name} is held: {self._view.held}",
                    kind=Kind.POISONED,
                    hint="it resumes by itself when its weights are proved again",
                )
            self._gate.open_by_hand()

    def _look(self) -> Turn:
        """See where the ranks are; activate what is due."""
        statuses = self._gate.look()
        served = agreed(statuses)
        if self._gate.asleep:
            return self._leave_alone("the engine sleeps")
        if served is None and not unfollowed(statuses):
            # Found outside a pause: what such weights have answered shall not go on.
            self._hold(doubt(statuses), PauseMode.ABORT)
            return Turn.HELD
        if served is not None and self._started:
            if not self._failing:
                self._succeed()
            self._see(statuses, served)
        if self._gate.theirs:
            return self._leave_alone("somebody else has paused the engine")
        if served is None or not self._started:
            return self._start()  # perhaps again: its workers were started again
        return self._pass(served) if self._is_due(statuses, served) else Turn.NOTHING

    def _leave_alone(self, why: str) -> Turn:
        self._due_s = None
        self._view = replace(self._view, trouble=f"{why}: nothing is written until that is over")
        return Turn.NOTHING

    def _start(self) -> Turn:
        """Have the ranks find their version; they may write another, so nothing runs meanwhile."""
        self._started = False
        started_s = self._clock.monotonic_s()
        try:
            self._gate.close(PauseMode.KEEP)
            self._control.initialise()
            statuses = self._gate.look_again()
            served = _agreed_or_raise(statuses)
            self._reset()
            self._gate.open()
        except DeltastoreError as err:
            why = self._end_start(err)
            if why:
                self._hold(why, None)
            raise
        self._started = True
        self._succeed()
        self._see(statuses, served)
        seconds = self._clock.monotonic_s() - started_s
        self._sink(ActorJoined(self.name, served.version, "engine", 0, seconds))
        return Turn.NOTHING

    def _end_start(self, err: DeltastoreError) -> str:
        """After a failed start: resume what the engine loaded; else why it must be held."""
        try:
            statuses = self._control.status()
            if not unfollowed(statuses):
                return doubt(statuses) or f"it follows, but is not ready to serve: {err.message}"
            self._gate.open_unwritten(statuses)
        except DeltastoreError as unknown:
            return f"after a failed start its state is unknown: {unknown.message}"
        return ""

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
                self._gate.close(self._settings.mode)
            with self._timed(seconds, "write_s"):
                self._control.update(NEWEST)
                served = self._proved()
                if served == base:
                    raise nothing_came(base)
            with self._timed(seconds, "reset_s"):
                self._reset()
            with self._timed(seconds, "resume_s"):
                self._gate.open()
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
                self._gate.open_unwritten(statuses)
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
            self._gate.close(mode)

    def _recover(self) -> Turn:
        """Bring a held engine back: weights proved, caches empty, then resumed."""
        statuses = self._gate.look_again()
        if self._gate.asleep:
            return Turn.HELD
        self._gate.yield_to_owner()
        self._gate.close(self._holding_mode())  # again: somebody may have resumed it meanwhile
        if unfollowed(statuses):  # a start of which nothing was known wrote nothing
            self._release(None)
            return Turn.RECOVERED
        if doubt(statuses):
            if any(one.active is None for one in statuses):
                self._control.initialise()  # which rebuilds what no version can be
            else:
                self._control.re_anchor()
            self._gate.close_again(self._holding_mode())  # the rebuild may have let requests in
        served = self._proved()
        self._reset()
        self._started = True
        self._release(served)
        return Turn.RECOVERED

    def _release(self, served: ServedVersion | None) -> None:
        """Back into rotation, at a version, or at what the engine has loaded."""
        self._gate.open()
        held_s = self._clock.monotonic_s() - self._held_s
        self._succeed()
        self._view = replace(self._view, served=served, staged=None, held="")
        version, policy_hash = (-1, "") if served is None else (served.version, served.policy_hash)
        self._sink(EngineReleased(self.name, version, policy_hash, held_s))
        _LOG.warning("%s serves again, at %s", self.name, served or "what it has loaded")

    def _end_waiting(self) -> None:
        """End requests that have waited too long for a held engine, once."""
        waited_s = self._clock.monotonic_s() - self._held_s
        if not self._view.held or self._cut or self._gate.asleep:
            return
        if waited_s < self._settings.hold_max_s:
            return
        try:
            self._gate.close(PauseMode.ABORT)
            self._cut = True
        except DeltastoreError as err:
            _LOG.warning("requests on %s could not be ended: %s", self.name, err)

    def _holding_mode(self) -> PauseMode:
        """Nothing may finish on weights in doubt, so `wait` is none for a held engine."""
        return PauseMode.KEEP if self._settings.mode is PauseMode.WAIT else self._settings.mode

    def _proved(self) -> ServedVersion:
        """Where all ranks are; ApplyError(poisoned) when they do not agree."""
        return _agreed_or_raise(self._control.status())

    def _reset(self) -> None:
        """Caches hold what other weights computed: not empty is not active (CASE R7)."""
        for attempt in range(self._settings.reset_attempts):
            if attempt:
                self._clock.sleep_s(self._settings.reset_retry_s)
            if self._control.reset_caches():
                self._gate.require_closed()  # else they are empty no longer
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
            trouble="; ".join(troubles) or ("" if self._error is None else told(self._error)),
        )

    def _note(self, err: DeltastoreError) -> None:
        """Remember a failure, and wait longer after each."""
        settings = self._settings
        self._error = err
        self._view = replace(self._view, trouble=told(err))
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


def _agreed_or_raise(statuses: Sequence[RankStatus]) -> ServedVersion:
    served = agreed(statuses)
    if served is None:
        raise ApplyError(doubt(statuses), kind=Kind.POISONED, hint="re-anchor")
    return served
