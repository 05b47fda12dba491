"""What an engine says it serves is what its ranks have proved, whoever says otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deltastore.adapters.vllm.weight_marker import POISONED, mark_weights

pytestmark = pytest.mark.vllm
POINT = {"version": 7, "policy_hash": "ab" * 32}
LABEL = f"7:{'ab' * 32}"


class Core:
    """An engine core of one rank that says what it is told to."""

    def __init__(self) -> None:
        self.vllm_config = None
        self.status: dict[str, Any] = {"rank": 0, "active": None}
        self.said = "default"
        self.scheduler = SimpleNamespace(pause_state=None, set_pause_state=lambda _state: None)

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
