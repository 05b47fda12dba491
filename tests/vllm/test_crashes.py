"""Engines, ranks and stagers are killed at every step, stores go away: what comes next is whole."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.clock import SystemClock
from deltastore.pipeline.held_lock import is_locked
from deltastore.pipeline.spool import SpoolFolder
from deltastore.testing.servers import SeaweedServer
from tests.vllm.crash_nursery import DiedError, RefusedError
from tests.vllm.crash_runs import (
    ENGINE,
    PLAIN,
    SwingingRun,
    SwingingS3Run,
    is_alive,
    require_nothing_left,
    require_tidy,
    until,
)
from tests.vllm.crash_steps import AT_START, FOLLOWING, REBUILDING, STAGING
from tests.vllm.kit import tiny_qwen3, tiny_qwen3_moe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.vllm.crash_nursery import Life, Nursery
    from tests.vllm.crash_steps import Step

pytestmark = pytest.mark.vllm
BOUND_S = 120.0  # for busy machines
DOWN_S = 31.0
GONE_WITHIN_S = 40.0  # vLLM gives workers 5 s to end by themselves, then 4 s; machines are busy
PAIR = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
PROBE = {"worker_extension_cls": "tests.vllm.crash_probe.CrashProbe"}


class Chain:
    """Engines under one name and spool: each proves that the death before it has left nothing."""

    def __init__(
        self,
        nursery: Nursery,
        run: SwingingRun,
        *,
        ranks: int = 1,
        environment: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.nursery = nursery
        self.run = run
        self._ranks = ranks
        self._kind = {} if ranks == 1 else {**PAIR, "processes": True}
        self._arguments = {**run.arguments(engine=ENGINE, **settings), **PROBE, **self._kind}
        self._arguments["environment"] = environment or {}
        self._fresh: dict[int, Any] = {}
        self.life = self.begin()

    def begin(self) -> Life:
        """The next engine, on version 0; it starts beside the one before it."""
        return self.nursery.start(self.run.checkpoint, **self._arguments)

    def fresh(self, version: int) -> tuple[Any, Any]:
        """What a fresh engine on the replayed version holds, and says."""
        if version not in self._fresh:
            life = self.nursery.start(self.run.replayed(version), **PLAIN, **self._kind)
            life.answer()
            self._fresh[version] = life.ask("digests"), life.ask("generate")
            self.nursery.note_shared()
            life.kill()
        return self._fresh[version]

    def prove(self) -> None:
        """The engine follows to HEAD and is what a fresh one is; the spool is its own."""
        self.life.ask("initialise")
        self.life.ask("update", self.run.head)
        self.require_head()
        self.nursery.note_shared()
        require_tidy(self.run, self._ranks)

    def require_head(self) -> None:
        """The engine is at HEAD, and is what a fresh one is."""
        life, run = self.life, self.run
        assert life.ask("label") == run.label(run.head)
        assert (life.ask("digests"), life.ask("generate")) == self.fresh(run.like)

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
    yield Chain(nursery, run, allow_dense=True)
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


@pytest.fixture
def pairs(nursery: Nursery, tmp_path: Path) -> Iterator[Chain]:
    """Engines of two ranks in processes of their own."""
    run = SwingingRun(tmp_path, tiny_qwen3(tmp_path / "model", tied=False))
    for _ in range(2):
        run.swing()
    yield Chain(nursery, run, ranks=2, vote_timeout_s=10)
    run.close()


def test_a_rank_killed_before_between_and_after_votes(pairs: Chain, tmp_path: Path) -> None:
    """CASE R2: when one of two ranks is killed, the other runs no forward pass any more: it is
    poisoned or at a whole version, the engine refuses, and both are gone in time; another pair
    under the same name has a fresh one's parameters at HEAD."""
    run = pairs.run
    for rank in (1, 0):
        for name in ("before vote 1", "after the last part", "after vote 2"):
            life, coming = pairs.life, pairs.begin()
            life.answer()
            pairs.prove()
            book = tmp_path / f"{rank}-{name}"
            book.mkdir()
            pids = life.ask("rpc", "probe_pid")
            life.ask("rpc", "probe_step", name, rank, str(book))
            base, version = run.head, run.swing()
            for call in (("update", version), ("generate",)):
                with pytest.raises(RefusedError):
                    life.ask(*call, within_s=GONE_WITHIN_S)
            until(lambda: not any(is_alive(pid) for pid in pids), GONE_WITHIN_S)  # noqa: B023
            assert (book / "dies").exists(), name
            _require_no_mixture(book / str(1 - rank), name, base, version)
            life.kill()
            require_nothing_left(run)
            pairs.life = coming
    pairs.life.answer()
    pairs.prove()
    pairs.life.kill()


def _require_no_mixture(notes: Path, name: str, base: int, version: int) -> None:
    """What the other rank noted, if it had the time: doubt, or after vote 2 the whole version."""
    found = notes.read_text().splitlines() if notes.exists() else []
    assert "forward" not in found
    whole = {f"update ended: {version}"} if name == "after vote 2" else set()
    assert all("a vote failed" in line or line in whole for line in found), found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A real S3 server that tests here may kill, and the environment by which it is found."""
    with (
        SeaweedServer(tmp_path_factory.mktemp("s3")) as made,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in made.env().items():
            patch.setenv(name, value)
        made.create_bucket("models")
        yield made


@pytest.fixture(scope="module")
def follower(
    nursery: Nursery, server: SeaweedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Chain]:
    """One engine that follows a run on that server; each test leaves it at HEAD."""
    folder = tmp_path_factory.mktemp("follower")
    run = SwingingS3Run(folder, tiny_qwen3(folder / "model", tied=True))
    for _ in range(2):
        run.swing()
    chain = Chain(nursery, run, environment=server.env(), stage_wait_s=BOUND_S)
    chain.life.answer()
    chain.prove()
    yield chain
    chain.life.kill()
    run.close()


def test_a_stager_killed_at_every_step(follower: Chain, tmp_path: Path) -> None:
    """A stager that is killed while it fetches, while it writes, before and after it announces, has
    nothing torn activated: the engine serves on, and follows what the next stager stages."""
    life, run = follower.life, follower.run
    life.ask("rpc", "probe_stager_steps", str(tmp_path))
    for step in STAGING:
        before = life.ask("label"), life.ask("digests"), life.ask("generate")
        until(lambda: is_locked(SpoolFolder(run.spool).stager_lock), BOUND_S)
        now, died = tmp_path / "now", tmp_path / step.name
        now.write_text(step.name, encoding="utf-8")
        version = run.swing()
        until(died.exists, BOUND_S, say=lambda: step.name)  # noqa: B023
        assert (life.ask("label"), life.ask("digests"), life.ask("generate")) == before
        life.ask("update", version)
        follower.require_head()
        kinds = {name.rpartition(".")[2] for name in died.read_text(encoding="utf-8").split()}
        assert kinds == LEFT[step.name]
    require_tidy(run)


LEFT = {
    "a body is on its way": set(),
    "an update is half written": {"part"},
    "an update is written": {"part"},
    "it has its name": {"staged"},
    "its offer is half written": {"staged"},
    "it is announced": {"staged"},
}
"""Kinds of files that a stager leaves in the spool when it dies there."""


def test_a_store_that_is_down_for_30_seconds(follower: Chain, server: SeaweedServer) -> None:
    """While the store hangs, and then is gone, the engine answers as before, and says what is
    wrong; when it is back the engine follows to HEAD by itself, and is what a fresh one is."""
    life, run, clock = follower.life, follower.run, SystemClock()
    life.ask("follow")
    life.ask("turn")
    before = life.ask("label"), life.ask("generate")
    down_s = clock.monotonic_s()
    server.pause()
    trouble = ""
    while clock.monotonic_s() < down_s + DOWN_S or not trouble:
        if server.running and clock.monotonic_s() > down_s + DOWN_S / 3:
            server.kill()
        trouble = life.ask("turn")
        assert (life.ask("label"), life.ask("generate")) == before
        assert clock.monotonic_s() < down_s + BOUND_S
    server.restart()
    assert "unavailable" in trouble
    for _ in range(2):
        run.swing()
    newest = run.label(run.head)

    def has_followed() -> bool:
        life.ask("turn")
        return bool(life.ask("label") == newest)

    until(has_followed, BOUND_S)
    follower.require_head()
    until(lambda: not life.ask("turn"), BOUND_S)
