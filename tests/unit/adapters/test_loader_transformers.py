"""A plain transformers module has no loader but its state: it is traced like any engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from deltastore.adapters.loader_coverage import local_coverage, require_coverage
from deltastore.adapters.loader_trace import trace_loader, verify_bytes
from deltastore.adapters.torch_state import ModuleSource
from deltastore.adapters.torch_tensors import integer_view
from deltastore.format.layout import Layout
from tests.unit.adapters.loader_kit import memory_of, random_state, write
from tests.unit.adapters.torch_kit import state_of

if TYPE_CHECKING:
    from tests.unit.adapters.loader_kit import Weights


@pytest.mark.parametrize("tied", [True, False])
def test_a_transformers_module_is_placed_whole(tied: bool) -> None:
    """CASE R6: every tensor is a placement, a tied head is its embedding; nothing is changed."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    source = ModuleSource(model)
    layout = Layout.build(source.entries())
    state = state_of(source, layout)

    def load(weights: Weights) -> object:
        return model.load_state_dict(dict(weights), strict=False)

    before = memory_of(model)
    trace = verify_bytes(trace_loader(model, load, layout), layout, state.arrays.__getitem__)
    assert memory_of(model) == before
    report = require_coverage(layout, [local_coverage(trace, layout, model)])
    assert (report.placed, report.dense, report.unused) == (len(layout), {}, ())
    changed = random_state(layout, seed=1)
    write(trace, changed)
    assert state_of(ModuleSource(model), layout).equals(changed)
    if tied:
        head = integer_view(model.lm_head.weight.detach())
        assert torch.equal(head, integer_view(model.model.embed_tokens.weight.detach()))
