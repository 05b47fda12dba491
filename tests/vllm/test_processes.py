"""What crosses a border between processes can be lost there: engines in several shapes of them.

After five versions, and after a skip from the first one's weights to the fifth's by a composite,
each is compared with a fresh one on what `deltastore replay` writes: every parameter's SHA-256,
greedy tokens, log-probs.

| ranks | core    | models                     | test                                           |
|-------|---------|----------------------------|------------------------------------------------|
| 1     | in here | Qwen3 tied, untied, Llama  | test_backend.test_an_engine_equals_a_fresh_one |
| 1     | in here | Qwen3-MoE                  | test_backend.test_repacked_experts_…           |
| 1     | apart   | Qwen3 untied               | test_a_core_of_its_own_equals_one_in_here      |
| 1     | apart   | Qwen3 tied, Llama, MoE     | test_engines_equal_fresh_ones                  |
| TP 2  | apart   | Qwen3 untied               | test_tensor_parallel.test_two_ranks_…          |
| TP 2  | apart   | Qwen3 tied, Llama          | test_engines_equal_fresh_ones                  |
| TP 2  | with    | Qwen3 untied, MoE tied     | test_engines_equal_fresh_ones                  |
| PP 2  | with    | Qwen3 tied                 | test_stages_of_a_pipeline_equal_one_rank       |

"with": the core is in the process of who uses the engine, the ranks are others. Processes are made
anew, as vLLM does on CPUs, in the two tests that have a name of their own; elsewhere they are
forked, as it does beside a GPU, from one that has imported all of it (`crash_nursery.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.kit import close_engine, start_engine, tiny_llama, tiny_qwen3, tiny_qwen3_moe
from tests.vllm.remote_engine import raised
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

    from tests.vllm.crash_nursery import Nursery

pytestmark = pytest.mark.vllm
PROBE = {"worker_extension_cls": "tests.vllm.worker_probe.WorkerProbe"}
MANY = {"distributed_executor_backend": "mp"}


def follow_and_skip(engine: Any, run: TinyRun) -> tuple[int, Any]:
    """An engine's whole way: its last version, and what it served there and at the fifth."""
    initialise(engine)
    assert engine.get_weight_version() == run.label(0)
    fifth = follow_five(engine, run)
    last = skip_to_the_fifth(engine, run)
    skipped = served(engine)
    assert len(statuses(engine)) == len(skipped[0])
    assert fifth == skipped
    return last, skipped


def checkpoint_of(model: str, folder: Path) -> Path:
    """A tiny checkpoint of that kind."""
    match model:
        case "llama":
            return tiny_llama(folder)
        case "experts":
            return tiny_qwen3_moe(folder, tie_word_embeddings=True)
    return tiny_qwen3(folder, tied=model == "tied")


def test_a_core_of_its_own_equals_one_in_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASE R6, R8, R26: an engine core in a process of its own follows as one in this process does,
    and serves what a fresh one in this process serves."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    run = TinyRun(tmp_path, tiny_qwen3(tmp_path / "model", tied=False))
    engine = start_engine(run.checkpoint, **run.arguments(), **PROBE)
    try:
        last, ours = follow_and_skip(engine, run)
    finally:
        close_engine(engine)
        run.close()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    assert ours == served_by_a_fresh_one(run, last)


SHAPES: dict[str, dict[str, Any]] = {
    "apart": {"processes": True},
    "two, apart": {"tensor_parallel_size": 2, **MANY, "processes": True},
    "two": {"tensor_parallel_size": 2, **MANY},
}


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("tied", "apart"),
        ("llama", "apart"),
        ("experts", "apart"),
        ("tied", "two, apart"),
        ("llama", "two, apart"),
        ("untied", "two"),
        ("experts", "two"),
    ],
)
def test_engines_equal_fresh_ones(model: str, shape: str, nursery: Nursery, tmp_path: Path) -> None:
    """CASE R2, R8, R26: weights that each of two ranks has a half of, experts of which they reload
    what they cannot write in place, tied embeddings: whatever an engine is made of, it equals a
    fresh one of the same shape."""
    run = TinyRun(tmp_path, checkpoint_of(model, tmp_path / "model"))
    arguments = run.arguments(allow_dense=model == "experts")
    with raised(nursery, run.checkpoint, **arguments, **PROBE, **SHAPES[shape]) as engine:
        last, ours = follow_and_skip(engine, run)
        dense = [one["dense_share"] > 0 for one in statuses(engine)]
    run.close()
    assert len(ours[0]) == SHAPES[shape].get("tensor_parallel_size", 1)
    assert dense == [model == "experts"] * len(ours[0])
    assert ours == served_by_a_fresh_one(run, last, nursery, **SHAPES[shape])


def without_rank(digests: dict[str, str]) -> dict[str, str]:
    """Digests by the parameter's name alone, which vLLM writes behind its rank's."""
    return {name.rpartition(":")[2]: digest for name, digest in digests.items()}


def test_stages_of_a_pipeline_equal_one_rank(nursery: Nursery, tmp_path: Path) -> None:
    """CASE R26: two stages of a pipeline, of which each has layers that the other lacks and both
    have the tied embeddings, follow together: they hold and say what a fresh pair does, and hold
    what one rank would."""
    run = TinyRun(tmp_path, tiny_qwen3(tmp_path / "model", tied=True))
    # Without a warm-up vLLM's later stages have no place for what earlier ones send: in this mode
    # there is one, and still nothing is compiled.
    warm = {"enforce_eager": False, "compilation_config": {"mode": 1}}
    stages = {"pipeline_parallel_size": 2, **MANY, **warm}
    with raised(nursery, run.checkpoint, **run.arguments(), **PROBE, **stages) as engine:
        last, ours = follow_and_skip(engine, run)
    run.close()
    assert ours == served_by_a_fresh_one(run, last, nursery, **stages)
    (whole,), _said = served_by_a_fresh_one(run, last, nursery)
    first, second = map(without_rank, ours[0])
    assert first.keys() & second.keys() == {"model.embed_tokens.weight"}
    assert first | second == second | first == without_rank(whole)
