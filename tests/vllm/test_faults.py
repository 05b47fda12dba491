"""Whatever breaks, the engine serves the version before, or refuses: it never serves a mixture."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.clock import SystemClock
from deltastore.errors import ApplyError, DeltastoreError, Kind
from deltastore.pipeline.spool import SpoolFolder
from tests.vllm.kit import close_engine, start_engine, tiny_qwen3
from tests.vllm.runs import TinyRun, digests, generate, initialise, statuses, until_staged, update

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.vllm
PROBE = {"worker_extension_cls": "tests.vllm.worker_probe.WorkerProbe"}


@pytest.fixture(scope="module")
def follower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, TinyRun]]:
    """An engine that follows a run; each test leaves it at HEAD, and sound."""
    folder = tmp_path_factory.mktemp("follower")
    checkpoint = tiny_qwen3(folder / "model", tied=True)
    run = TinyRun(folder, checkpoint)
    engine = start_engine(checkpoint, **run.arguments(engine="e"), **PROBE)
    initialise(engine)
    update(engine, run.publish())
    yield engine, run
    close_engine(engine)
    run.close()


def served(engine: Any) -> tuple[Any, ...]:
    """What an engine is, and what it says that it is."""
    return digests(engine), generate(engine, tokens=4), engine.get_weight_version()


def until(what: Callable[[], bool], within_s: float = 30.0) -> None:
    """Wait until something holds."""
    clock, never = SystemClock(), threading.Event()
    deadline_s = clock.monotonic_s() + within_s
    while not what():
        assert clock.monotonic_s() < deadline_s
        clock.wait(never, 0.05)


def test_a_write_that_fails_anywhere_is_undone(follower: tuple[Any, TinyRun]) -> None:
    """CASE R2, R20: an activation that raises after part k, for every k, leaves all parameters and
    the version marker as they were; the same update succeeds afterwards."""
    engine, run = follower
    before = served(engine)
    version = run.publish()
    until_staged(engine, version)
    (parts,) = engine.collective_rpc("probe_parts")
    assert parts >= len(run.state.arrays) // 2
    for after in range(parts):
        engine.collective_rpc("probe_writes", args=(after, 0))
        with pytest.raises(ApplyError) as caught:
            update(engine, version)
        assert caught.value.kind is Kind.ROLLED_BACK
        assert (digests(engine), engine.get_weight_version()) == (before[0], before[2])
        (status,) = statuses(engine)
        assert status["poisoned"] == ""
        assert "the probe failed this write" in status["trouble"]
    assert served(engine) == before
    engine.collective_rpc("probe_writes", args=(-1, 0))
    update(engine, version)
    assert engine.get_weight_version() == run.label(version)
    assert served(engine) != before


def test_what_cannot_be_undone_is_not_served(follower: tuple[Any, TinyRun]) -> None:
    """CASE R2, LAW 3: when the undoing fails too the engine is poisoned: it takes no request and
    no update, and says so, until it has re-anchored; then it serves HEAD."""
    engine, run = follower
    version = run.publish()
    until_staged(engine, version)
    engine.collective_rpc("probe_writes", args=(5, 0), kwargs={"undo_fails": True})
    with pytest.raises(ApplyError) as caught:
        update(engine, version)
    assert caught.value.kind is Kind.POISONED
    assert engine.get_weight_version() == "poisoned"
    assert statuses(engine)[0]["poisoned"]
    engine.collective_rpc("probe_writes", args=(-1, 0))
    for call in (
        lambda: generate(engine),
        engine.start_weight_update,
        engine.llm_engine.engine_core.engine_core.resume_scheduler,
    ):
        with pytest.raises(ApplyError) as caught:
            call()
        assert caught.value.kind is Kind.POISONED
    engine.collective_rpc("deltastore_re_anchor")
    assert engine.get_weight_version() == run.label(version)
    assert statuses(engine)[0]["poisoned"] == ""
    ours = served(engine)
    update(engine, run.publish())
    assert served(engine)[1] != ours[1]


def test_weights_written_behind_its_back_are_found(follower: tuple[Any, TinyRun]) -> None:
    """CASE R3: live weights that are not the version's are not built upon: the update is refused,
    and re-anchoring puts them right."""
    engine, run = follower

    def meddle(model: Any) -> None:
        model.get_parameter("model.layers.1.mlp.down_proj.weight").data.neg_()

    engine.apply_model(meddle)
    version = run.publish()
    with pytest.raises(DeltastoreError) as caught:
        update(engine, version)
    assert caught.value.kind is Kind.ROLLED_BACK
    assert "down_proj" in str(caught.value)
    engine.collective_rpc("deltastore_re_anchor")
    assert engine.get_weight_version() == run.label(version)
    update(engine, run.publish())


def test_a_corrupt_segment_is_not_activated(follower: tuple[Any, TinyRun]) -> None:
    """A body that is damaged in the bucket is refused with its reason and the engine serves on;
    when the object is whole again it follows."""
    engine, run = follower
    before = served(engine)
    version = statuses(engine)[0]["active"]["version"] + 1
    (pid,) = engine.collective_rpc("probe_stager")
    os.kill(pid, signal.SIGSTOP)  # so that it sees the version only when it is damaged
    try:
        assert run.publish() == version
        body = next((run.body_folder / "deltas").glob(f"*{version}/*.seg"))
        whole = body.read_bytes()
        body.chmod(0o600)
        body.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    finally:
        os.kill(pid, signal.SIGCONT)
    with pytest.raises(DeltastoreError) as caught:
        update(engine, version)
    assert caught.value.kind is Kind.DIGEST
    assert served(engine) == before
    body.write_bytes(whole)
    update(engine, version)
    assert engine.get_weight_version() == run.label(version)


def test_a_spooled_update_that_is_changed_is_not_activated(follower: tuple[Any, TinyRun]) -> None:
    """A staged update whose file is changed under the engine ends in the version's own bits or in a
    refusal, and is fetched anew."""
    engine, run = follower
    before = digests(engine)
    version = run.publish()
    until_staged(engine, version)
    for path in SpoolFolder(run.spool).updates.glob("*.staged"):
        path.chmod(0o600)
        with path.open("r+b") as file:
            file.seek(-64, os.SEEK_END)
            tail = file.read(64)
            file.seek(-64, os.SEEK_END)
            file.write(bytes(byte ^ 0xFF for byte in tail))
    try:
        update(engine, version)
    except DeltastoreError:
        assert digests(engine) == before
        update(engine, version)
    assert engine.get_weight_version() == run.label(version)
    engine.collective_rpc("probe_whole")


def test_a_store_that_is_away_is_waited_for(follower: tuple[Any, TinyRun]) -> None:
    """While the store is away the engine serves and says why nothing is staged; when it is back it
    follows, without being told."""
    engine, run = follower
    before = served(engine)
    store = run.body_folder.parent
    aside = store.with_name("away")
    store.rename(aside)
    store.symlink_to(store)  # every read fails, as of a network folder that is gone
    until(lambda: bool(statuses(engine)[0]["trouble"]))
    assert served(engine) == before
    store.unlink()
    aside.rename(store)
    version = run.publish()
    update(engine, version)
    assert engine.get_weight_version() == run.label(version)
    until(lambda: not statuses(engine)[0]["trouble"])
