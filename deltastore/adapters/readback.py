"""A loader that collects experts in scratch memory must not lose them: here it is read back.

What was written into memory during a trace was never written: reading it means to find the writes
that the view consists of, and to express their pieces in the coordinates of the view.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.adapters.lineage import Lineage, opaque
from deltastore.adapters.pieces import Dim, Piece, size_of
from deltastore.adapters.region_overlap import Strided, nested

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from deltastore.adapters.loader_recorder import Write


def memory_of(tensor: torch.Tensor) -> Strided | None:
    """The bytes of a tensor, counted from the start of its storage; None if any is there twice."""
    width = tensor.element_size()
    return nested(
        int(tensor.storage_offset()) * width,
        (*tensor.shape, width),
        (*(stride * width for stride in tensor.stride()), 1),
    )


def read_back(view: torch.Tensor, writes: Sequence[Write]) -> Lineage:
    """The lineage of a view of memory into which a loader has written."""
    place = memory_of(view)
    met = [write for write in writes if write.meets(place)]
    sources = frozenset[int]().union(*(write.lineage.sources for write in met))
    if not sources and not any(write.lineage.opaque for write in met):
        return Lineage()
    reason = next((write.lineage.opaque for write in met if write.lineage.opaque), "")
    traced = [write for write in met if not write.constant]
    if met.index(traced[0]) != len(met) - len(traced):
        reason = reason or "cleared after it was written"
    if any(a.meets(b.place) for i, a in enumerate(traced) for b in traced[:i]):
        reason = reason or "written twice"
    widened = {write.lineage.widened for write in traced}
    if len(widened) > 1 or any(write.view.dtype != view.dtype for write in traced):
        reason = reason or "read back as another dtype"
    if not reason:
        pieces = [
            _seen(view, write.view, piece) for write in traced for piece in write.lineage.pieces
        ]
        found = tuple(piece for piece in pieces if piece is not None)
        if len(found) == len(pieces):
            return Lineage(found, sources, widened.pop())
        reason = "read back in another form"
    return opaque(reason, sources)


def _seen(view: torch.Tensor, target: torch.Tensor, piece: Piece) -> Piece | None:
    """A piece that was written into `target`, seen through another view; None if unclear."""
    offset = int(target.storage_offset()) - int(view.storage_offset())
    moves: list[tuple[int, int, int]] = []  # stride in memory, size, stride in the source
    for begin, dim, step in zip(piece.start, piece.dims, target.stride(), strict=True):
        offset += begin * step
        inner = size_of(dim)
        for size, stride in dim:
            inner //= size
            moves.append((step * inner, size, stride))
    order = sorted(
        (k for k in range(view.dim()) if view.shape[k] > 1),
        key=lambda k: view.stride(k),
        reverse=True,
    )
    start = [0] * view.dim()
    dims: list[Dim] = [()] * view.dim()
    moves.sort(reverse=True)
    for at, k in enumerate(order):
        pitch = view.stride(k)
        start[k], offset = divmod(offset, pitch)
        above = view.stride(order[at - 1]) if at else None
        mine = [m for m in moves if m[0] >= pitch and (above is None or m[0] < above)]
        reach = pitch
        for step, size, _ in reversed(mine):
            if step != reach:
                return None
            reach *= size
        dims[k] = tuple((size, stride) for _, size, stride in mine)
        if not 0 <= start[k] <= view.shape[k] - size_of(dims[k]):
            return None
    placed = sum(len(dim) for dim in dims)
    if offset or placed != len(moves):
        return None
    return Piece(piece.source, tuple(start), piece.offset, tuple(dims))
