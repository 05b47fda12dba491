"""A test on zeros finds no misplaced tensor: small random checkpoints that real tools can load.

`tiny_checkpoint` writes a Llama that transformers loads; `next_checkpoint` writes what it might
be a few optimizer steps later. Both are deterministic in their seed and need numpy only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.errors import InvalidInputError, Kind
from deltastore.format.checkpoint_file import build_header, parse_header
from deltastore.format.dtypes import DType
from deltastore.format.layout import TensorEntry

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from deltastore.format.checkpoint_file import CheckpointHeader
    from deltastore.format.dtypes import Bits

INDEX_NAME = "model.safetensors.index.json"
_FLOATS = (DType.BF16, DType.F16, DType.F32)


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Sizes of a tiny Llama: 20 thousand parameters as they stand."""

    vocab: int = 128
    hidden: int = 32
    intermediate: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2


def tiny_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    dtype: DType = DType.BF16,
    shards: int = 1,
    extras: bool = False,
    shape: TinyShape | None = None,
) -> Path:
    """Write a tiny random Llama checkpoint and return its folder.

    Args:
        folder: made if absent.
        tied: whether the head is the embedding (then it is not stored).
        dtype: of the weights: BF16, F16 or F32.
        shards: files to spread the tensors over; more than one come with an index.
        extras: add what a Llama does not have but other models do: an FP32 router bias, an int64
            buffer, a 0-d and an empty tensor, a NaN with a payload, -0 and a subnormal.
        shape: sizes of the model.
    """
    if dtype not in _FLOATS:
        raise InvalidInputError(f"no tiny checkpoint in {dtype.value}", kind=Kind.TENSOR_DTYPE)
    size = shape or TinyShape()
    rng = np.random.default_rng(seed)
    tensors = {
        name: (TensorEntry(name, dtype, dims), _random_bits(rng, name, dtype, dims))
        for name, dims in _llama_shapes(size, tied=tied).items()
    }
    if extras:
        tensors |= _extra_tensors(rng, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _llama_config(size, tied=tied, dtype=dtype))
    _write_json(folder / "generation_config.json", {"eos_token_id": 1, "pad_token_id": 2})
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = "model.safetensors"
        if shards > 1:
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        held = names[number::shards]
        weight_map |= dict.fromkeys(held, file)
        header = build_header((tensors[name][0] for name in held), {"format": "pt"})
        _write_shard(folder / file, header, {name: tensors[name][1] for name in held})
    if shards > 1:
        total = sum(bits.nbytes for _, bits in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / INDEX_NAME, index)
    return folder


def next_checkpoint(
    source: Path, folder: Path, *, seed: int = 1, density: float = 0.01, wild: bool = True
) -> Path:
    """Write to `folder` the checkpoint `source` with about `density` of its elements changed.

    Most changes are one step of the pattern up or down, as AdamW makes them. With `wild` every
    eighth becomes any pattern at all, so that NaN, -0 and subnormals come and go.
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        body = path.read_bytes()
        if path.suffix == ".safetensors":
            header = parse_header(body)
            changed = bytearray(body)
            for tensor in header.data_order():
                start, end = header.file_range(tensor.name)
                bits = np.frombuffer(body[start:end], tensor.dtype.bits_dtype).copy()
                _change(rng, bits, density, wild=wild)
                changed[start:end] = bits.tobytes()
            body = bytes(changed)
        (folder / path.name).write_bytes(body)
    return folder


def _change(rng: np.random.Generator, bits: Bits, density: float, *, wild: bool) -> None:
    places = np.flatnonzero(rng.random(bits.size) < density)
    steps = rng.choice(np.array([1, -1]), places.size).astype(bits.dtype)
    bits[places] += steps
    if wild:
        some = places[::8]
        top = np.iinfo(bits.dtype).max
        bits[some] = rng.integers(0, top, some.size, bits.dtype, endpoint=True)


def _llama_shapes(size: TinyShape, *, tied: bool) -> dict[str, tuple[int, ...]]:
    head = size.hidden // size.heads
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (size.vocab, size.hidden)}
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (size.hidden,),
            f"{prefix}.mlp.down_proj.weight": (size.hidden, size.intermediate),
            f"{prefix}.mlp.gate_proj.weight": (size.intermediate, size.hidden),
            f"{prefix}.mlp.up_proj.weight": (size.intermediate, size.hidden),
            f"{prefix}.post_attention_layernorm.weight": (size.hidden,),
            f"{prefix}.self_attn.k_proj.weight": (size.kv_heads * head, size.hidden),
            f"{prefix}.self_attn.o_proj.weight": (size.hidden, size.heads * head),
            f"{prefix}.self_attn.q_proj.weight": (size.heads * head, size.hidden),
            f"{prefix}.self_attn.v_proj.weight": (size.kv_heads * head, size.hidden),
        }
    shapes["model.norm.weight"] = (size.hidden,)
    if not tied:
        shapes["lm_head.weight"] = (size.vocab, size.hidden)
    return shapes


def _llama_config(size: TinyShape, *, tied: bool, dtype: DType) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": {DType.BF16: "bfloat16", DType.F16: "float16", DType.F32: "float32"}[dtype],
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "vocab_size": size.vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def _random_bits(rng: np.random.Generator, name: str, dtype: DType, shape: tuple[int, ...]) -> Bits:
    scale, mean = (0.05, 1.0) if "norm" in name else (0.2, 0.0)
    return _round(rng.normal(mean, scale, shape).astype(np.float32).ravel(), dtype)


def _round(values: NDArray[np.float32], dtype: DType) -> Bits:
    if dtype is DType.F32:
        return values.view(np.uint32)
    if dtype is DType.F16:
        return values.astype(np.float16).view(np.uint16)
    wide = values.view(np.uint32)
    half = (wide >> 16) & 1  # ties go to the even pattern
    return ((wide + np.uint32(0x7FFF) + half) >> 16).astype(np.uint16)


def _extra_tensors(rng: np.random.Generator, dtype: DType) -> dict[str, tuple[TensorEntry, Bits]]:
    odd = {
        DType.BF16: [0x7FC1, 0xFFA5, 0x8000, 0x0001, 0x7F80],
        DType.F16: [0x7E01, 0xFD55, 0x8000, 0x0001, 0x7C00],
        DType.F32: [0x7FC00001, 0xFFA0BEEF, 0x80000000, 0x00000001, 0x7F800000],
    }[dtype]
    rows: list[tuple[str, DType, tuple[int, ...], Any]] = [
        ("model.router.bias", DType.F32, (8,), rng.normal(0, 1, 8).astype("<f4").view("<u4")),
        ("model.position_ids", DType.I64, (1, 16), np.arange(376, 392)),
        ("model.logit_scale", DType.F32, (), np.array([2.659], "<f4").view("<u4")),
        ("model.unused_experts", dtype, (0, 4), []),
        ("model.odd_patterns", dtype, (len(odd),), odd),
    ]
    return {
        name: (TensorEntry(name, kind, dims), np.asarray(bits).astype(kind.bits_dtype).ravel())
        for name, kind, dims, bits in rows
    }


def _write_shard(path: Path, header: CheckpointHeader, bits: Mapping[str, Bits]) -> None:
    body = [header.raw, *(bits[t.name].tobytes() for t in header.data_order())]
    path.write_bytes(b"".join(body))


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")
