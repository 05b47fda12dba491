"""Three ways to reach an engine must not become three meanings of "update": the verbs are here.

What every control of a vLLM engine does in the same way, over one primitive: call a method on every
worker rank and get every rank's answer. Imports nothing of vLLM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from deltastore.errors import ApplyError, DeltastoreError, Kind
from deltastore.pipeline.engine_control import ControlBounds, PauseMode, RankStatus, agreed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltastore.pipeline.engine_control import Wanted

ALREADY_ACTIVE = "already active"
"""What vLLM says when an update was begun and never ended: its caller had died."""


class RankVerbs(ABC):
    """The verbs that are calls of every rank.

    Args:
        init_info: settings that override those of the engine's `additional_config`.
        bounds: the longest that calls may take.
    """

    def __init__(
        self,
        init_info: Mapping[str, Any] | None = None,
        bounds: ControlBounds | None = None,
    ) -> None:
        self._init_info = dict(init_info or {})
        self.bounds = bounds or ControlBounds()

    @abstractmethod
    def call_ranks(self, method: str, within_s: float, **arguments: Any) -> list[Any]:
        """Call a worker method on every rank; every rank's answer, in rank order.

        Raises ApplyError: `engine` when one failed, `engine_timeout` when one did not answer.
        """

    @abstractmethod
    def name_version(self, text: str) -> None:
        """Have the engine say `text` as the weight version of what it generates from now on."""

    def initialise(self) -> None:
        """Let every rank find the version that it is at, and begin to stage. Idempotent."""
        self.call_ranks(
            "init_weight_transfer_engine", self.bounds.initialise_s, init_info=self._init_info
        )
        self._name_served()

    def status(self) -> list[RankStatus]:
        """What every rank says of itself, at least one."""
        answers = self.call_ranks("deltastore_status", self.bounds.status_s)
        if not answers:
            raise ApplyError("the engine has no ranks", kind=Kind.ENGINE)
        return [RankStatus.parse(answer) for answer in answers]

    def update(self, wanted: Wanted) -> None:
        """Bring every rank to a staged version, or leave every rank at the one it has."""
        self._start()
        self.call_ranks("update_weights", self.bounds.update_s, update_info={"version": wanted})
        self.call_ranks("finish_weight_update", self.bounds.update_s)
        self._name_served()

    def re_anchor(self) -> None:
        """Have every rank write the newest version whole, from the bucket. Only while paused."""
        self.call_ranks("deltastore_re_anchor", self.bounds.re_anchor_s)
        self._name_served()

    def _start(self) -> None:
        try:
            self.call_ranks("start_weight_update", self.bounds.update_s)
        except ApplyError as err:
            if ALREADY_ACTIVE not in err.message:
                raise
            self.call_ranks("finish_weight_update", self.bounds.update_s)
            self.call_ranks("start_weight_update", self.bounds.update_s)

    def _name_served(self) -> None:
        """The engine's own label follows what the ranks have proved, never what was asked for."""
        served = agreed(self.status())
        if served is not None:
            self.name_version(str(served))


class OutsideVerbs(RankVerbs):
    """The verbs of an engine that goes on by itself while it is asked: it can drain, for a time."""

    def pause(self, mode: PauseMode) -> None:
        """Keep forward passes out and clear caches; `wait` is `keep` after `drain_max_s`."""
        if mode is PauseMode.WAIT:
            try:
                self._pause(mode, self.bounds.drain_max_s)
            except ApplyError as err:
                if err.kind is not Kind.ENGINE_TIMEOUT:
                    raise
            else:
                return
        self._pause(PauseMode.KEEP if mode is PauseMode.WAIT else mode, self.bounds.pause_s)

    @abstractmethod
    def _pause(self, mode: PauseMode, within_s: float) -> None:
        """Ask for it once. Raises ApplyError: `engine_timeout` when it is not paused by then."""


def engine_error(what: str, err: BaseException) -> DeltastoreError:
    """What an engine raised, as an error of this library."""
    if isinstance(err, DeltastoreError):
        return err
    text = " ".join(str(err).split())[:1000]
    return ApplyError(
        f"{what} failed in the engine: {type(err).__name__}: {text}",
        kind=Kind.ENGINE,
        hint="see the engine's log",
    )


def engine_timeout(what: str, within_s: float) -> ApplyError:
    """An engine that did not answer."""
    return ApplyError(
        f"the engine did not answer {what} within {within_s:g} s",
        kind=Kind.ENGINE_TIMEOUT,
        hint="see the engine's log; what it did is found out by asking for its status",
    )
