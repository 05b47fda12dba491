"""An engine started with somebody else's memory limits takes the machine: here they are said.

Imports nothing of vLLM: a file with these settings is checked where vLLM is not installed.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltastore.config import require

DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """How an actor runs vLLM. None leaves a choice to vLLM.

    Args:
        dtype: what the model computes in; auto: the checkpoint's own, so that weights are copies.
        max_model_len: most tokens of a prompt and its answer together.
        max_num_seqs: samples that are decoded at once.
        kv_cache_bytes: memory for keys and values, per rank.
        block_size: tokens per block of that cache.
        tensor_parallel: ranks that share the model.
        enforce_eager: no compilation and no graphs: a start of seconds, slower tokens.
        allow_dense: start even if more than 5 % of the weights can only be reloaded, not patched.
    """

    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    kv_cache_bytes: int | None = None
    block_size: int | None = None
    tensor_parallel: int = 1
    enforce_eager: bool = False
    allow_dense: bool = False

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, "vllm.dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        limits = {
            "max_model_len": 1 << 24,
            "max_num_seqs": 1 << 16,
            "kv_cache_bytes": 1 << 50,
            "block_size": 1 << 16,
            "tensor_parallel": 64,
        }
        for name, most in limits.items():
            value = getattr(self, name)
            good = value is None or (type(value) is int and 1 <= value <= most)
            require(good, f"vllm.{name}", value, f"1 to {most}")


VLLM_DEFAULTS = VllmSettings()
