"""A loader reshapes what it is given before it copies: without this algebra the origin is lost.

A *piece* says which elements of a checkpoint tensor a box of another tensor consists of. Every
dimension of the box is a list of *factors* (size, stride), outermost first, so that dimensions
may be merged, split, reordered and sliced in any order and still be strided. Pure integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Factor: TypeAlias = tuple[int, int]
"""A size and a stride, in elements of the checkpoint tensor."""
Dim: TypeAlias = tuple[Factor, ...]
"""One dimension of a piece: its factors, outermost first; none is a dimension of size 1."""
Pieces: TypeAlias = "tuple[Piece, ...]"


class NotStridedError(Exception):
    """The elements are no strided view any more; the message says after what."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of some tensor, and where its elements are from.

    Args:
        source: position of the checkpoint tensor in the layout.
        start: where in the tensor the box begins, per dimension.
        offset: the element of the checkpoint tensor that its first element is.
        dims: per dimension, how its coordinates move through the checkpoint tensor.
    """

    source: int
    start: tuple[int, ...]
    offset: int
    dims: tuple[Dim, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the box."""
        return tuple(size_of(dim) for dim in self.dims)


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of the coordinates of one dimension: from `at`, with their own factors."""

    at: int
    offset: int
    dim: Dim


def whole_tensor(source: int, shape: Sequence[int]) -> Pieces:
    """The pieces of a checkpoint tensor itself; of an empty one none."""
    if math.prod(shape) == 0:
        return ()
    stride, dims = 1, []
    for size in reversed(shape):
        dims.append(fuse([(size, stride)]))
        stride *= size
    return (Piece(source, (0,) * len(shape), 0, tuple(reversed(dims))),)


def size_of(dim: Iterable[Factor]) -> int:
    """How many coordinates a dimension has."""
    return math.prod(size for size, _ in dim)


def fuse(factors: Iterable[Factor]) -> Dim:
    """The same coordinates with as few factors as possible."""
    fused: list[Factor] = []
    for size, stride in factors:
        if size == 1:
            continue
        if fused and fused[-1][1] == size * stride:
            fused[-1] = (fused[-1][0] * size, stride)
        else:
            fused.append((size, stride))
    return tuple(fused)


def permute(pieces: Pieces, order: Sequence[int]) -> Pieces:
    """The pieces after `tensor.permute(order)`."""
    return tuple(
        replace(
            piece,
            start=tuple(piece.start[k] for k in order),
            dims=tuple(piece.dims[k] for k in order),
        )
        for piece in pieces
    )


def narrow(pieces: Pieces, dim: int, start: int, length: int, step: int = 1) -> Pieces:
    """The pieces after `tensor[..., start : start + length * step : step]`.

    Raises NotStridedError.
    """
    kept: list[Piece] = []
    for piece in pieces:
        begin = piece.start[dim]
        end = begin + size_of(piece.dims[dim])
        low = max(0, -((start - begin) // step))
        high = min(length, -((start - end) // step))
        if low >= high:
            continue
        first = start + low * step - begin
        kept += [
            replace(
                piece,
                start=_put(piece.start, dim, low + part.at),
                offset=piece.offset + part.offset,
                dims=_put(piece.dims, dim, part.dim),
            )
            for part in _take(piece.dims[dim], first, high - low, step)
        ]
    return tuple(kept)


def drop(pieces: Pieces, dims: Sequence[int]) -> Pieces:
    """The pieces without these dimensions, which have size 1."""
    gone = set(dims)
    return tuple(
        replace(
            piece,
            start=tuple(a for k, a in enumerate(piece.start) if k not in gone),
            dims=tuple(d for k, d in enumerate(piece.dims) if k not in gone),
        )
        for piece in pieces
    )


def insert(pieces: Pieces, dim: int) -> Pieces:
    """The pieces with a new dimension of size 1 before `dim`."""
    return tuple(
        replace(
            piece,
            start=(*piece.start[:dim], 0, *piece.start[dim:]),
            dims=(*piece.dims[:dim], (), *piece.dims[dim:]),
        )
        for piece in pieces
    )


def expand(pieces: Pieces, old: Sequence[int], new: Sequence[int]) -> Pieces:
    """The pieces after `tensor.expand(new)`: repeated coordinates have stride 0."""
    lead = len(new) - len(old)
    for _ in range(lead):
        pieces = insert(pieces, 0)
    for dim, (before, after) in enumerate(zip((1,) * lead + tuple(old), new, strict=True)):
        if before != after:
            repeated = fuse([(after, 0)])
            pieces = tuple(replace(p, dims=_put(p.dims, dim, repeated)) for p in pieces)
    return pieces


def shift(pieces: Pieces, dim: int, by: int) -> Pieces:
    """The pieces as a part of a longer tensor, `by` coordinates further along `dim`."""
    return tuple(
        replace(piece, start=_put(piece.start, dim, piece.start[dim] + by)) for piece in pieces
    )


def reshape(pieces: Pieces, old: Sequence[int], new: Sequence[int]) -> Pieces:
    """The pieces after `tensor.reshape(new)`, where dimensions are only merged and split.

    Raises NotStridedError.
    """
    if not pieces:
        return ()
    groups = _groups(old, new)
    made: list[Piece] = []
    for piece in pieces:
        starts: list[int] = []
        dims: list[Dim] = []
        for (a, b), (c, d) in groups:
            run = _as_run(piece.start[a:b], piece.dims[a:b], old[a:b])
            for start, dim in _split(run, new[c:d]):
                starts.append(start)
                dims.append(dim)
        made.append(replace(piece, start=tuple(starts), dims=tuple(dims)))
    return tuple(made)


def _put(items: tuple, at: int, item: object) -> tuple:  # type: ignore[type-arg]
    return (*items[:at], item, *items[at + 1 :])


def _take(dim: Dim, first: int, count: int, step: int) -> list[_Part]:
    """Coordinates first, first + step, … of one dimension, as runs that are strided."""
    if step == 1 or count == 1:
        return _take_run(dim, first, count)
    (_, stride), inner = dim[0], dim[1:]
    width = size_of(inner)
    row, column = divmod(first, width)
    if step % width == 0:
        along = fuse([(count, stride * (step // width))])
        return [_Part(0, row * stride + _place(inner, column), along)]
    if row == (first + (count - 1) * step) // width:
        return _moved(_take(inner, column, count, step), row * stride)
    if width % step == 0 and column < step and count * step % width == 0:
        parts = _take(inner, column, width // step, step)
        if len(parts) == 1:
            rows = (count * step // width, stride)
            return [_Part(0, row * stride + parts[0].offset, fuse([rows, *parts[0].dim]))]
    raise NotStridedError("a stepped slice of reordered elements")


def _take_run(dim: Dim, first: int, count: int) -> list[_Part]:
    """Consecutive coordinates: a part of a row, whole rows, and a part of a row."""
    if not dim:
        return [_Part(0, 0, ())]
    (_, stride), inner = dim[0], dim[1:]
    width = size_of(inner)
    parts: list[_Part] = []
    at = 0
    row, column = divmod(first, width)
    if column or count < width:
        at = min(count, width - column)
        parts += _moved(_take_run(inner, column, at), row * stride)
    rows = (count - at) // width
    if rows:
        begin = (first + at) // width
        parts.append(_Part(at, begin * stride, fuse([(rows, stride), *inner])))
        at += rows * width
    if at < count:
        begin = (first + at) // width
        parts += _moved(_take_run(inner, 0, count - at), begin * stride, at)
    return parts


def _moved(parts: list[_Part], offset: int, at: int = 0) -> list[_Part]:
    return [_Part(at + part.at, offset + part.offset, part.dim) for part in parts]


def _place(dim: Dim, coordinate: int) -> int:
    """The offset of one coordinate."""
    offset = 0
    for size, stride in reversed(dim):
        coordinate, digit = divmod(coordinate, size)
        offset += digit * stride
    return offset


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive coordinates of one dimension that several were merged into."""

    first: int
    dim: Dim


def _groups(
    old: Sequence[int], new: Sequence[int]
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Ranges of dimensions of both shapes with equal products, as small as possible."""
    groups = []
    i = j = 0
    while i < len(old) or j < len(new):
        a, c = i, j
        have = old[i] if i < len(old) else 1
        want = new[j] if j < len(new) else 1
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while have != want:
            if have < want:
                have *= old[i]
                i += 1
            else:
                want *= new[j]
                j += 1
        groups.append(((a, i), (c, j)))
    return groups


def _as_run(start: Sequence[int], dims: Sequence[Dim], sizes: Sequence[int]) -> _Run:
    """A box of several dimensions as consecutive coordinates of their merger."""
    first, inner, whole = 0, 1, True
    for begin, dim, size in zip(reversed(start), reversed(dims), reversed(sizes), strict=True):
        count = size_of(dim)
        if not whole and count != 1:
            raise NotStridedError("a reshape of joined tensors")
        whole = whole and count == size
        first += begin * inner
        inner *= size
    return _Run(first, fuse(factor for dim in dims for factor in dim))


def _split(run: _Run, sizes: Sequence[int]) -> list[tuple[int, Dim]]:
    """Consecutive coordinates as a box of several dimensions: start and factors of each."""
    if not sizes:
        return []
    if len(sizes) == 1:
        return [(run.first, run.dim)]
    inner = math.prod(sizes[1:])
    count = size_of(run.dim)
    row, column = divmod(run.first, inner)
    if column == 0 and count % inner == 0:
        outer, rest = _cut(run.dim, inner)
        return [(row, outer), *_split(_Run(0, rest), sizes[1:])]
    if row == (run.first + count - 1) // inner:
        return [(row, ()), *_split(_Run(column, run.dim), sizes[1:])]
    raise NotStridedError("a reshape of joined tensors")


def _cut(dim: Dim, width: int) -> tuple[Dim, Dim]:
    """The outer and the inner factors of a dimension, the inner ones with `width` coordinates."""
    inner: list[Factor] = []
    for at in range(len(dim) - 1, -1, -1):
        size, stride = dim[at]
        if width == 1:
            return dim[: at + 1], tuple(inner)
        if width % size == 0:
            inner.insert(0, (size, stride))
            width //= size
        elif size % width == 0:
            inner.insert(0, (width, stride))
            return fuse([*dim[:at], (size // width, stride * width)]), tuple(inner)
        else:
            raise NotStridedError("a reshape of reordered elements")
    return (), tuple(inner)
