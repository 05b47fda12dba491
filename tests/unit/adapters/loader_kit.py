"""Stub engines: a module, its own idea of a loader, and what a real load would have made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deltastore.adapters.float_casts import widen
from deltastore.adapters.loader_trace import LoaderTrace, trace_loader
from deltastore.adapters.torch_tensors import device_patterns, integer_view, torch_dtype
from deltastore.format.dtypes import DType
from deltastore.format.layout import BitState, Layout, TensorEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Weights = Iterable[tuple[str, torch.Tensor]]
    Loader = Callable[[torch.nn.Module, Weights], object]

BF16 = torch.bfloat16


class Engine(torch.nn.Module):
    """Parameters by name, and a loader."""

    def __init__(self, loader: Loader, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in parameters.items():
            setattr(self, name, torch.nn.Parameter(tensor, requires_grad=False))
        self.loader = loader

    def load_weights(self, weights: Weights) -> object:
        """Run the loader on this module."""
        return self.loader(self, weights)


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A parameter's tensor."""
    return torch.zeros(shape, dtype=dtype)


def layout_of(shapes: dict[str, tuple[int, ...]], **dtypes: DType) -> Layout:
    """A layout of BF16 tensors, but for those of other dtypes."""
    return Layout.build(
        TensorEntry(name, dtypes.get(name, DType.BF16), shape) for name, shape in shapes.items()
    )


def random_state(layout: Layout, seed: int = 0) -> BitState:
    """All patterns: NaN payloads, -0, infinities, subnormals."""
    numbers = np.random.default_rng(seed)
    state = BitState.zeros(layout)
    for bits in state.arrays:
        bits[...] = numbers.integers(0, 1 << (8 * bits.itemsize), bits.size, dtype=bits.dtype)
    return state


def tensors_of(state: BitState) -> list[tuple[str, torch.Tensor]]:
    """The state as a checkpoint's tensors."""
    return [
        (
            spec.name,
            device_patterns(bits, torch.device("cpu"))
            .clone()
            .view(torch_dtype(spec.dtype))
            .view(spec.shape),
        )
        for spec, bits in zip(state.layout.tensors, state.arrays, strict=True)
    ]


def memory_of(module: torch.nn.Module) -> dict[str, bytes]:
    """Every byte of the parameters and buffers."""
    return {
        name: integer_view(tensor.detach()).contiguous().numpy().tobytes()
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }


def traced(engine: Engine, layout: Layout, **options: Any) -> LoaderTrace:
    """The trace; the engine must be as it was."""
    before = memory_of(engine)
    trace = trace_loader(engine, engine.load_weights, layout, **options)
    assert memory_of(engine) == before
    return trace


def write(trace: LoaderTrace, state: BitState) -> None:
    """Write a whole state through the placements."""
    for placement in trace.placements:
        region = placement.region
        flat = device_patterns(state.arrays[region.tensor], torch.device("cpu"))
        source = flat.as_strided(region.sizes, region.strides, region.offset)
        if placement.widened:
            dtype = state.layout.tensors[region.tensor].dtype
            source = widen(source.reshape(-1), dtype).view(source.shape)
        integer_view(placement.live).copy_(source)


def require_same_as_loading(engine: Engine, layout: Layout) -> LoaderTrace:
    """Writing through placements must leave the bytes that the loader itself leaves."""
    trace = traced(engine, layout)
    assert not trace.dense_only
    for seed in range(3):
        state = random_state(layout, seed)
        engine.load_weights(tensors_of(state))
        expected = memory_of(engine)
        for parameter in engine.parameters():
            integer_view(parameter.detach()).fill_(-1)
        write(trace, state)
        assert memory_of(engine) == expected
    return trace


def reasons(trace: LoaderTrace, layout: Layout) -> dict[str, str]:
    """Why tensors are dense-only, by name."""
    return {layout.tensors[tensor].name: why for tensor, why in trace.dense_only.items()}
