"""Whatever a model's loader does: in place, or through a reload, a version equals a fresh load."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from deltastore.adapters.loader_coverage import closures, local_coverage, require_coverage
from deltastore.adapters.loader_memory import FREED
from deltastore.adapters.loader_trace import verify_bytes
from deltastore.adapters.vllm.reload import Reload
from deltastore.adapters.vllm.tracing import DERIVED, trace_engine
from deltastore.errors import InvalidInputError
from tests.unit.adapters.loader_kit import write
from tests.vllm.architectures import (
    ARCHITECTURES,
    loaded,
    read_checkpoint,
    runtime_bytes,
    tensors_of,
    write_architecture,
    write_changed,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from deltastore.format.layout import BitState

pytestmark = pytest.mark.vllm

EXPERTS = {"*.experts.*": "repacked"}
CONVOLUTION = (
    {"*.conv1d.weight": "kept in another form after loading"}
    if torch.cpu._is_avx512_bf16_supported()
    else {}
)
LATENT = {"*.kv_b_proj.weight": FREED if torch.cpu._is_amx_tile_supported() else DERIVED}
DENSE: dict[str, dict[str, str]] = {
    "qwen3_moe": EXPERTS,
    "mixtral": EXPERTS,
    "gpt_oss": {"*.experts.*_proj": "repacked"},
    "llama4": EXPERTS,
    "qwen3_next": EXPERTS | CONVOLUTION,
    "mamba2": {"*.A_log": "computed by neg"} | CONVOLUTION,
    "deepseek_v3": EXPERTS | LATENT,
}
"""What this engine does not keep as it is in the checkpoint, on this CPU: names and reasons."""


def changed_bits(state: BitState) -> BitState:
    """Other bits in every element: -0, infinities and NaN with payloads among them."""
    numbers = np.random.default_rng(1)
    other = state.copy()
    for bits in other.arrays:
        bits[...] = numbers.integers(0, 1 << 8 * bits.itemsize, bits.size, dtype=bits.dtype)
    return other


def names_of(state: BitState, tensors: Iterable[int]) -> set[str]:
    """The layout names at these positions."""
    return {state.layout.tensors[tensor].name for tensor in tensors}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_version_written_in_place_equals_a_fresh_load(name: str, tmp_path: Path) -> None:
    """CASE R5, R8: every bit of every tensor arrives; what is no copy is found and reloaded."""
    checkpoint = write_architecture(name, tmp_path / "first")
    state = read_checkpoint(checkpoint)
    layout = state.layout
    other = changed_bits(state)
    with loaded(checkpoint, tmp_path) as worker:
        model = worker.model_runner.get_model()
        before = runtime_bytes(model)
        addresses = {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()}
        trace = verify_bytes(trace_engine(model, layout), layout, state.arrays.__getitem__)
        assert runtime_bytes(model) == before

        expected = {
            spec.name: why
            for spec in layout.tensors
            for pattern, why in DENSE.get(name, {}).items()
            if fnmatch.fnmatchcase(spec.name, pattern)
        }
        found = {layout.tensors[tensor].name: why for tensor, why in trace.dense_only.items()}
        assert found == expected
        part = local_coverage(trace, layout, model)
        if FREED in found.values():
            with pytest.raises(InvalidInputError, match="kv_b_proj"):
                require_coverage(layout, [part], allow_dense=True)
            return
        report = require_coverage(layout, [part], allow_dense=True)
        assert report.placed + len(report.dense) == len(layout)
        assert (report.unused, report.unfilled) == ((), ())

        groups = closures(trace, layout)
        reload = Reload(model, worker.model_config, groups, layout)
        named = list(tensors_of(other).items())
        reload.prove(state.arrays.__getitem__)
        assert runtime_bytes(model) == before
        write(trace, other)
        for group in groups:
            reload([named[tensor] for tensor in group.tensors])
        after = runtime_bytes(model)
        assert {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()} == addresses
    with loaded(write_changed(other, checkpoint, tmp_path / "other"), tmp_path) as fresh:
        wanted = runtime_bytes(fresh.model_runner.get_model())
    assert {n for n in wanted if wanted[n] != after[n]} == set()
    assert after.keys() == wanted.keys()


def test_one_expert_is_reloaded_with_all_that_share_its_module(tmp_path: Path) -> None:
    """CASE R5, R8: one changed expert equals a fresh load; other layers keep their bytes."""
    checkpoint = write_architecture("qwen3_moe", tmp_path / "first")
    state = read_checkpoint(checkpoint)
    layout = state.layout
    other = state.copy()
    changed = layout.position("model.layers.1.mlp.experts.2.up_proj.weight")
    assert changed is not None
    other.arrays[changed][::7] ^= 1
    with loaded(checkpoint, tmp_path) as worker:
        model = worker.model_runner.get_model()
        before = runtime_bytes(model)
        trace = verify_bytes(trace_engine(model, layout), layout, state.arrays.__getitem__)
        (group,) = (one for one in closures(trace, layout) if changed in one.tensors)
        siblings = {
            spec.name for spec in layout.tensors if spec.name.startswith("model.layers.1.mlp.exp")
        }
        assert names_of(state, group.tensors) == siblings
        named = list(tensors_of(other).items())
        reload = Reload(model, worker.model_config, [group], layout)
        reload([named[tensor] for tensor in group.tensors])
        after = runtime_bytes(model)
        with pytest.raises(InvalidInputError, match=r"1 tensors.*experts\.2\.up_proj"):
            reload([named[tensor] for tensor in group.tensors if tensor != changed])
        with pytest.raises(InvalidInputError, match="no closure"):
            reload([*(named[tensor] for tensor in group.tensors), named[0]])
        assert runtime_bytes(model) == after
    with loaded(write_changed(other, checkpoint, tmp_path / "other"), tmp_path) as fresh:
        wanted = runtime_bytes(fresh.model_runner.get_model())
    assert after == wanted
    (touched,) = {n for n in after if after[n] != before[n]}
    assert touched == "model.layers.1.mlp.experts.routed_experts.w13_weight"
