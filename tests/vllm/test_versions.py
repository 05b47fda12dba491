"""This environment's vLLM is one that is followed with, in a worker too."""

from __future__ import annotations

import pytest

from deltastore.adapters.vllm.versions import find_facts, refusal
from deltastore.errors import InvalidInputError

pytestmark = pytest.mark.vllm


def test_this_engine_has_all_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASE R25: nothing is missing; what only CPUs have is missed on CPUs, and not elsewhere."""
    from deltastore.adapters.vllm import versions

    assert refusal(find_facts(in_worker=True)) is None
    monkeypatch.setattr(versions, "USED_ON_CPU", ("vllm:nothing_of_that_name",))
    assert find_facts().missing == ("vllm:nothing_of_that_name",)
    monkeypatch.setattr(versions, "on_cpu", lambda: False)
    assert find_facts().missing == ()


def test_a_worker_names_what_its_engine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASE R25: the backend is not made where model code lacks what is used; the name is said."""
    from deltastore.adapters.vllm import versions

    monkeypatch.setattr(versions, "USED_BY_WORKERS", ("vllm.nowhere:nothing",))
    assert find_facts().missing == ()
    with pytest.raises(InvalidInputError, match="nowhere:nothing"):
        versions.checked_engine("config", "vllm_config", "device", "model")
