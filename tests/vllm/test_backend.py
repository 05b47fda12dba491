"""One process, real engine: what it serves after updates is what a fresh one serves."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from deltastore.errors import ApplyError, DeltastoreError, Kind
from tests.vllm.kit import close_engine, start_engine, tiny_llama, tiny_qwen3, tiny_qwen3_moe
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
    from collections.abc import Iterator

    from deltastore.format.layout import BitState

pytestmark = pytest.mark.vllm
PROBE = {"worker_extension_cls": "tests.vllm.worker_probe.WorkerProbe"}


@pytest.mark.parametrize("kind", ["untied", "tied", "llama"])
def test_an_engine_equals_a_fresh_one(kind: str, tmp_path: Path) -> None:
    """CASE R6, R8, R26: after five versions, and after a skip over lost deltas by a composite, the
    engine has a fresh one's parameters, tokens and log-probs, and says which version it serves."""
    if kind == "llama":
        checkpoint = tiny_llama(tmp_path / "model")
    else:
        checkpoint = tiny_qwen3(tmp_path / "model", tied=kind == "tied")
    run = TinyRun(tmp_path, checkpoint)
    engine = start_engine(checkpoint, **run.arguments(), **PROBE)
    try:
        initialise(engine)
        initialise(engine)  # again is harmless
        assert engine.get_weight_version() == run.label(0)
        fifth = follow_five(engine, run)
        last = skip_to_the_fifth(engine, run)
        (status,) = statuses(engine)
        assert (status["dense_share"], status["shadow_bytes"]) == (0, 0)
        skipped = served(engine)
    finally:
        close_engine(engine)
        run.close()
    assert fifth == skipped == served_by_a_fresh_one(run, last)


def test_repacked_experts_are_refused_or_reloaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """CASE R2, R8: experts that this engine keeps in another form are found; without allow_dense it
    is not followed, and serves on; with it the engine equals a fresh one after five versions, and
    after a skip by a composite, before which an update failed after part k, for every k, and was
    undone. Shadows above their limit are refused; what following costs is said at the start."""
    checkpoint = tiny_qwen3_moe(tmp_path / "model")
    run = TinyRun(tmp_path, checkpoint)
    engine = start_engine(checkpoint, **run.arguments(), **PROBE)
    try:
        before = generate(engine), digests(engine)
        with pytest.raises(DeltastoreError, match="cannot be written in place") as caught:
            initialise(engine)
        assert caught.value.kind is Kind.COVERAGE
        assert (generate(engine), digests(engine)) == before
        with pytest.raises(DeltastoreError, match="shadow_max_bytes, 1000") as caught:
            initialise(engine, allow_dense=True, shadow_max_bytes=1000)
        assert caught.value.kind is Kind.LIMIT
        assert digests(engine) == before[1]
        with caplog.at_level("INFO", logger="deltastore"):
            initialise(engine, allow_dense=True)
        (line,) = [one.getMessage() for one in caplog.records if "follows" in one.getMessage()]
        assert "reloaded" in line
        (status,) = statuses(engine)
        assert status["dense_share"] > 0.05
        assert status["shadow_bytes"] > 0
        fifth = follow_five(engine, run)
        undone_after_every_part(engine, run.publish())
        last = skip_to_the_fifth(engine, run)
        skipped = served(engine)
    finally:
        close_engine(engine)
        run.close()
    assert fifth == skipped == served_by_a_fresh_one(run, last)


def undone_after_every_part(engine: Any, version: int) -> None:
    """An update that fails after part k, for every k, leaves all runtime bytes as they were."""
    until_staged(engine, version)
    before = digests(engine)
    (parts,) = engine.collective_rpc("probe_parts")
    assert parts > 0
    for after in range(parts):
        engine.collective_rpc("probe_writes", args=(after, 0))
        with pytest.raises(DeltastoreError) as caught:
            update(engine, version)
        assert caught.value.kind is Kind.ROLLED_BACK
        assert digests(engine) == before
    engine.collective_rpc("probe_writes", args=(-1, 0))


@pytest.fixture(scope="module")
def follower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, TinyRun]]:
    """An engine that follows a run, for tests that leave both usable."""
    folder = tmp_path_factory.mktemp("follower")
    checkpoint = tiny_qwen3(folder / "model", tied=False)
    run = TinyRun(folder, checkpoint)
    engine = start_engine(checkpoint, **run.arguments(), **PROBE)
    initialise(engine)
    yield engine, run
    close_engine(engine)
    run.close()


def live(engine: Any, name: str) -> Any:
    """A runtime parameter's patterns."""
    import torch

    (found,) = engine.apply_model(lambda model: model.get_parameter(name).detach().clone())
    return found.view(torch.int16).numpy().view(np.uint16)


def test_every_pattern_travels(follower: tuple[Any, TinyRun]) -> None:
    """CASE R5: all 65536 patterns of a bfloat16, every NaN code, -0 and infinities among them,
    arrive in the live weights as they are, and go again."""
    engine, run = follower
    kept = run.state.copy()
    everything = np.arange(1 << 16, dtype=np.uint16)

    def write(state: BitState) -> None:
        state["model.embed_tokens.weight"][:] = everything[: 1 << 15]
        state["lm_head.weight"][:] = everything[1 << 15 :]

    version = run.publish(lambda: write(run.state))
    update(engine, version)
    found = [
        live(engine, name).reshape(-1) for name in ("model.embed_tokens.weight", "lm_head.weight")
    ]
    assert np.array_equal(np.concatenate(found), everything)

    def restore() -> None:
        for mine, old in zip(run.state.arrays, kept.arrays, strict=True):
            mine[:] = old

    update(engine, run.publish(restore))
    assert statuses(engine)[0]["poisoned"] == ""


def test_another_runs_version_is_refused(follower: tuple[Any, TinyRun], tmp_path: Path) -> None:
    """CASE R22, R3: a version of another history in the run's place is refused with a reason, by
    staging and by update; the engine serves on, and follows again when the right one is there."""
    engine, run = follower
    update(engine, run.publish())
    before = generate(engine), digests(engine), engine.get_weight_version()
    version = statuses(engine)[0]["active"]["version"] + 1
    other = TinyRun(tmp_path, run.checkpoint, name=run.name, seed=9)
    while other.publish() < version:
        continue
    other.close()
    name = f"versions/{version:010d}.json"
    (run.body_folder / name).write_bytes((other.body_folder / name).read_bytes())
    with pytest.raises(DeltastoreError) as caught:
        update(engine, version)
    assert caught.value.kind is Kind.BROKEN_CHAIN
    assert (generate(engine), digests(engine), engine.get_weight_version()) == before
    assert statuses(engine)[0]["poisoned"] == ""
    (run.body_folder / name).unlink()
    assert run.publish() == version
    update(engine, version)
    assert engine.get_weight_version() == run.label(version)


def test_a_foreign_layout_is_refused(follower: tuple[Any, TinyRun], tmp_path: Path) -> None:
    """CASE R22: a run of another model is refused by name at initialisation, and the engine serves
    on and follows its own run again."""
    engine, run = follower
    other = TinyRun(tmp_path, tiny_llama(tmp_path / "other"))
    before = generate(engine), digests(engine)
    engine.shutdown_weight_transfer_engine()
    with pytest.raises(DeltastoreError):
        initialise(engine, run=other.url)
    assert (generate(engine), digests(engine)) == before
    with pytest.raises(ApplyError, match="does not follow"):
        engine.start_weight_update()
    initialise(engine)
    update(engine, run.publish())
    assert engine.get_weight_version() == run.label(statuses(engine)[0]["active"]["version"])


def test_update_newest_takes_what_is_staged(follower: tuple[Any, TinyRun]) -> None:
    """ "newest" activates what is staged and waits for nothing; older versions, versions that do
    not come and words that are none are refused, and the engine is where it was."""
    engine, run = follower
    version = run.publish()
    until_staged(engine, version)
    update(engine, "newest")
    assert engine.get_weight_version() == run.label(version)
    update(engine, "newest")
    for wrong, kind in ((version - 1, Kind.NOT_STAGED), (-1, Kind.VERSION), ("v7", Kind.VERSION)):
        with pytest.raises(DeltastoreError) as caught:
            update(engine, wrong)
        assert caught.value.kind is kind
    assert engine.get_weight_version() == run.label(version)


def test_memory_is_flat_over_200_updates(follower: tuple[Any, TinyRun]) -> None:
    """CASE R17: the process's resident memory after 200 updates is what it was after 40, but for
    a few MiB."""
    engine, run = follower
    sizes = []
    for number in range(200):
        version = run.publish()
        update(engine, version)
        if number in {39, 199}:
            gc.collect()
            sizes.append(resident_bytes())
    assert sizes[1] - sizes[0] < 8 << 20, sizes
    assert statuses(engine)[0]["active"]["version"] == version


def resident_bytes() -> int:
    """Resident memory of this process."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = [line for line in text.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) << 10
