"""An engine whose memory is partly away says so until all of it is back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltastore.adapters.vllm.backend import DeltastoreEngine
from deltastore.adapters.vllm.weight_marker import mark_weights
from deltastore.errors import ApplyError, Kind
from deltastore.pipeline.engine_control import RankStatus

pytestmark = pytest.mark.vllm


def backend() -> DeltastoreEngine:
    """One worker's part of the backend, that follows nothing yet."""
    config: Any = SimpleNamespace(
        additional_config={},
        model_config=SimpleNamespace(
            model="m", quantization=None, hf_config=SimpleNamespace(), dtype=torch.bfloat16
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        lora_config=None,
        speculative_config=None,
        parallel_config=SimpleNamespace(nnodes=1, data_parallel_index=0),
    )
    transfer: Any = SimpleNamespace(backend="deltastore")
    return DeltastoreEngine(transfer, config, torch.device("cpu"), torch.nn.Linear(2, 2))


def sleeps(engine: DeltastoreEngine) -> bool:
    """As a driver reads it."""
    return RankStatus.parse(engine.status()).asleep


def test_weights_that_are_back_are_half_an_engine() -> None:
    """Woken part by part, it sleeps until the caches are there too, in any order."""
    engine = backend()
    assert not sleeps(engine)
    for order in (["weights", "kv_cache"], ["kv_cache", "weights"]):
        engine.fell_asleep(1)
        engine.woke_up(tags=order[:1])
        assert sleeps(engine)
        engine.woke_up(order[1:])
        assert not sleeps(engine)
    engine.fell_asleep(level=2)
    engine.woke_up()
    assert not sleeps(engine)


def test_caches_that_were_given_up_are_a_sleep() -> None:
    """Released while the engine is awake: no forward pass until they are back."""
    engine = backend()
    engine.let_go(("kv_cache",))
    assert sleeps(engine)
    engine.woke_up(["kv_cache"])
    assert not sleeps(engine)


@pytest.mark.parametrize("call", ["start_weight_update", "re_anchor"])
def test_weights_are_not_written_where_they_are_not(call: str) -> None:
    """Refused while the weights are away; with the caches alone away that is no reason."""
    engine = backend()
    engine.fell_asleep(1)
    with pytest.raises(ApplyError, match="sleeps") as caught:
        engine.re_anchor()
    assert caught.value.kind is Kind.NOT_STAGED
    engine.woke_up(["weights"])
    with pytest.raises(ApplyError, match="does not follow a run yet"):
        getattr(engine, call)()


def test_a_sleeping_engine_is_not_resumed_by_anybody() -> None:
    """The engine core refuses; waking up, when all memory is back, resumes."""

    class Core:
        vllm_config = None
        asleep, resumed = True, 0

        def collective_rpc(self, *_arguments: Any) -> list[dict[str, Any]]:
            return [{"rank": 0, "asleep": self.asleep}]

        def resume_scheduler(self) -> None:
            self.resumed += 1

        def preprocess_add_request(self) -> None: ...

        def set_weight_version(self, _weight_version: str) -> None: ...

    mark_weights(Core, lambda _config: True)
    core = Core()
    with pytest.raises(ApplyError, match="sleeps"):
        core.resume_scheduler()
    core.asleep = False
    core.resume_scheduler()
    assert core.resumed == 1
