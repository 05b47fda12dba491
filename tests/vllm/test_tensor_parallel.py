"""With processes: one rank's engine core apart, and two ranks that share a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from deltastore.adapters.vllm.plugin import register
from tests.vllm.kit import close_engine, start_engine, tiny_qwen3
from tests.vllm.runs import (
    TinyRun,
    digests,
    follow_five,
    generate,
    initialise,
    served,
    served_by_a_fresh_one,
    skip_to_the_fifth,
    statuses,
    until_staged,
    update,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.vllm.crash_nursery import Nursery

pytestmark = pytest.mark.vllm
PROBE = {"worker_extension_cls": "tests.vllm.worker_probe.WorkerProbe"}
PAIR = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this test have processes of their own."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")


@pytest.mark.usefixtures("processes")
def test_two_ranks_equal_fresh_ones(tmp_path: Path, nursery: Nursery) -> None:
    """CASE R2, R8, R20, R26: two ranks follow five versions, undo together what fails on one of
    them, re-anchor from poison, skip lost deltas by a composite, and before and after have the
    parameters, tokens and log-probs of a fresh pair; what each says of itself is the same."""
    checkpoint = tiny_qwen3(tmp_path / "model", tied=False)
    run = TinyRun(tmp_path, checkpoint)
    engine = start_engine(checkpoint, **run.arguments(engine="pair"), **PROBE, **PAIR)
    try:
        initialise(engine)
        assert engine.get_weight_version() == run.label(0)
        fifth = follow_five(engine, run)
        _fail_on_each_rank(engine, run)
        _poison_and_re_anchor(engine, run)
        last = skip_to_the_fifth(engine, run)
        skipped = served(engine)
        ranks = statuses(engine)
    finally:
        close_engine(engine)
        run.close()
    assert [one["rank"] for one in ranks] == [0, 1]
    assert fifth == skipped == served_by_a_fresh_one(run, last, nursery, processes=True, **PAIR)


def _fail_on_each_rank(engine: Any, run: TinyRun) -> None:
    """A version fails on one rank after some parts, then on the other; then it is activated."""
    before = digests(engine), engine.get_weight_version()
    version = run.publish()
    until_staged(engine, version)
    parts = engine.collective_rpc("probe_parts")
    for rank, after in ((0, 0), (1, parts[1] - 1), (0, parts[0] // 2)):
        engine.collective_rpc("probe_writes", args=(after, rank))
        with pytest.raises(Exception, match="the probe failed this write"):
            update(engine, version)
        assert (digests(engine), engine.get_weight_version()) == before
        assert {one["poisoned"] for one in statuses(engine)} == {""}
    engine.collective_rpc("probe_writes", args=(-1, 0))
    update(engine, version)
    assert engine.get_weight_version() == run.label(version)


def _poison_and_re_anchor(engine: Any, run: TinyRun) -> None:
    """A version cannot be undone on one rank: both refuse, until both have re-anchored."""
    version = run.publish()
    until_staged(engine, version)
    engine.collective_rpc("probe_writes", args=(2, 1), kwargs={"undo_fails": True})
    with pytest.raises(Exception, match="poisoned"):
        update(engine, version)
    assert engine.get_weight_version() == "poisoned"
    assert all(one["poisoned"] for one in statuses(engine))
    with pytest.raises(Exception, match="poisoned"):
        engine.start_weight_update()
    engine.collective_rpc("probe_writes", args=(-1, 0))
    engine.collective_rpc("deltastore_re_anchor")
    assert engine.get_weight_version() == run.label(version)


@pytest.mark.usefixtures("processes")
def test_without_the_plugin_the_extension_class_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine core in a process of its own, for which no plugin is loaded, follows through the
    extension class alone, and its parameters are those of the same weights without processes."""
    register()  # in this process, for the engines that come later; again is harmless
    register()
    monkeypatch.setenv("VLLM_PLUGINS", "none-of-ours")
    checkpoint = tiny_qwen3(tmp_path / "model", tied=True)
    run = TinyRun(tmp_path, checkpoint)
    extension = "deltastore.adapters.vllm.extension.WorkerExtension"
    engine = start_engine(checkpoint, **run.arguments(), worker_extension_cls=extension)
    try:
        initialise(engine)
        before = generate(engine)
        for version in (1, 2):
            run.publish()
            engine.start_weight_update()
            engine.update_weights({"update_info": {"version": version}})
            engine.finish_weight_update(run.label(version))  # nobody else says it to the core
            assert engine.get_weight_version() == run.label(version)
        assert generate(engine) != before
        (status,) = statuses(engine)
        assert status["active"]["version"] == 2
        ours = digests(engine)
    finally:
        close_engine(engine)
        run.close()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    fresh = start_engine(run.replayed(2), weight_transfer_config={"backend": "deltastore"})
    try:
        assert digests(fresh) == ours
    finally:
        close_engine(fresh)
