"""Calls of an engine from another thread are bounded, typed, and reach every one of its cores."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.adapters.vllm.control import AsyncControl, LLMControl
from deltastore.errors import ApplyError, IntegrityError, InvalidInputError, Kind
from deltastore.pipeline.engine_control import NEWEST, ControlBounds, PauseMode
from tests.unit.pipeline.scripted_engine import hash_of

if TYPE_CHECKING:
    from collections.abc import Iterator


def status(rank: int, version: int = 1, staged: int | None = None) -> dict[str, Any]:
    """What a rank says."""
    active = {"version": version, "policy_hash": hash_of(version)}
    return {"rank": rank, "active": active, "staged": staged}


class Core:
    """The client of one or several engine cores."""

    def __init__(self, cores: int) -> None:
        self.core_engines = [b"%d" % number for number in range(cores)]
        self.staged: list[int | None] = [None] * cores
        self.reset = [True] * cores
        self.paused = [False] * cores
        self.ending = threading.Event()
        self.hangs = False
        self.utilities: list[tuple[Any, ...]] = []

    async def call_utility_all_async(self, utility: str, *arguments: Any) -> list[Any]:
        """One answer per core."""
        self.utilities.append((utility, *arguments))
        if utility == "reset_prefix_cache":
            return self.reset
        if utility == "is_scheduler_paused":
            return self.paused
        return [
            [status(2 * core, staged=staged), status(2 * core + 1, staged=staged)]
            for core, staged in enumerate(self.staged)
        ]

    def call_utility(self, utility: str, *arguments: Any) -> None:
        """As the synchronous client's, which waits for ever."""
        self.utilities.append((utility, *arguments))
        if self.hangs:
            self.ending.wait(30)


class Engine:
    """What of an AsyncLLM a control uses."""

    def __init__(self, cores: int = 1) -> None:
        self.engine_core = Core(cores)
        self.calls: list[str] = []
        self.named: list[str] = []
        self.hangs: set[str] = set()
        self.raises: BaseException | None = None

    async def collective_rpc(
        self, method: str, limit_s: float | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """What the one core's ranks answer."""
        self.calls.append(f"{method}{kwargs or ''}")
        if self.raises is not None:
            raise self.raises
        return [status(0), status(1)] if method == "deltastore_status" else [None, None]

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Pause, unless it is told to hang."""
        assert clear_cache
        self.calls.append(f"pause({mode})")
        if mode in self.hangs:
            await asyncio.Event().wait()

    async def resume_generation(self) -> None:
        """Resume."""
        self.calls.append("resume")

    async def is_paused(self) -> bool:
        """The one core's answer."""
        return self.engine_core.paused[0]

    async def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        """The one core's answer."""
        assert (running, connector) == (False, True)
        return self.engine_core.reset[0]

    async def update_weight_version(self, text: str) -> None:
        """Remember the label."""
        self.named.append(text)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of its own."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def test_an_update_is_three_calls_and_a_label(loop: asyncio.AbstractEventLoop) -> None:
    """Start, update, finish; then the engine's label follows what the ranks have proved."""
    engine = Engine()
    AsyncControl(engine, loop).update(NEWEST)
    assert engine.calls == [
        "start_weight_update",
        "update_weights{'update_info': {'version': 'newest'}}",
        "finish_weight_update",
        "deltastore_status",
    ]
    assert engine.named == [f"1:{hash_of(1)}"]


def test_every_core_is_asked(loop: asyncio.AbstractEventLoop) -> None:
    """With several engine cores all ranks answer, and one cache that is not empty is enough."""
    engine = Engine(cores=2)
    control = AsyncControl(engine, loop)
    assert [one.rank for one in control.status()] == [0, 1, 2, 3]
    assert control.reset_caches()
    engine.engine_core.reset = [True, False]
    assert not control.reset_caches()


@pytest.mark.parametrize(
    ("staged", "wanted"), [([2, 3, None], 3), ([3, 3, 3], 3), ([None] * 3, "newest")]
)
def test_cores_that_see_a_version_come_at_different_times_take_one(
    loop: asyncio.AbstractEventLoop, staged: list[int | None], wanted: object
) -> None:
    """With several engine cores, of which each would take its own newest, all are told one."""
    engine = Engine(cores=3)
    engine.engine_core.staged = staged
    AsyncControl(engine, loop).update(NEWEST)
    (told,) = [one for one in engine.engine_core.utilities if "update_weights" in one]
    assert told[-1] == {"update_info": {"version": wanted}}


@pytest.mark.parametrize("cores", [1, 2])
def test_an_engine_is_paused_when_all_its_cores_are(
    loop: asyncio.AbstractEventLoop, cores: int
) -> None:
    """One core that lets requests in is enough not to be."""
    engine = Engine(cores)
    control = AsyncControl(engine, loop)
    engine.engine_core.paused = [True] * cores
    assert control.is_paused()
    engine.engine_core.paused[0] = False
    assert not control.is_paused()


def test_a_drain_has_a_limit(loop: asyncio.AbstractEventLoop) -> None:
    """`wait` that is not over in time becomes `keep`; other pauses that hang are errors."""
    engine = Engine()
    engine.hangs = {"wait", "abort"}
    control = AsyncControl(engine, loop, bounds=ControlBounds(drain_max_s=0.02, pause_s=0.02))
    with pytest.raises(ApplyError) as caught:
        control.pause(PauseMode.ABORT)
    assert caught.value.kind is Kind.ENGINE_TIMEOUT
    engine.calls.clear()
    control = AsyncControl(engine, loop, bounds=ControlBounds(drain_max_s=0.02))
    control.pause(PauseMode.WAIT)
    assert engine.calls == ["pause(wait)", "pause(keep)"]


def test_what_the_engine_raises_is_typed(loop: asyncio.AbstractEventLoop) -> None:
    """An error of this library stays itself; anything else names the call and its words."""
    engine = Engine()
    control = AsyncControl(engine, loop)
    engine.raises = RuntimeError("rank 1\ndied")
    with pytest.raises(ApplyError, match=r"deltastore_status failed .* rank 1 died") as caught:
        control.status()
    assert caught.value.kind is Kind.ENGINE
    engine.raises = IntegrityError("wrong base", kind=Kind.WRONG_BASE)
    with pytest.raises(IntegrityError):
        control.status()
    engine.raises = asyncio.CancelledError()
    with pytest.raises(ApplyError, match="Cancelled"):
        control.status()


def test_a_session_that_nobody_ended_is_ended(loop: asyncio.AbstractEventLoop) -> None:
    """A driver that died between start and finish does not block the next one for ever."""
    engine = Engine()
    control = AsyncControl(engine, loop)
    call, failed = control.call_ranks, []

    def begun(method: str, within_s: float, **arguments: Any) -> list[Any]:
        if method == "start_weight_update" and not failed:
            failed.append(method)
            raise ApplyError("a weight update is already active", kind=Kind.ENGINE)
        return call(method, within_s, **arguments)

    control.call_ranks = begun
    control.update(7)
    assert engine.calls[:2] == ["finish_weight_update", "start_weight_update"]


def test_the_loop_must_be_another_threads_and_open(loop: asyncio.AbstractEventLoop) -> None:
    """From inside the loop it is refused, on a closed one it is an error of the engine."""
    engine = Engine()

    async def inside() -> None:
        AsyncControl(engine, asyncio.get_running_loop()).resume()

    with pytest.raises(InvalidInputError, match="own event loop"):
        asyncio.run(inside())
    closed = asyncio.new_event_loop()
    closed.close()
    with pytest.raises(ApplyError, match="closed"):
        AsyncControl(engine, closed).resume()


class LLM:
    """What of an `LLM` a control uses, with the engine core here or in a process of its own."""

    def __init__(self, *, in_process: bool) -> None:
        self.llm_engine = self
        self.unfinished = False
        self.paused: list[tuple[Any, ...]] = []
        self.engine_core: Any = Core(1)
        if in_process:
            self.engine_core = self
            self.engine_core.engine_core = self

    def has_unfinished_requests(self) -> bool:
        """Whether somebody must step it."""
        return self.unfinished

    def pause_scheduler(self, mode: str, clear_cache: bool) -> None:
        """As `EngineCore`'s."""
        self.paused.append((mode, clear_cache))

    def resume_scheduler(self) -> None:
        """As `EngineCore`'s."""
        self.paused.append(())

    def is_scheduler_paused(self) -> bool:
        """As `EngineCore`'s."""
        return bool(self.paused and self.paused[-1])

    def collective_rpc(
        self, method: str, timeout: float, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Any]:
        """One rank does not answer."""
        raise TimeoutError(f"{method} took longer than {timeout}")


def test_a_core_in_another_process_is_paused_there() -> None:
    """An LLM whose core steps by itself: its scheduler is told over the wire."""
    llm = LLM(in_process=False)
    control = LLMControl(llm)
    control.pause(PauseMode.WAIT)
    control.resume()
    assert not control.is_paused()
    assert llm.engine_core.utilities == [
        ("pause_scheduler", "wait", True),
        ("resume_scheduler",),
        ("is_scheduler_paused",),
    ]


def test_a_core_in_another_process_that_does_not_answer_is_a_timeout() -> None:
    """vLLM's own client would wait for ever; the caller gets its thread back."""
    llm = LLM(in_process=False)
    llm.engine_core.hangs = True
    control = LLMControl(llm, bounds=ControlBounds(pause_s=0.02))
    with pytest.raises(ApplyError, match=r"pause\(keep\) within 0.02 s") as caught:
        control.pause(PauseMode.KEEP)
    llm.engine_core.ending.set()
    assert caught.value.kind is Kind.ENGINE_TIMEOUT


def test_a_core_in_this_process_cannot_wait_for_itself() -> None:
    """Nothing steps it while it pauses: `wait` is refused while requests are unfinished."""
    llm = LLM(in_process=True)
    control = LLMControl(llm)
    control.pause(PauseMode.WAIT)
    assert llm.paused == [("keep", True)]
    llm.unfinished = True
    with pytest.raises(ApplyError, match="step it until they are finished"):
        control.pause(PauseMode.WAIT)
    control.pause(PauseMode.ABORT)
    assert control.is_paused()
    control.resume()
    assert not control.is_paused()
    assert llm.paused[1:] == [("abort", True), ()]


def test_a_rank_that_does_not_answer_is_a_timeout() -> None:
    """The engine's own limit is told as what it is."""
    with pytest.raises(ApplyError) as caught:
        LLMControl(LLM(in_process=True)).status()
    assert caught.value.kind is Kind.ENGINE_TIMEOUT
