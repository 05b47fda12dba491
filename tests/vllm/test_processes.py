"""What crosses a border between processes can be lost there: engines in several shapes of them.

After five versions, and after a skip from the first one's weights to the fifth's by a composite,
each is compared with a fresh one on what `deltastore replay` writes: every parameter's SHA-256,
greedy tokens, log-probs.

| ranks | core      | models                    | test                                            |
|-------|-----------|---------------------------|-------------------------------------------------|
| 1     | in here   | Qwen3 tied, untied, Llama | test_backend.test_an_engine_equals_a_fresh_one  |
| 1     | in here   | Qwen3-MoE                 | test_backend.test_repacked_experts_…            |
| 1     | apart     | Qwen3 untied              | test_a_core_of_its_own_equals_one_in_here       |
| TP 2  | apart     | Qwen3 untied              | test_tensor_parallel.test_two_ranks_…           |
| TP 2  | in here   | Qwen3-MoE tied            | test_experts_on_two_ranks_equal_fresh_ones      |
| PP 2  | in here   | Qwen3 tied                | test_stages_of_a_pipeline_equal_one_rank        |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.kit import close_engine, start_engine, tiny_qwen3, tiny_qwen3_moe
from tests.vllm.runs import (
    TinyRun,
    follow_five,
    initialise,
    served,
    served_by_a_fresh_one,
    skip_to_the_fifth,
    statuses,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.vllm
PROBE = {"worker_extension_cls": "tests.vllm.worker_probe.WorkerProbe"}
MANY = {"distributed_executor_backend": "mp"}


def followed(run: TinyRun, settings: dict[str, Any], **arguments: Any) -> tuple[int, Any]:
    """An engine's whole way: its last version, and what it served there and at the fifth."""
    engine = start_engine(run.checkpoint, **run.arguments(**settings), **PROBE, **arguments)
    try:
        initialise(engine)
        assert engine.get_weight_version() == run.label(0)
        fifth = follow_five(engine, run)
        last = skip_to_the_fifth(engine, run)
        skipped = served(engine)
        assert len(statuses(engine)) == len(skipped[0])
    finally:
        close_engine(engine)
        run.close()
    assert fifth == skipped
    return last, skipped


def test_a_core_of_its_own_equals_one_in_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASE R6, R8, R26: an engine core in a process of its own follows as one in this process does,
    and serves what a fresh one in this process serves."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    run = TinyRun(tmp_path, tiny_qwen3(tmp_path / "model", tied=False))
    last, ours = followed(run, {})
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    assert ours == served_by_a_fresh_one(run, last)


def test_experts_on_two_ranks_equal_fresh_ones(tmp_path: Path) -> None:
    """CASE R2, R8, R26: two ranks with half of every expert reload what they cannot write in place,
    the rest is written in place, tied embeddings too, and both equal a fresh pair."""
    run = TinyRun(tmp_path, tiny_qwen3_moe(tmp_path / "model", tie_word_embeddings=True))
    pair = {"tensor_parallel_size": 2, **MANY}
    last, ours = followed(run, {"allow_dense": True}, **pair)
    assert len(ours[0]) == 2
    assert ours == served_by_a_fresh_one(run, last, **pair)


def without_rank(digests: dict[str, str]) -> dict[str, str]:
    """Digests by the parameter's name alone, which vLLM writes behind its rank's."""
    return {name.rpartition(":")[2]: digest for name, digest in digests.items()}


def test_stages_of_a_pipeline_equal_one_rank(tmp_path: Path) -> None:
    """CASE R26: two stages of a pipeline, of which each has layers that the other lacks and both
    have the tied embeddings, follow together: they hold and say what a fresh pair does, and hold
    what one rank would."""
    run = TinyRun(tmp_path, tiny_qwen3(tmp_path / "model", tied=True))
    # Without a warm-up vLLM's later stages have no place for what earlier ones send: in this mode
    # there is one, and still nothing is compiled.
    warm = {"enforce_eager": False, "compilation_config": {"mode": 1}}
    stages = {"pipeline_parallel_size": 2, **MANY, **warm}
    last, ours = followed(run, {}, **stages)
    assert ours == served_by_a_fresh_one(run, last, **stages)
    (whole,), _said = served_by_a_fresh_one(run, last)
    first, second = map(without_rank, ours[0])
    assert first.keys() & second.keys() == {"model.embed_tokens.weight"}
    assert first | second == second | first == without_rank(whole)
