"""Weights repacked after loading have the same shape and other bytes: so bytes are compared.

Every placement's live elements must be those of the checkpoint that the engine has loaded. A
tensor of which any differs is dense-only, as *repacked*; else writes would land in wrong elements.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from deltastore.adapters.float_casts import widen
from deltastore.adapters.torch_tensors import device_patterns, integer_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from deltastore.adapters.loader_trace import LoaderTrace
    from deltastore.adapters.placements import Placement
    from deltastore.format.dtypes import Bits
    from deltastore.format.layout import Layout

REPACKED = "repacked"
CHUNK_ELEMENTS = 1 << 22
"""Elements compared at once."""


def verify_bytes(trace: LoaderTrace, layout: Layout, read: Callable[[int], Bits]) -> LoaderTrace:
    """The trace without the placements of tensors whose live bytes are not the checkpoint's.

    Args:
        read: position -> all patterns of that tensor, flat, as the engine has loaded it.
    """
    by_tensor: dict[int, list[Placement]] = {}
    for placement in trace.placements:
        by_tensor.setdefault(placement.region.tensor, []).append(placement)
    repacked: dict[int, str] = {}
    for tensor in sorted(by_tensor):
        bits = read(tensor)
        if not all(_holds(placement, bits, layout) for placement in by_tensor[tensor]):
            repacked[tensor] = REPACKED
    return demote(trace, repacked)


def demote(trace: LoaderTrace, reasons: Mapping[int, str]) -> LoaderTrace:
    """The trace with more tensors dense-only, of those that this process holds at all.

    A tensor must be dense-only on all ranks that hold it if it is so on one: the reasons are those
    of the report over all ranks. Reasons that the trace has already stay.
    """
    unused = set(trace.unused)
    held = {tensor: why for tensor, why in reasons.items() if tensor not in unused}
    dense = dict(sorted({**held, **trace.dense_only}.items()))
    kept = tuple(p for p in trace.placements if p.region.tensor not in dense)
    return replace(trace, placements=kept, dense_only=dense)


def _holds(placement: Placement, bits: Bits, layout: Layout) -> bool:
    region, live = placement.region, placement.live
    flat = device_patterns(bits, torch.device("cpu"))
    if not region.elements:
        return True
    source = flat.as_strided(region.sizes, region.strides, region.offset)
    for part in _chunks(region.sizes):
        expected = source[part].to(live.device)
        if placement.widened:
            expected = widen(expected.reshape(-1), layout.tensors[region.tensor].dtype).view(
                expected.shape
            )
        if not torch.equal(integer_view(live[part]), expected):
            return False
    return True


def _chunks(sizes: tuple[int, ...]) -> Iterator[tuple[int | slice, ...]]:
    """Indices of parts of at most CHUNK_ELEMENTS that cover a box of these sizes."""
    if not sizes:
        yield ()
        return
    inner = 1
    for size in sizes[1:]:
        inner *= size
    if inner <= CHUNK_ELEMENTS:
        rows = max(1, CHUNK_ELEMENTS // inner)
        yield from ((slice(at, at + rows),) for at in range(0, sizes[0], rows))
        return
    for row in range(sizes[0]):
        yield from ((row, *rest) for rest in _chunks(sizes[1:]))
