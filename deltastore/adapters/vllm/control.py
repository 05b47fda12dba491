"""An engine is paused from a thread of its own: from its event loop it would wait for itself.

`AsyncControl` drives an `AsyncLLM` (the API server's engine too) from a thread, through its event
loop, every call with a limit; `LLMControl` drives an `LLM` from the thread that uses it, where
between two calls of `generate` nothing is in flight. Import vLLM's classes only for types: which
release is installed is looked at in `versions.py`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from deltastore.adapters.vllm.verbs import OutsideVerbs, RankVerbs, engine_error, engine_timeout
from deltastore.errors import ApplyError, InvalidInputError, Kind
from deltastore.pipeline.engine_control import NEWEST, EngineControl, PauseMode

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from deltastore.pipeline.engine_control import ControlBounds, Wanted

    T = TypeVar("T")

__all__ = ["AsyncControl", "EngineControl", "LLMControl"]


class AsyncControl(OutsideVerbs):
    """An EngineControl over an `AsyncLLM`. Call it from any thread but the event loop's own.

    Args:
        engine: the AsyncLLM, or an API server's engine client.
        loop: the event loop that the engine works in.
        init_info: settings that override those of the engine's `additional_config`.
    """

    def __init__(
        self,
        engine: Any,
        loop: asyncio.AbstractEventLoop,
        *,
        init_info: Mapping[str, Any] | None = None,
        bounds: ControlBounds | None = None,
    ) -> None:
        super().__init__(init_info, bounds)
        self._engine = engine
        self._loop = loop

    def call_ranks(self, method: str, within_s: float, **arguments: Any) -> list[Any]:
        """Call a worker method on every rank of every engine core; every rank's answer."""
        answers = self._wait(
            method,
            lambda: self._every_core("collective_rpc", method, None, (), arguments),
            within_s,
        )
        return [answer for core in answers for answer in core or ()]

    def update(self, wanted: Wanted) -> None:
        """Bring every rank of every engine core to one staged version, or leave all where they are.

        Each core would take its own newest, and a version may come between the looks of two: with
        several of them "newest" is what the foremost has staged: to the others, which have the same
        stager, it is offered already.
        """
        if wanted == NEWEST and self._cores() > 1:
            staged = [one.staged for one in self.status() if one.staged is not None]
            wanted = max(staged, default=wanted)
        super().update(wanted)

    def name_version(self, text: str) -> None:
        """Have the engine say `text` as the weight version of what it generates from now on."""
        self._wait(
            "update_weight_version",
            lambda: self._engine.update_weight_version(text),
            self.bounds.status_s,
        )

    def is_paused(self) -> bool:
        """Whether forward passes are kept out of every engine core."""
        return all(self._wait("is_paused", self._paused_cores, self.bounds.status_s))

    def reset_caches(self) -> bool:
        """Drop prefix caches and external connectors' caches of every engine core."""
        done = self._wait(
            "reset_prefix_cache",
            # Not of running requests: none runs, and one that cannot be stopped must not raise.
            lambda: self._every_core("reset_prefix_cache", False, True),
            self.bounds.reset_s,
        )
        return all(done)

    def resume(self) -> None:
        """Let forward passes in again."""
        self._wait("resume", lambda: self._engine.resume_generation(), self.bounds.resume_s)

    def _pause(self, mode: PauseMode, within_s: float) -> None:
        self._wait(
            f"pause({mode.value})",
            lambda: self._engine.pause_generation(mode=mode.value, clear_cache=True),
            within_s,
        )

    def _cores(self) -> int:
        """How many engine cores there are; 0 where the client does not say."""
        return len(getattr(self._engine.engine_core, "core_engines", ()))

    async def _paused_cores(self) -> list[Any]:
        client = self._engine.engine_core
        if self._cores() > 1:
            return list(await client.call_utility_all_async("is_scheduler_paused"))
        return [await self._engine.is_paused()]

    async def _every_core(self, utility: str, *arguments: Any) -> list[Any]:
        """One answer per engine core: the engine's own calls drop all but the first."""
        client = self._engine.engine_core
        if self._cores() > 1:
            return list(await client.call_utility_all_async(utility, *arguments))
        return [await getattr(self._engine, utility)(*arguments)]

    def _wait(self, what: str, begin: Callable[[], Coroutine[Any, Any, T]], within_s: float) -> T:
        """Run a coroutine in the engine's loop, at most that long."""
        if _running_loop() is self._loop:
            raise InvalidInputError(
                f"{what} was called in the engine's own event loop, which it would block",
                kind=Kind.SETTING,
                hint="run the driver in a thread: threading.Thread(target=driver.run, ...)",
            )
        work = begin()
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as err:  # the loop is closed
            work.close()
            raise engine_error(what, err) from err
        try:
            return future.result(within_s)
        except concurrent.futures.TimeoutError as err:
            future.cancel()
            raise engine_timeout(what, within_s) from err
        except (Exception, concurrent.futures.CancelledError) as err:
            raise engine_error(what, err) from err


class LLMControl(RankVerbs):
    """An EngineControl over an `LLM`, for the thread that uses it.

    With the engine core in this process nothing runs between two calls, and `wait` has nobody to
    wait for: it is refused while requests are unfinished. There, calls are **not bounded**: they do
    the engine's own work, which nobody can leave behind half done. Only those of its workers in
    other processes have vLLM's own limit. With the core in another process every call is bounded.
    """

    def __init__(
        self,
        llm: Any,
        *,
        init_info: Mapping[str, Any] | None = None,
        bounds: ControlBounds | None = None,
    ) -> None:
        super().__init__(init_info, bounds)
        self._llm = llm

    def call_ranks(self, method: str, within_s: float, **arguments: Any) -> list[Any]:
        """Call a worker method on every rank; every rank's answer."""
        return list(
            self._call(
                method,
                lambda: self._llm.llm_engine.collective_rpc(method, within_s, (), arguments),
                within_s,
            )
        )

    def name_version(self, text: str) -> None:
        """Have the engine say `text` as the weight version of what it generates from now on."""
        self._call(
            "update_weight_version",
            lambda: self._llm.update_weight_version(text),
            self.bounds.status_s,
        )

    def pause(self, mode: PauseMode) -> None:
        """Keep forward passes out and clear caches."""
        core = self._llm.llm_engine.engine_core
        in_process = getattr(core, "engine_core", None)
        if in_process is None:
            self._call(
                f"pause({mode.value})",
                lambda: core.call_utility("pause_scheduler", mode.value, True),
                self.bounds.pause_s,
            )
            return
        if mode is PauseMode.WAIT:
            if self._llm.llm_engine.has_unfinished_requests():
                raise ApplyError(
                    "an LLM that runs in this process cannot finish requests while it pauses",
                    kind=Kind.ENGINE,
                    hint="step it until they are finished, or use another policy",
                )
            mode = PauseMode.KEEP
        self._call(
            f"pause({mode.value})",
            lambda: in_process.pause_scheduler(mode.value, True),
            self.bounds.pause_s,
        )

    def is_paused(self) -> bool:
        """Whether forward passes are kept out."""
        core = self._llm.llm_engine.engine_core
        in_process = getattr(core, "engine_core", None)
        ask = (
            (lambda: core.call_utility("is_scheduler_paused"))
            if in_process is None
            else in_process.is_scheduler_paused
        )
        return bool(self._call("is_paused", ask, self.bounds.status_s))

    def reset_caches(self) -> bool:
        """Drop the prefix cache and the external connector's."""
        return bool(
            self._call(
                "reset_prefix_cache",
                lambda: self._llm.reset_prefix_cache(False, True),
                self.bounds.reset_s,
            )
        )

    def resume(self) -> None:
        """Let forward passes in again."""
        core = self._llm.llm_engine.engine_core
        in_process = getattr(core, "engine_core", None)
        ask = (
            (lambda: core.call_utility("resume_scheduler"))
            if in_process is None
            else in_process.resume_scheduler
        )
        self._call("resume", ask, self.bounds.resume_s)

    def _call(self, what: str, call: Callable[[], T], within_s: float) -> T:
        """A call, at most that long where the core is another process."""
        in_process = getattr(self._llm.llm_engine.engine_core, "engine_core", None) is not None
        try:
            return call() if in_process else _bounded(call, within_s)
        except TimeoutError as err:
            raise engine_timeout(what, within_s) from err
        except Exception as err:
            raise engine_error(what, err) from err


def _bounded(call: Callable[[], T], within_s: float) -> T:
    """The same from a thread that is left behind when it does not return: TimeoutError.

    The client of a core in another process has sent its request by then, and only waits.
    """
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as err:  # noqa: BLE001 - raised by whoever waits
            answer.set_exception(err)

    threading.Thread(target=run, name="deltastore-engine-call", daemon=True).start()
    return answer.result(within_s)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
