"""At a safe point nothing else runs: on one core of many the pause is as many times as long.

Kernels let go of the interpreter, so threads of this process share the work. All that have begun
have ended before anything is raised, and nothing begins afterwards: nothing is written then.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from deltastore.errors import InvalidInputError, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
R = TypeVar("R")
MAX_THREADS = 8
"""Memory feeds no more of them."""
MIN_WEIGHT = 1 << 15
"""Less work than this per thread costs more to hand over than to do."""


class Threads:
    """The threads of one target, for its host memory: a device shares its work itself, and a
    thread's device and stream are its own. They are started when there is enough work for two.

    Args:
        count: None: one per processor that the calling thread may run on, 8 at most.
    """

    def __init__(self, count: int | None = None) -> None:
        if count is not None and count < 1:
            raise InvalidInputError(f"{count} threads", kind=Kind.SETTING, hint="at least one")
        self.count = min(len(os.sched_getaffinity(0)), MAX_THREADS) if count is None else count
        self._pool: ThreadPoolExecutor | None = None

    def each(
        self, items: Sequence[T], work: Callable[[T], R], weight: Callable[[T], int]
    ) -> list[R]:
        """What `work` returns for each of the items, in their order; without gradients.

        Args:
            weight: how much work an item is: elements.

        Raises what one of them raised, after all have ended.
        """
        shares = self._shares(items, weight)

        def some(share: Sequence[T]) -> list[R]:
            with torch.inference_mode():
                return [work(item) for item in share]

        if len(shares) == 1:
            return some(shares[0])
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count - 1, thread_name_prefix="safe-point")
        futures: list[Future[list[R]]] = []
        try:
            for share in shares[1:]:
                futures.append(Future())
                self._pool.submit(_settle, futures[-1], some, share)
            found = some(shares[0])
        except BaseException:
            # Also a share whose submission failed can be in the pool's queue: it must not begin.
            futures = [future for future in futures if not future.cancel()]
            raise
        finally:
            _wait_for_all(futures)
        return [*found, *(one for future in futures for one in future.result())]

    def _shares(self, items: Sequence[T], weight: Callable[[T], int]) -> list[Sequence[T]]:
        """The items in runs of about equal weight: one per thread, fewer of little work."""
        if self.count == 1 or len(items) < 2:
            return [items]
        weights = [weight(item) for item in items]
        most = min(self.count, max(1, sum(weights) // MIN_WEIGHT))
        each = sum(weights) / most
        shares: list[Sequence[T]] = []
        begin, done = 0, 0
        for end, one in enumerate(weights, start=1):
            done += one
            if len(shares) < most - 1 and done >= each * (len(shares) + 1):
                shares.append(items[begin:end])
                begin = end
        shares.append(items[begin:])
        return shares


def _settle(future: Future[R], work: Callable[[T], R], share: T) -> None:
    """Do a share, unless nobody waits for it any more."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work(share))
    except BaseException as err:  # noqa: BLE001 - it is raised where its result is asked for
        future.set_exception(err)


def _wait_for_all(futures: Sequence[Future[Any]]) -> None:
    """Also when it is interrupted: what still writes would write over what is undone."""
    interrupted: BaseException | None = None
    while True:
        try:
            wait(futures)
            break
        except BaseException as err:  # noqa: BLE001 - raised when all have ended
            interrupted = err
    if interrupted is not None:
        raise interrupted
