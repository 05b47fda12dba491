"""A system that vouches for itself proves nothing: here its output is read by other people's code.

Checkpoints are compared by the safetensors library and questioned through transformers.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from workers.causal_lm import load_model

if TYPE_CHECKING:
    from pathlib import Path


def compare_checkpoints(one: Path, other: Path) -> tuple[list[str], int]:
    """Names of tensors that differ in a bit, dtype or shape, or are in one only; and how many.

    Folders of safetensors files, or single ones, read by the safetensors library.
    """
    ours, theirs = _read_tensors(one), _read_tensors(other)
    different = sorted(ours.keys() ^ theirs.keys())
    different += [
        name for name in sorted(ours.keys() & theirs.keys()) if ours[name] != theirs[name]
    ]
    return different, len(ours)


def ask(checkpoint: Path, question: str) -> str:
    """The greedy answer of a checkpoint, loaded by transformers."""
    model = load_model(checkpoint)
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        answer = model.generate(**tokens, max_new_tokens=16, do_sample=False)
    said = tokenizer.decode(answer[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
    return str(said).strip()


def _read_tensors(place: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Digest of every tensor's bits, with its dtype and shape."""
    found = {}
    for path in sorted(place.glob("*.safetensors")) if place.is_dir() else [place]:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(name)
                bits = tensor.reshape(-1).view(torch.uint8).numpy()
                digest = hashlib.sha256(bits.data).digest()
                found[name] = (str(tensor.dtype), tuple(tensor.shape), digest)
    return found
