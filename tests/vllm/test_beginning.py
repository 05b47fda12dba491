"""Ranks that begin to follow do so together, however many of them failed the last time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from deltastore.adapters.vllm import backend
from deltastore.errors import ApplyError, DeltastoreError, Kind, StorageError
from deltastore.pipeline.group import ThreadGroup
from tests.vllm.kit import tiny_qwen3
from tests.vllm.runs import TinyRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.vllm


class Ranks:
    """Two ranks of the backend in threads; each has all weights of a model without an engine."""

    def __init__(self, run: TinyRun, groups: list[ThreadGroup]) -> None:
        self.groups = groups
        self.run = run
        self.engines = [self._engine() for _ in groups]

    def all(self, call: Callable[[Any], Any], ranks: tuple[int, ...] = (0, 1)) -> list[Any]:
        """What each rank answers or raises."""

        def outcome(rank: int) -> Any:
            try:
                return call(self.engines[rank])
            except DeltastoreError as err:
                return err

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(outcome, ranks))

    def versions(self) -> list[int | None]:
        """Where each rank says that it is."""
        found = [engine.status()["active"] for engine in self.engines]
        return [None if one is None else one["version"] for one in found]

    def _engine(self) -> Any:
        from transformers import Qwen3ForCausalLM

        model = Qwen3ForCausalLM.from_pretrained(self.run.checkpoint, dtype=torch.bfloat16)
        parameters = dict(model.named_parameters())

        def load_weights(weights: Any) -> None:
            for name, tensor in weights:
                parameters[name].data.copy_(tensor)

        model.load_weights = load_weights
        settings = self.run.settings(checkpoint=str(self.run.checkpoint), engine="e")
        config: Any = SimpleNamespace(
            additional_config={"deltastore": settings},
            model_config=SimpleNamespace(
                model=str(self.run.checkpoint),
                quantization=None,
                hf_config=SimpleNamespace(),
                dtype=torch.bfloat16,
            ),
            lora_config=None,
            speculative_config=None,
            load_config=SimpleNamespace(load_format="auto", download_dir=None),
            parallel_config=SimpleNamespace(nnodes=1, data_parallel_index=0),
        )
        made = backend.DeltastoreEngine(
            SimpleNamespace(backend="deltastore"), config, torch.device("cpu"), model
        )
        made.errors_are_answers = True
        return made


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Both, not begun."""
    run = TinyRun(tmp_path, tiny_qwen3(tmp_path / "model", tied=False))
    groups = ThreadGroup.of(2, timeout_s=20)
    given = iter(groups)
    monkeypatch.setattr(backend, "set_current_vllm_config", lambda _config: nullcontext())
    monkeypatch.setattr(backend, "engine_group", lambda _timeout_s: None)
    made = Ranks(run, groups)
    for engine in made.engines:
        engine._group = next(given)
    yield made
    made.all(lambda engine: engine.shutdown())
    run.close()


def initialise(engine: Any) -> None:
    """As vLLM calls it."""
    engine.init_transfer_engine(engine.parse_init_info({}))


def test_a_rank_that_missed_a_beginning_is_met_at_the_next(ranks: Ranks) -> None:
    """CASE R22: who does not come to a beginning fails it for the others; at the next call all
    begin, and also when the last one had ended well on one rank alone."""
    ranks.run.publish()
    dead = ranks.engines[1]
    dead_begins = dead._begin

    def dies(*_arguments: Any) -> None:
        ranks.groups[1].leave()
        raise ApplyError("killed", kind=Kind.NOT_STAGED)

    dead._begin = dies
    first, second = ranks.all(initialise)
    assert (first.kind, second.kind) == (Kind.VOTE_TIMEOUT, Kind.NOT_STAGED)
    dead._begin = dead_begins
    assert ranks.all(initialise) == [None, None]
    assert ranks.versions() == [0, 0]
    assert ranks.all(initialise) == [None, None], "again is harmless"
    dead.shutdown()
    assert ranks.versions() == [0, None]
    assert ranks.all(initialise) == [None, None]
    assert ranks.versions() == [0, 0]
    assert {engine.status()["poisoned"] for engine in ranks.engines} == {""}


@pytest.mark.parametrize("what", ["stager", "token"])
def test_what_rank_0_cannot_do_ends_the_beginning_for_all(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A stager that cannot be started, or a file that cannot be removed, is every rank's error at
    once, and the next beginning is whole."""

    def full(*_arguments: Any, **_named: Any) -> None:
        raise StorageError("no space", kind=Kind.DISK_FULL)

    with monkeypatch.context() as patch:
        if what == "stager":
            patch.setattr(backend, "ChildStager", full)
        else:
            patch.setattr(Path, "unlink", full)
        found = ranks.all(initialise)
    assert [error.kind for error in found] == [Kind.DISK_FULL] * 2
    assert ranks.all(initialise) == [None, None]


def test_doubt_outlives_the_following(ranks: Ranks) -> None:
    """Shut down while its weights are in doubt a rank says so still, until it has begun anew."""
    assert ranks.all(initialise) == [None, None]
    ranks.engines[1].fell_asleep(2)
    ranks.all(lambda engine: engine.shutdown())
    assert "sleep level 2" in ranks.engines[1].status()["poisoned"]
    ranks.all(lambda engine: engine.woke_up())
    assert ranks.all(initialise) == [None, None]
    assert ranks.engines[1].status()["poisoned"] == ""
