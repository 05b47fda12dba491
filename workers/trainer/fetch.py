"""A region that hangs must not stop the trainer: results are fetched beside it, never waited for.

Each region has threads of its own, so one that answers nothing keeps no other waiting. They are
daemons that end when they have nothing to do: a request that hangs outlives neither the trainer's
decision to go on nor the process.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from deltastore.errors import DeltastoreError
from deltastore.storage.store import ByteRange

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltastore.clock import Clock
    from deltastore.coordination.backend import AdmittedResult
    from deltastore.repository.run import Run

    Body: TypeAlias = bytes | None  # None: it cannot be had

FETCH_THREADS = 4  # per region; also the most requests that a dead region can keep hanging
FETCH_MAX_S = 60.0  # the store's own patience is minutes, and a lease to do it again takes less


class ResultFetcher:
    """Fetches claimed objects while the trainer does other things. One thread uses it.

    Args:
        regions: the run in every region, by name: results lie where their actor is.
    """

    def __init__(self, regions: Mapping[str, Run], clock: Clock) -> None:
        self._desks = {name: _Desk(run, clock.monotonic_s()) for name, run in regions.items()}
        self._clock = clock
        self._running: list[_Fetch] = []

    @property
    def job_ids(self) -> set[str]:
        """The jobs whose objects are on their way."""
        return {fetch.admitted.settlement.job_id for fetch in self._running}

    def submit(self, admitted: AdmittedResult) -> None:
        """Fetch what a claim names, no byte more than claimed; an unknown region has nothing."""
        fetch = _Fetch(admitted, self._desks.get(admitted.settlement.region), self._clock)
        self._running.append(fetch)
        if fetch.desk is None:
            fetch.future.set_result(None)
        else:
            fetch.desk.submit(fetch)

    def take(self, within_s: float) -> list[tuple[AdmittedResult, Body]]:
        """What has come, or is given up, after at most `within_s`; the rest stays on its way."""
        done = wait([fetch.future for fetch in self._running], within_s).done
        for fetch in self._running:
            if fetch.desk is not None and fetch.future in done:
                fetch.desk.answered_s = self._clock.monotonic_s()
        ended = [f for f in self._running if f.future in done or self._is_overdue(f)]
        self._running = [fetch for fetch in self._running if fetch not in ended]
        return [(fetch.admitted, fetch.body()) for fetch in ended]

    def forget(self) -> list[AdmittedResult]:
        """Wait for none of what is on its way; what that was."""
        left, self._running = self._running, []
        for fetch in left:
            fetch.give_up()
        return [fetch.admitted for fetch in left]

    def _is_overdue(self, fetch: _Fetch) -> bool:
        """Whether its region has answered nothing for too long: not whether it is far or busy."""
        if fetch.desk is None:
            return False
        since_s = max(fetch.asked_s, fetch.desk.answered_s)
        return self._clock.monotonic_s() - since_s >= FETCH_MAX_S


@dataclass(eq=False)
class _Desk:
    """One region: its bucket, who waits for it, and how many threads ask it."""

    run: Run
    answered_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    waiting: deque[_Fetch] = field(default_factory=deque)
    threads: int = 0

    def submit(self, fetch: _Fetch) -> None:
        with self.lock:
            self.waiting.append(fetch)
            if self.threads >= FETCH_THREADS:
                return
            self.threads += 1
        threading.Thread(target=self._work, name="results", daemon=True).start()

    def drop(self, fetch: _Fetch) -> None:
        with self.lock, suppress(ValueError):  # a thread may have taken it already
            self.waiting.remove(fetch)

    def _work(self) -> None:
        while True:
            with self.lock:
                if not self.waiting:
                    self.threads -= 1
                    return
                fetch = self.waiting.popleft()
            if fetch.future.set_running_or_notify_cancel():
                self._answer(fetch)

    def _answer(self, fetch: _Fetch) -> None:
        try:
            body = self._get(fetch.admitted)
        except BaseException as err:  # noqa: BLE001 - the trainer's thread raises it
            fetch.future.set_exception(err)
        else:
            fetch.future.set_result(body)

    def _get(self, admitted: AdmittedResult) -> Body:
        claim = admitted.settlement
        key = self.run.keys.rollout(claim.version, claim.job_id, claim.token, claim.result_sha256)
        try:
            return self.run.store.get(key, ByteRange(0, claim.result_bytes))
        except DeltastoreError:
            return None  # absent, shorter or unreachable: judged corrupt, and offered again


class _Fetch:
    """One claim's object, on its way."""

    def __init__(self, admitted: AdmittedResult, desk: _Desk | None, clock: Clock) -> None:
        self.admitted = admitted
        self.desk = desk
        self.asked_s = clock.monotonic_s()
        self.future: Future[Body] = Future()

    def body(self) -> Body:
        """What came; None when it is given up before. Raises what is no failure of a store."""
        if self.future.done():
            return self.future.result()
        self.give_up()
        return None

    def give_up(self) -> None:
        """Take it back: a region that hangs for steps on end would gather what nobody wants."""
        if self.future.cancel() and self.desk is not None:
            self.desk.drop(self)
