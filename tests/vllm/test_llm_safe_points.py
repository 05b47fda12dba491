"""An `LLM` that is stepped by hand changes versions between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from deltastore.adapters.placed_target import PlacedTarget
from deltastore.adapters.vllm.control import LLMControl
from deltastore.clock import SystemClock
from deltastore.pipeline.engine_control import PauseMode
from deltastore.pipeline.safe_point import SafePointDriver, SafePointSettings, Turn
from tests.vllm.kit import close_engine, start_engine, tiny_qwen3
from tests.vllm.runs import TinyRun, digests

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.vllm
PROMPT = [1, 2, 3, 4, 5]
TOKENS = 40
BOUND_S = 60.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    """The run of a tiny model."""
    folder = tmp_path_factory.mktemp("llm")
    made = TinyRun(folder, tiny_qwen3(folder / "model", tied=True))
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(run: TinyRun) -> Iterator[Any]:
    """One engine in this process."""
    made = start_engine(run.checkpoint, **run.arguments())
    yield made
    close_engine(made)


def driver_of(engine: Any, mode: PauseMode) -> SafePointDriver:
    """A driver that activates at once, past its first turn."""
    settings = SafePointSettings(mode=mode, min_interval_s=0, jitter_s=0)
    driver = SafePointDriver(LLMControl(engine), SystemClock(), name="e", settings=settings)
    assert driver.turn() is Turn.NOTHING, driver.view()
    return driver


def activate(driver: SafePointDriver) -> None:
    """Turn until the published version is active, within the bound."""
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + BOUND_S
    while (outcome := driver.turn()) is not Turn.ACTIVATED:
        assert clock.monotonic_s() < deadline_s, (outcome, driver.view())
        clock.sleep_s(0.02)


def begin(engine: Any, prompt: list[int], tokens: int, name: str) -> None:
    """Add a request without running it."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    engine.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)


def finish(engine: Any) -> Any:
    """Step until nothing is unfinished; the last completion."""
    found = None
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            found = output.outputs[0]
    assert found is not None
    return found


def test_a_request_between_two_steps_goes_on_at_the_new_version(engine: Any, run: TinyRun) -> None:
    """Its spans say where it changed; from there it equals a run from scratch (CASE R7, R20)."""
    driver = driver_of(engine, PauseMode.KEEP)
    old = driver.view().served
    begin(engine, PROMPT, TOKENS, "kept")
    for _ in range(10):
        engine.llm_engine.step()
    version = run.publish()
    activate(driver)
    found = finish(engine)
    (first, _, cut), (second, _, end) = [
        (span.version, span.start, span.end) for span in found.weight_versions
    ]
    assert (first, second, end) == (str(old), run.label(version), TOKENS)
    assert 0 < cut < TOKENS
    begin(engine, [*PROMPT, *found.token_ids[:cut]], TOKENS - cut, "anew")
    assert list(finish(engine).token_ids) == list(found.token_ids[cut:])


def test_waiting_for_who_cannot_go_on_is_refused(engine: Any, run: TinyRun) -> None:
    """`wait` with a request that only the caller can step: the version before is served on."""
    driver = driver_of(engine, PauseMode.WAIT)
    old = driver.view().served
    begin(engine, PROMPT, TOKENS, "waited")
    engine.llm_engine.step()
    version = run.publish()
    clock = SystemClock()
    while (outcome := driver.turn()) is Turn.NOTHING:
        clock.sleep_s(0.02)
    assert outcome is Turn.FAILED
    assert "step it until they are finished" in driver.view().trouble
    found = finish(engine)
    assert [span.version for span in found.weight_versions] == [str(old)]
    activate(driver)
    assert driver.view().served is not None
    assert str(driver.view().served) == run.label(version)


def test_cut_requests_are_gone(engine: Any, run: TinyRun) -> None:
    """`abort` between two steps: nothing is left to step."""
    driver = driver_of(engine, PauseMode.ABORT)
    begin(engine, PROMPT, TOKENS, "cut")
    engine.llm_engine.step()
    run.publish()
    activate(driver)
    core = engine.llm_engine.engine_core.engine_core
    assert not core.scheduler.has_unfinished_requests()
    engine.llm_engine.abort_request(["cut"])


def corrupt(worker: Any) -> None:
    """Make a worker's weights those of no version."""
    parameter = next(worker.get_model().parameters())
    parameter.data.view(torch.int16)[0] ^= 1


def test_a_start_that_breaks_off_is_held(
    engine: Any, run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of no version, a rebuild that fails: nothing is served until one ends (CASE R2)."""
    control = LLMControl(engine)
    control.call_ranks("shutdown_weight_transfer_engine", BOUND_S)
    whole = digests(engine)
    engine.collective_rpc(corrupt)

    def broken(target: PlacedTarget, state: Any) -> None:
        raise OSError("the test has the memory fail")

    monkeypatch.setattr(PlacedTarget, "write_state", broken)
    settings = SafePointSettings(min_interval_s=0, jitter_s=0)
    driver = SafePointDriver(control, SystemClock(), name="e", settings=settings)
    assert driver.turn() is Turn.HELD
    assert "the test has the memory fail" in driver.view().held
    assert digests(engine) != whole
    monkeypatch.undo()
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + BOUND_S
    while (outcome := driver.turn()) is not Turn.RECOVERED:
        assert clock.monotonic_s() < deadline_s, (outcome, driver.view())
        clock.sleep_s(0.05)
    assert digests(engine) == whole
    begin(engine, PROMPT, 3, "after")
    assert [span.version for span in finish(engine).weight_versions] == [str(driver.view().served)]
