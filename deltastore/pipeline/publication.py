"""A publish that blocks the optimizer wastes the step; one that is forgotten hides its failure.

The handle of one version on its way: the optimizer may step after `wait_captured`, the version
exists after `result` has returned.
"""

from __future__ import annotations

import operator
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING

from deltastore.errors import InvalidInputError, Kind, StorageError
from deltastore.format.canonical import MAX_JSON_INTEGER

if TYPE_CHECKING:
    from deltastore.format.manifest import VersionManifest


def check_step(step: int) -> int:
    """The optimizer step as a plain int of 53 bits; InvalidInputError(setting) on anything else."""
    try:
        plain = operator.index(step)  # numpy's and torch's integers are welcome
    except TypeError as err:
        raise InvalidInputError(
            f"step {step!r} is no whole number", kind=Kind.SETTING, hint="count optimizer steps"
        ) from err
    if not 0 <= plain <= MAX_JSON_INTEGER:
        raise InvalidInputError(
            f"step {plain} is not allowed",
            kind=Kind.SETTING,
            hint=f"count optimizer steps from 0 to {MAX_JSON_INTEGER}",
        )
    return plain


class Publication:
    """One version on its way. Thread-safe.

    Args:
        step_last: the optimizer step that the weights are after.
    """

    def __init__(self, step_last: int) -> None:
        self.step_first = step_last
        self.step_last = step_last
        self.captured = threading.Event()
        self.future: Future[VersionManifest] = Future()

    def cover_after(self, step: int) -> None:
        """Its first step is the one after `step`, which the version before it ends with."""
        self.step_first = min(step + 1, self.step_last)

    def wait_captured(self, timeout_s: float) -> None:
        """Wait until the source has been read: from then on the weights may change.

        Raises what went wrong if reading failed, StorageError(timeout) when time is up.
        """
        if not self.captured.wait(timeout_s):
            raise StorageError(
                f"the weights were not read within {timeout_s} s",
                kind=Kind.TIMEOUT,
                hint="raise the timeout, or lower spool_max_bytes' pressure: the store is slow",
            )
        if self.future.done():
            self.future.result()

    def result(self, timeout_s: float) -> VersionManifest:
        """The committed manifest; raises what kept it from being committed.

        StorageError(timeout) when time is up: the version may still come to exist.
        """
        try:
            return self.future.result(timeout_s)
        except FutureTimeoutError as err:
            raise StorageError(
                f"the version was not committed within {timeout_s} s",
                kind=Kind.TIMEOUT,
                hint="it is still on its way: ask again",
            ) from err

    def done(self) -> bool:
        """Whether it has been committed or has failed."""
        return self.future.done()
