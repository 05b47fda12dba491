"""A trainer that dies with Redis loses its optimizer: it waits, up to a limit that it states.

An outage is Redis that does not answer or is out of memory (`coordination/outage.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from deltastore.coordination.outage import is_outage
from deltastore.errors import CoordinationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.clock import Clock

_T = TypeVar("_T")
RETRY_S = 0.5


class Steady:
    """Calls into coordination that survive an outage of at most `outage_max_s`.

    Args:
        outage_max_s: how long Redis may be away, over all calls, before it is an error.
    """

    def __init__(self, clock: Clock, outage_max_s: float) -> None:
        self._clock = clock
        self._outage_max_s = outage_max_s
        self._away_since_s: float | None = None

    def attempt(self, call: Callable[[], _T]) -> _T | None:
        """Call once; while Redis is away wait a little and return None.

        Raises the CoordinationError of the outage when it has lasted for too long.
        """
        answers = self._answers(call)
        return answers[0] if answers else None

    def insist(self, call: Callable[[], _T]) -> _T:
        """Call until there is an answer, within the same limit."""
        while True:
            answers = self._answers(call)
            if answers:
                return answers[0]

    def _answers(self, call: Callable[[], _T]) -> list[_T]:
        try:
            answer = call()
        except CoordinationError as err:
            if not is_outage(err):
                raise
            self._wait_or_give_up(err)
            return []
        self._away_since_s = None
        return [answer]

    def _wait_or_give_up(self, err: CoordinationError) -> None:
        now_s = self._clock.monotonic_s()
        if self._away_since_s is None:
            self._away_since_s = now_s
        if now_s - self._away_since_s > self._outage_max_s:
            raise CoordinationError(
                f"Redis has been away for {self._outage_max_s:.0f} s: {err.message}",
                kind=err.kind,
                hint="cure Redis, then start this trainer again: it resumes at the last version",
            ) from err
        self._clock.sleep_s(RETRY_S)
