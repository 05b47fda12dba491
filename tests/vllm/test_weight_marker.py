"""What an engine says it serves is what its ranks have proved, whoever says otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from deltastore.adapters.vllm.weight_marker import POISONED, mark_weights
from deltastore.errors import ApplyError, Kind
from tests.vllm.kit import close_engine, start_engine, tiny_qwen3
from tests.vllm.runs import TinyRun, initialise, update

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.vllm
POINT = {"version": 7, "policy_hash": "ab" * 32}
LABEL = f"7:{'ab' * 32}"


class Core:
    """An engine core of one rank that says what it is told to."""

    def __init__(self) -> None:
        self.vllm_config = None
        self.status: dict[str, Any] = {"rank": 0, "active": None}
        self.said = "default"
        self.scheduler = SimpleNamespace(
            pause_state=PauseState.UNPAUSED, set_pause_state=lambda _state: None
        )
        self.resets: list[tuple[bool, bool]] = []
        self.empties = True

    def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        """As vLLM's: whether caches are empty now."""
        self.resets.append((reset_running_requests, reset_connector))
        return self.empties

    def collective_rpc(self, method: str, *_arguments: Any) -> list[Any]:
        """The status; nothing of other calls."""
        return [self.status if method == "deltastore_status" else None]

    def resume_scheduler(self) -> None:
        """Nothing is paused."""

    def preprocess_add_request(self) -> None:
        """Nothing is asked."""

    def set_weight_version(self, weight_version: str) -> None:
        """As vLLM's."""
        self.said = weight_version


def test_nobody_names_a_version_that_is_not_proved() -> None:
    """While the engine follows, a label that somebody else gives changes nothing, "poisoned" least
    of all; before it follows, and after, it is theirs."""

    class Marked(Core):
        pass

    mark_weights(Marked, lambda _config: True)
    core = Marked()
    core.set_weight_version("mine")
    assert core.said == "mine"
    core.status = {"rank": 0, "active": POINT}
    core.collective_rpc("init_weight_transfer_engine")
    assert core.said == LABEL
    core.set_weight_version("mine")
    assert core.said == LABEL
    core.status = {"rank": 0, "active": POINT, "poisoned": "a write broke off"}
    core.collective_rpc("update_weights")
    core.set_weight_version(LABEL)
    assert core.said == POISONED
    core.status = {"rank": 0, "active": None}
    core.collective_rpc("shutdown_weight_transfer_engine")
    core.set_weight_version("mine")
    assert core.said == "mine"


def test_caches_go_when_the_version_moves() -> None:
    """CASE R7: what the weights before computed is dropped with them, once; a cache that says that
    it is not empty fails the call, but for who has paused the engine and resets it again."""

    class Marked(Core):
        pass

    mark_weights(Marked, lambda _config: True)
    core = Marked()
    core.status = {"rank": 0, "active": POINT}
    core.collective_rpc("update_weights")
    core.collective_rpc("finish_weight_update")
    assert core.resets == [(True, True)]
    core.empties = False
    core.status = {"rank": 0, "active": {**POINT, "version": 8}}
    with pytest.raises(ApplyError) as failed:
        core.collective_rpc("update_weights")
    assert failed.value.kind is Kind.CACHE_RESET
    core.status = {"rank": 0, "active": {**POINT, "version": 9}}
    core.scheduler.pause_state = PauseState.PAUSED_ALL
    core.collective_rpc("update_weights")
    assert len(core.resets) == 3


def test_no_update_leaves_a_cache_of_the_weights_before(tmp_path: Path) -> None:
    """CASE R7: after vLLM's own three calls, and nothing else, a prompt that is in the prefix cache
    is answered as one that is not."""
    from vllm import SamplingParams

    prompt = {"prompt_token_ids": list(range(100, 180))}
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)

    def answer(engine: Any) -> tuple[Any, ...]:
        [one] = engine.generate([prompt], sampling, use_tqdm=False)
        said = one.outputs[0]
        rows = [{key: value.logprob for key, value in row.items()} for row in said.logprobs]
        return one.num_cached_tokens, list(said.token_ids), rows

    run = TinyRun(tmp_path, tiny_qwen3(tmp_path / "m", tied=True))
    engine = start_engine(run.checkpoint, **run.arguments())
    try:
        initialise(engine)
        answer(engine)
        cached, *before = answer(engine)
        assert cached
        run.publish(lambda: run.change(0.3))
        update(engine, 1)
        cached, *after = answer(engine)
        assert not cached
        assert after != before
        assert engine.reset_prefix_cache()
        assert answer(engine) == (0, *after)
    finally:
        close_engine(engine)
        run.close()
