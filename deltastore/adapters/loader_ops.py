"""An operation taken for a copy that is none corrupts weights: the pure copies are listed here.

Everything that is in neither list of this module makes its result opaque.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deltastore.adapters import pieces as algebra
from deltastore.adapters.lineage import Lineage, StandIn, copied, joined, opaque
from deltastore.adapters.pieces import NotStridedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    LineageOf = Callable[[torch.Tensor], Lineage]

SPLITS = {"split", "split_with_sizes", "unbind", "chunk", "unsafe_split"}
"""Views with several results."""
MAX_PICKED = 4096
"""Rows that are picked one by one; more are not worth a piece each."""


def is_view(func: Any, name: str) -> bool:
    """Whether the result of an operation shares the memory of its first tensor."""
    if name in SPLITS or name == "_unsafe_view":
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def split_views(
    name: str, base: torch.Tensor, args: Sequence[Any], kwargs: Any, count: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Per result of a splitting view, the single view (name and arguments) that makes it alone."""
    given = dict(enumerate(args))
    if name == "unbind":
        dim = given.get(0, kwargs.get("dim", 0))
        return [("select", (dim, at)) for at in range(count)]
    dim = given.get(1, kwargs.get("dim", 0))
    length = base.shape[dim]
    asked = given.get(0)
    if isinstance(asked, int):
        size = -(-length // asked) if name == "chunk" else asked
        sizes = [min(size, length - at * size) for at in range(count)]
    else:
        sizes = list(asked if asked is not None else kwargs["split_sizes"])
    return [("narrow", (dim, sum(sizes[:at]), size)) for at, size in enumerate(sizes)]


def copy_like(
    lineage_of: LineageOf, name: str, values: Sequence[Any], kwargs: Any
) -> Lineage | None:
    """The lineage of the result, of operations that copy elements and do no arithmetic.

    Args:
        values: the arguments in the order of the schema.
    Returns None for any other operation.
    """
    make = _COPIES.get(name)
    if make is None:
        return None
    try:
        return make(lineage_of, values, kwargs)
    except NotStridedError as err:
        tensors = [x for x in _flat(values) if isinstance(x, torch.Tensor)]
        return opaque(str(err), frozenset[int]().union(*(lineage_of(x).sources for x in tensors)))


def without_masks(func_name: str, args: Sequence[Any]) -> Sequence[Any]:
    """Arguments in which masks that pick rows are the numbers of those rows: meta has no masks."""
    if func_name != "index":
        return args
    rows = [
        index.nonzero().flatten() if _is_mask(index) and index.dim() == 1 else index
        for index in args[1]
    ]
    return (args[0], rows, *args[2:])


def _is_mask(index: Any) -> bool:
    plain = isinstance(index, torch.Tensor) and not isinstance(index, StandIn)
    return plain and index.dtype in (torch.bool, torch.uint8)


def _flat(values: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        flat += _flat(value) if isinstance(value, (list, tuple)) else [value]
    return flat


def _clone(lineage_of: LineageOf, values: Sequence[Any], _: Any) -> Lineage:
    return lineage_of(values[0])


def _to_copy(lineage_of: LineageOf, values: Sequence[Any], kwargs: Any) -> Lineage:
    source = values[0]
    return copied(lineage_of(source), source.dtype, kwargs.get("dtype") or source.dtype)


def _cat(lineage_of: LineageOf, values: Sequence[Any], _: Any) -> Lineage | None:
    tensors, dim = values[0], values[1]
    if len({x.dtype for x in tensors}) > 1:
        return None  # the result is promoted
    parts = [(lineage_of(x), tuple(x.shape)) for x in tensors if x.dim() > 1 or x.numel()]
    return joined(parts, dim % len(parts[0][1])) if parts else Lineage()


def _stack(lineage_of: LineageOf, values: Sequence[Any], _: Any) -> Lineage | None:
    tensors, dim = values[0], values[1]
    if len({x.dtype for x in tensors}) > 1:
        return None
    at = dim % (tensors[0].dim() + 1)
    parts = []
    for tensor in tensors:
        line = lineage_of(tensor)
        shape = (*tensor.shape[:at], 1, *tensor.shape[at:])
        pieces = algebra.insert(line.pieces, at)
        parts.append((Lineage(pieces, line.sources, line.widened, line.opaque), shape))
    return joined(parts, at)


def _pad(lineage_of: LineageOf, values: Sequence[Any], _: Any) -> Lineage | None:
    source, widths = values[0], values[1]
    line = lineage_of(source)
    if min(widths, default=0) < 0 or isinstance(values[2], torch.Tensor) or line.opaque:
        return None
    pieces = line.pieces
    for at in range(len(widths) // 2):
        pieces = algebra.shift(pieces, source.dim() - 1 - at, widths[2 * at])
    return Lineage(pieces, line.sources, line.widened)


def _index_select(lineage_of: LineageOf, values: Sequence[Any], _: Any) -> Lineage | None:
    return _picked(lineage_of, values[0], values[1], values[2])


def _index(lineage_of: LineageOf, values: Sequence[Any], _: Any) -> Lineage | None:
    given = [(dim, index) for dim, index in enumerate(values[1]) if index is not None]
    if len(given) != 1:
        return None
    return _picked(lineage_of, values[0], *given[0])


def _picked(lineage_of: LineageOf, source: torch.Tensor, dim: int, index: Any) -> Lineage | None:
    """Rows picked by a list of numbers, or by a mask, that is no stand-in."""
    line = lineage_of(source)
    if isinstance(index, StandIn) or index.dim() != 1 or lineage_of(index).sources or line.opaque:
        return None
    if _is_mask(index):
        index = index.nonzero().flatten()
    dim, length = dim % source.dim(), source.shape[dim]
    rows = [row % length for row in index.tolist()]
    if len(rows) > MAX_PICKED:
        return None
    pieces = algebra.narrow
    made: list[algebra.Piece] = []
    for at, (first, count) in _runs(rows):
        made += algebra.shift(pieces(line.pieces, dim, first, count), dim, at)
    return Lineage(tuple(made), line.sources, line.widened)


def _runs(rows: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """Consecutive rows: where they begin in the list, the first, and how many."""
    runs: list[tuple[int, tuple[int, int]]] = []
    for at, row in enumerate(rows):
        if runs and sum(runs[-1][1]) == row:
            begin, (first, count) = runs[-1]
            runs[-1] = begin, (first, count + 1)
        else:
            runs.append((at, (row, 1)))
    return runs


_COPIES: dict[str, Callable[[LineageOf, Sequence[Any], Any], Lineage | None]] = {
    "clone": _clone,
    "contiguous": _clone,
    "_pin_memory": _clone,
    "_to_copy": _to_copy,
    "cat": _cat,
    "stack": _stack,
    "constant_pad_nd": _pad,
    "index_select": _index_select,
    "index": _index,
}
