"""Engines, ranks and stagers are killed at every step, stores go away: what comes next is whole."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.crash_nursery import DiedError, Nursery
from tests.vllm.crash_runs import ENGINE, PLAIN, SwingingRun, require_nothing_left, require_tidy
from tests.vllm.crash_steps import AT_START, FOLLOWING, REBUILDING
from tests.vllm.kit import tiny_qwen3_moe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.vllm.crash_nursery import Life
    from tests.vllm.crash_steps import Step

pytestmark = pytest.mark.vllm
PROBE = {"worker_extension_cls": "tests.vllm.crash_probe.CrashProbe"}


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Where engines of this module come from that are processes of their own."""
    log = tmp_path_factory.mktemp("nursery") / "log"
    with Nursery(log, {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}) as made:
        yield made


class Chain:
    """Engines under one name and spool: each proves that the death before it has left nothing."""

    def __init__(self, nursery: Nursery, run: SwingingRun, **arguments: Any) -> None:
        self.nursery = nursery
        self.run = run
        self._arguments = {**run.arguments(engine=ENGINE), **PROBE, **arguments}
        self._fresh: dict[int, Any] = {}
        self.life = self.begin()

    def begin(self) -> Life:
        """The next engine, on version 0; it starts beside the one before it."""
        return self.nursery.start(self.run.checkpoint, **self._arguments)

    def fresh(self, version: int) -> Any:
        """What a fresh engine on the replayed version holds."""
        if version not in self._fresh:
            life = self.nursery.start(self.run.replayed(version), **PLAIN)
            life.answer()
            self._fresh[version] = life.ask("digests")
            life.kill()
        return self._fresh[version]

    def prove(self) -> None:
        """The engine follows to HEAD and is what a fresh one is; the spool is its own."""
        life, run = self.life, self.run
        life.ask("initialise")
        life.ask("update", run.head)
        assert life.ask("label") == run.label(run.head)
        assert life.ask("digests") == self.fresh(run.like)
        require_tidy(run)

    def kill_at(self, step: Step) -> None:
        """Bring the engine to a step, where it dies; begin the next."""
        life, run = self.life, self.run
        coming = self.begin()
        life.answer()
        if step.during == "start":
            life.ask("arm", step.name)
            life.tell("initialise")
        else:
            self.prove()
            if step.during == "update":
                life.ask("arm", step.name)  # first: it may die as soon as there is a version
                life.tell("update", run.swing())
            else:
                life.ask("poison", run.swing())
                life.ask("arm", step.name)
                life.tell("rpc", "deltastore_re_anchor")
        with pytest.raises(DiedError) as caught:
            life.answer()
        assert caught.value.code == -signal.SIGKILL
        require_nothing_left(run)
        self.life = coming


@pytest.fixture(scope="module")
def chain(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    """Engines of one rank, of whose weights some are written in place, and some reloaded."""
    folder = tmp_path_factory.mktemp("chain")
    run = SwingingRun(folder, tiny_qwen3_moe(folder / "model"))
    for _ in range(2):
        run.swing()
    section = {"deltastore": run.settings(engine=ENGINE, allow_dense=True)}
    yield Chain(nursery, run, additional_config=section)
    run.close()


@pytest.mark.parametrize("steps", [AT_START, FOLLOWING, REBUILDING], ids=["start", "follow", "re"])
def test_an_engine_killed_between_any_two_steps(chain: Chain, steps: tuple[Step, ...]) -> None:
    """CASE R2: an engine that is killed at any step leaves no process, no lock, no update; the next
    one under its name and spool follows to HEAD, and has a fresh engine's parameters there."""
    for step in steps:
        try:
            chain.kill_at(step)
        except BaseException as err:
            err.add_note(f"at the step {step.name!r}")
            raise
    chain.life.answer()
    chain.prove()
    chain.life.kill()
    require_nothing_left(chain.run)
    chain.life = chain.begin()
