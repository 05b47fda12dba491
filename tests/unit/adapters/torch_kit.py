"""Odd tensors, and a source's boxes put together: what the tests of torch modules share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deltastore.adapters.torch_state import ModuleSource
from deltastore.format.layout import BitState, Layout

if TYPE_CHECKING:
    from deltastore.format.dtypes import Bits


def layout_of(state: Any, **options: Any) -> Layout:
    """The layout of what a source offers."""
    return Layout.build(ModuleSource(state, **options).entries())


def state_of(source: ModuleSource, layout: Layout) -> BitState:
    """The boxes of a source put together; every element must come exactly once, in order."""
    parts: list[list[Bits]] = [[] for _ in layout.tensors]
    last = 0
    for box in source.boxes(layout):
        assert box.tensor >= last
        last = box.tensor
        assert box.box.flat
        assert box.box.start[0] == sum(p.size for p in parts[box.tensor])
        parts[box.tensor].append(box.bits.copy())
    return BitState(
        layout,
        [
            np.concatenate([np.empty(0, spec.dtype.bits_dtype), *found])
            for spec, found in zip(layout.tensors, parts, strict=True)
        ],
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's elements in row-major order, through torch alone."""
    dense = tensor.detach().contiguous().reshape(-1)
    return bytes(dense.view(torch.uint8).numpy()) if dense.numel() else b""


def odd_tensors() -> dict[str, torch.Tensor]:
    """One tensor of every storage shape and of every kind of dtype there is."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    fused = random(12, 10).to(torch.bfloat16)
    return {
        "plain": random(5, 7).to(torch.bfloat16),
        "transposed": random(6, 4).T,
        "permuted": random(2, 3, 4).to(torch.float16).permute(2, 0, 1),
        "columns.left": fused[:, :3],
        "columns.right": fused[:, 3:],
        "every_second": random(9)[::2],
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "positions": torch.arange(380, 390),
        "flags": torch.tensor([True, False, True]),
        "wide_counts": torch.arange(4).to(torch.uint64),
        "short_counts": torch.arange(40_000, 40_003, dtype=torch.int32).to(torch.uint16),
        "eighths": random(8).to(torch.float8_e4m3fn),
        "complex": torch.complex(random(3, 2), random(3, 2)),
        "complex_transposed": torch.complex(random(3, 2), random(3, 2)).T,
        "double": random(3).double(),
    }
