"""Requests in flight while an AsyncLLM changes versions: what was promised becomes of them."""

from __future__ import annotations

import asyncio
import gc
import threading
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.adapters.vllm.control import AsyncControl
from deltastore.clock import SystemClock
from deltastore.errors import InvalidInputError
from deltastore.events import ActivationFailed, EngineHeld, EngineReleased, SafePointPassed
from deltastore.pipeline.engine_control import ControlBounds, PauseMode
from deltastore.pipeline.safe_point import SafePointDriver, SafePointSettings, Turn
from tests.vllm.kit import tiny_qwen3
from tests.vllm.runs import TinyRun

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

pytestmark = pytest.mark.vllm
PROMPT = (1, 2, 3, 4, 5)
TOKENS = 160
BOUND_S = 30.0


@dataclass
class Served:
    """An AsyncLLM in a loop of its own thread, that follows a run."""

    engine: Any
    loop: asyncio.AbstractEventLoop
    run: TinyRun
    refuse: Path
    events: list[object] = field(default_factory=list)

    def driver(
        self, mode: PauseMode = PauseMode.KEEP, control: AsyncControl | None = None
    ) -> SafePointDriver:
        """A driver that activates at once, past its first turn."""
        settings = SafePointSettings(mode=mode, min_interval_s=0, jitter_s=0, look_s=0.05)
        control = control or AsyncControl(self.engine, self.loop)
        driver = SafePointDriver(
            control, SystemClock(), name="e", settings=settings, sink=self.events.append
        )
        assert driver.turn() is Turn.NOTHING, driver.view()
        self.events.clear()  # of what it took to begin
        return driver

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What a coroutine in the engine's loop returns."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    async def _generate(self, prompt: tuple[int, ...], tokens: int, reached: Any) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=1,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        name = f"r{threading.get_ident()}-{id(reached)}-{len(prompt)}"
        found = None
        async for output in self.engine.generate(
            {"prompt_token_ids": list(prompt)}, sampling, name
        ):
            found = output.outputs[0]
            if len(found.token_ids) >= 10:
                reached.set()
        return found

    def in_flight(self) -> tuple[Any, threading.Event]:
        """A request that has begun; a future of its completion."""
        reached = threading.Event()
        future = asyncio.run_coroutine_threadsafe(
            self._generate(PROMPT, TOKENS, reached), self.loop
        )
        assert reached.wait(BOUND_S)
        return future

    def stage(self) -> int:
        """Publish, and wait until all ranks have it: a fast engine ends requests sooner."""
        version = self.run.publish()
        control = AsyncControl(self.engine, self.loop)
        until(lambda: all(rank.staged == version for rank in control.status()))
        return version

    def complete(self, prompt: tuple[int, ...], tokens: int) -> Any:
        """A whole completion."""
        return self.wait(self._generate(prompt, tokens, threading.Event()))


def turn_until(driver: SafePointDriver, wanted: Turn) -> None:
    """Turn until a turn ends so, within the bound."""
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + BOUND_S
    while (outcome := driver.turn()) is not wanted:
        assert clock.monotonic_s() < deadline_s, (outcome, driver.view())
        clock.sleep_s(0.05)


def until(true: Callable[[], bool]) -> None:
    """Wait until it holds, within the bound."""
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + BOUND_S
    while not true():
        assert clock.monotonic_s() < deadline_s
        clock.sleep_s(0.05)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One engine for all tests here, in processes of its own as AsyncLLM has them."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    folder = tmp_path_factory.mktemp("async")
    run = TinyRun(folder, tiny_qwen3(folder / "model", tied=True))
    arguments = AsyncEngineArgs(
        model=str(run.checkpoint),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        seed=0,
        kv_cache_memory_bytes=32 << 20,
        block_size=32,
        generation_config="vllm",
        disable_log_stats=True,
        kv_transfer_config={
            "kv_connector": "RefusingConnector",
            "kv_connector_module_path": "tests.vllm.refusing_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"refuse": str(folder / "refuse")},
        },
        **run.arguments(),
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> Any:
        return AsyncLLM.from_engine_args(arguments)

    try:
        engine = asyncio.run_coroutine_threadsafe(start(), loop).result(300)
        made = Served(engine, loop, run, folder / "refuse")
        del engine
        try:
            yield made
        finally:
            asyncio.run_coroutine_threadsafe(_end(made.engine), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
        run.close()
    made.engine = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of the engine's own sockets
        gc.collect()


async def _end(engine: Any) -> None:
    engine.shutdown()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def spans(completion: Any) -> list[tuple[str, int, int]]:
    """Which versions a completion's tokens came from."""
    return [(span.version, span.start, span.end) for span in completion.weight_versions]


def test_a_kept_request_goes_on_at_the_new_version(served: Served) -> None:
    """It ends whole, says where it changed, and goes on as from scratch (CASE R7, R18, R20)."""
    driver = served.driver()
    old = driver.view().served
    version = served.stage()
    request = served.in_flight()
    turn_until(driver, Turn.ACTIVATED)
    found = request.result(60)
    (begun, start, cut), (ended, second, end) = spans(found)
    assert (begun, ended) == (str(old), served.run.label(version))
    assert (start, second, end) == (0, cut, TOKENS)
    assert (found.finish_reason, len(found.token_ids)) == ("length", TOKENS)
    assert 10 <= cut < TOKENS
    anew = served.complete((*PROMPT, *found.token_ids[:cut]), TOKENS - cut)
    assert list(anew.token_ids) == list(found.token_ids[cut:])
    assert [
        row[token].logprob for token, row in zip(anew.token_ids, anew.logprobs, strict=True)
    ] == [
        row[token].logprob
        for token, row in zip(found.token_ids[cut:], found.logprobs[cut:], strict=True)
    ]
    (passed,) = served.events
    assert isinstance(passed, SafePointPassed)
    assert passed.version == version
    assert passed.write_s > 0


def test_a_request_that_is_waited_for_ends_at_the_version_it_began_at(served: Served) -> None:
    """Policy wait: nothing is cut, and the update comes after (CASE R18)."""
    driver = served.driver(PauseMode.WAIT)
    old = driver.view().served
    version = served.stage()
    request = served.in_flight()
    turn_until(driver, Turn.ACTIVATED)
    assert request.done()
    found = request.result()
    assert spans(found) == [(str(old), 0, TOKENS)]
    assert found.finish_reason == "length"
    assert spans(served.complete(PROMPT, 3)) == [(served.run.label(version), 0, 3)]


def test_a_request_that_is_cut_ends_at_once_with_what_it_has(served: Served) -> None:
    """Policy abort: it is over before the update, with the old version's tokens (CASE R18)."""
    driver = served.driver(PauseMode.ABORT)
    old = driver.view().served
    served.stage()
    request = served.in_flight()
    turn_until(driver, Turn.ACTIVATED)
    found = request.result(60)
    assert found.finish_reason == "abort"
    assert {version for version, _, _ in spans(found)} == {str(old)}
    assert 10 <= len(found.token_ids) < TOKENS


def test_a_wait_that_takes_too_long_keeps_the_request(served: Served) -> None:
    """A drain has a limit, after which the request is kept and goes on (CASE R18)."""
    control = AsyncControl(served.engine, served.loop, bounds=ControlBounds(drain_max_s=0.01))
    driver = served.driver(PauseMode.WAIT, control)
    old = driver.view().served
    version = served.stage()
    request = served.in_flight()
    turn_until(driver, Turn.ACTIVATED)
    found = request.result(60)
    assert [one for one, _, _ in spans(found)] == [str(old), served.run.label(version)]
    assert len(found.token_ids) == TOKENS


class RefusedAfter(AsyncControl):
    """Has the external connector refuse to be emptied as soon as the weights are written."""

    refuse: Path

    def update(self, wanted: Any) -> None:
        """Update, then refuse."""
        super().update(wanted)
        self.refuse.touch()


def test_a_cache_that_is_not_reset_fails_the_activation(served: Served) -> None:
    """The engine stays paused while its connector holds old keys and values (CASE R7)."""
    control = RefusedAfter(served.engine, served.loop)
    control.refuse = served.refuse
    driver = served.driver(control=control)
    version = served.run.publish()
    turn_until(driver, Turn.HELD)
    failed, held = served.events
    assert isinstance(failed, ActivationFailed)
    assert failed.kind == "cache_reset"
    assert isinstance(held, EngineHeld)
    assert served.wait(served.engine.is_paused())
    request = asyncio.run_coroutine_threadsafe(
        served._generate(PROMPT, 3, threading.Event()), served.loop
    )
    turn_until(driver, Turn.HELD)
    assert not request.done()
    served.refuse.unlink()
    turn_until(driver, Turn.RECOVERED)
    assert isinstance(served.events[-1], EngineReleased)
    assert spans(request.result(60)) == [(served.run.label(version), 0, 3)]


def test_a_connector_that_refuses_before_anything_is_written(served: Served) -> None:
    """It cannot even be paused: the version before is served, and it is tried again (CASE R7)."""
    driver = served.driver()
    old = driver.view().served
    version = served.run.publish()
    served.refuse.touch()
    turn_until(driver, Turn.FAILED)
    assert driver.view().served == old
    assert spans(served.complete(PROMPT, 3)) == [(str(old), 0, 3)]
    served.refuse.unlink()
    turn_until(driver, Turn.ACTIVATED)
    assert spans(served.complete(PROMPT, 3)) == [(served.run.label(version), 0, 3)]


def test_the_engines_own_loop_is_not_blocked(served: Served) -> None:
    """A driver that is run in the loop it waits for is refused instead of waiting for ever."""

    async def inside() -> None:
        AsyncControl(served.engine, served.loop).resume()

    with pytest.raises(InvalidInputError, match="own event loop"):
        served.wait(inside())


def test_the_documented_way_to_follow_works(served: Served) -> None:
    """The block of docs/vllm.md follows this engine as it is printed there."""
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")
    (block,) = [text for text in page.split("```")[1::2] if "async def follow" in text]
    names: dict[str, Any] = {}
    exec(block, names)
    stopping = threading.Event()
    driver, thread = served.wait(names["follow"](served.engine, stopping))
    try:
        version = served.run.publish()
        until(lambda: str(driver.view().served) == served.run.label(version))
    finally:
        stopping.set()
        thread.join(BOUND_S)
    assert not thread.is_alive()
