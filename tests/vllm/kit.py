"""Tiny checkpoints and engines on them, shared by the tests with the real engine."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from pathlib import Path

COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that the engine takes on a CPU
    "max_position_embeddings": 512,
    "eos_token_id": 511,
    "pad_token_id": 510,
    "bos_token_id": None,
    "initializer_range": 0.2,  # else all tokens are equally likely
}


def tokenizer(vocabulary: int = 512) -> PreTrainedTokenizerFast:
    """Byte level, no training data."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate(alphabet)}
    while len(vocab) < vocabulary - 2:
        vocab[f"<extra_{len(vocab)}>"] = len(vocab)
    vocab["<pad>"], vocab["<eos>"] = vocabulary - 2, vocabulary - 1
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def save_model(model: Any, folder: Path) -> Path:
    """Write a transformers model in bfloat16, with norms that are not all ones."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(folder, safe_serialization=True)
    tokenizer().save_pretrained(folder)
    return folder


def tiny_qwen3(folder: Path, *, tied: bool, seed: int = 0, **config: Any) -> Path:
    """A Qwen3 checkpoint of two layers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    settings = {**COMMON, "tie_word_embeddings": tied, **config}
    return save_model(Qwen3ForCausalLM(Qwen3Config(**settings)), folder)


def tiny_llama(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """A Llama checkpoint of two layers, with biases in its attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {**COMMON, "tie_word_embeddings": False, "attention_bias": True, **config}
    return save_model(LlamaForCausalLM(LlamaConfig(**settings)), folder)


def tiny_qwen3_moe(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """A Qwen3-MoE checkpoint of two layers and four experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    settings = {**COMMON, "tie_word_embeddings": False, **experts, **config}
    return save_model(Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings)), folder)


def start_engine(checkpoint: Path, **arguments: Any) -> Any:
    """A `vllm.LLM` small enough for tests; close it with `close_engine`."""
    from vllm import LLM

    torch.cpu._init_amx()  # the kernel's leave for tiles, which vLLM's attention uses unasked
    settings: dict[str, Any] = {
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "seed": 0,
        "kv_cache_memory_bytes": 32 << 20,
        "block_size": 32,
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    return LLM(model=str(checkpoint), **(settings | arguments))


def close_engine(engine: Any) -> None:
    """Let go of an engine's memory and processes."""
    engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()
