"""Tiny checkpoints of many architectures, and their models as an engine's worker loads them."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import save_file

from deltastore.adapters.safetensors_dir import checkpoint_layout, load_state, scan_checkpoint
from deltastore.adapters.torch_tensors import device_patterns, integer_view, torch_dtype
from deltastore.adapters.vllm.prepacking import unpacked_weights
from tests.vllm.kit import COMMON, save_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from deltastore.format.layout import BitState

ONE = {**COMMON, "num_hidden_layers": 1}
TWO = {**COMMON, "num_hidden_layers": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "qwen3_tied": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**ONE, tie_word_embeddings=True)
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**ONE, tie_word_embeddings=False)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**ONE)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**ONE, sliding_window=64)
    ),
    "phi3": lambda: transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**_without(ONE, "head_dim", hidden_size=128))
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=512,
            n_positions=512,
            n_embd=128,
            n_layer=1,
            n_head=4,
            eos_token_id=511,
            bos_token_id=511,
        )
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**TWO, **EXPERTS, norm_topk_prob=True)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**ONE, num_local_experts=4, num_experts_per_tok=2)
    ),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **TWO,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
    "llama4": lambda: transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(
            **ONE, intermediate_size_mlp=128, num_local_experts=4, num_experts_per_tok=1
        )
    ),
    "qwen3_next": lambda: transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(
            **TWO,
            **EXPERTS,
            shared_expert_intermediate_size=64,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            layer_types=["linear_attention", "full_attention"],
        )
    ),
    "mamba2": lambda: transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(
            vocab_size=512,
            hidden_size=64,
            num_hidden_layers=1,
            num_heads=4,
            head_dim=32,
            state_size=16,
            n_groups=1,
            expand=2,
            eos_token_id=511,
            pad_token_id=510,
            bos_token_id=511,
        )
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **_without(TWO, "head_dim", num_key_value_heads=4),
            q_lora_rank=32,
            kv_lora_rank=512,
            qk_nope_head_dim=32,
            qk_rope_head_dim=64,
            v_head_dim=32,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=64,
            first_k_dense_replace=1,
            topk_method="noaux_tc",
        )
    ),
}


def _without(settings: dict[str, Any], name: str, **changed: Any) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != name} | changed


def write_architecture(name: str, folder: Path) -> Path:
    """A checkpoint of random weights."""
    torch.manual_seed(0)
    return save_model(ARCHITECTURES[name](), folder)


def read_checkpoint(folder: Path) -> BitState:
    """All of its bits, in its own layout."""
    checkpoint = scan_checkpoint(folder)
    return load_state(checkpoint, checkpoint_layout(checkpoint))


def tensors_of(state: BitState) -> dict[str, torch.Tensor]:
    """A state as a checkpoint's tensors."""
    return {
        spec.name: device_patterns(bits, torch.device("cpu"))
        .view(torch_dtype(spec.dtype))
        .view(spec.shape)
        for spec, bits in zip(state.layout.tensors, state.arrays, strict=True)
    }


def write_changed(state: BitState, like: Path, folder: Path) -> Path:
    """The checkpoint `like` with the weights of a state, in one file."""
    weights = shutil.ignore_patterns("*.safetensors", "*.index.json")
    shutil.copytree(like, folder, ignore=weights)
    save_file(tensors_of(state), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@contextmanager
def loaded(checkpoint: Path, scratch: Path) -> Iterator[Any]:
    """The worker of an engine on one CPU, with the model loaded and nothing else."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.cpu_worker import CPUWorker

    config = EngineArgs(
        model=str(checkpoint),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=32 << 20,
    ).create_engine_config()
    meeting = scratch / "meeting"
    try:
        with set_current_vllm_config(config), unpacked_weights():
            worker = CPUWorker(
                vllm_config=config,
                local_rank=0,
                rank=0,
                distributed_init_method=f"file://{meeting}",
                is_driver_worker=True,
            )
            worker.init_device()
            worker.load_model()
        yield worker
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()
        meeting.unlink(missing_ok=True)


def runtime_bytes(model: torch.nn.Module) -> dict[str, bytes]:
    """Every byte of the parameters and buffers, by their runtime names."""
    return {
        name: integer_view(tensor.detach()).contiguous().numpy().tobytes()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.numel()
    }
