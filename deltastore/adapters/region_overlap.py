"""Two writes that meet in one element make neither a placement: here strided sets are compared.

Interleaved columns of one tensor overlap as ranges and share no element. The comparison is exact
and never walks elements: it descends through the strides of both sets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MAX_STEPS = 1 << 16
"""Of one comparison; beyond it two sets count as overlapping, which is the safe answer."""


@dataclass(frozen=True, slots=True, order=True)
class Strided:
    """The numbers offset + sum(i_k * strides[k]), each once.

    Dimensions are in order of falling strides, none has size 1, neighbours that are one run are
    one dimension; `nested` makes it so.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers there are."""
        return math.prod(self.sizes)

    @property
    def end(self) -> int:
        """One more than the greatest."""
        return self.offset + _extent(tuple(zip(self.sizes, self.strides, strict=True)))


def nested(offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Strided | None:
    """The canonical form; None if a number occurs twice or strides do not contain each other."""
    pairs = sorted(
        ((stride, size) for size, stride in zip(sizes, strides, strict=True) if size != 1),
        reverse=True,
    )
    merged: list[tuple[int, int]] = []
    for stride, size in pairs:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    reach = 1
    for size, stride in reversed(merged):
        if stride < reach:
            return None
        reach += (size - 1) * stride
    return Strided(offset, tuple(n for n, _ in merged), tuple(s for _, s in merged))


def overlap(first: Strided, second: Strided) -> bool:
    """Whether the two share a number."""
    if first.elements == 0 or second.elements == 0:
        return False
    steps = [MAX_STEPS]
    a = tuple(zip(first.sizes, first.strides, strict=True))
    b = tuple(zip(second.sizes, second.strides, strict=True))
    return _meet(a, b, second.offset - first.offset, steps)


def overlapping_pairs(sets: Sequence[Strided]) -> Iterator[tuple[int, int]]:
    """Positions (smaller first) of all pairs that share a number; equal ones too."""
    active: list[int] = []
    for at in sorted(range(len(sets)), key=lambda i: sets[i].offset):
        active = [i for i in active if sets[i].end > sets[at].offset]
        for other in active:
            if overlap(sets[other], sets[at]):
                yield min(other, at), max(other, at)
        active.append(at)


def count_disjoint(sets: Iterable[Strided]) -> int | None:
    """How many numbers the distinct sets have together; None if two distinct ones overlap."""
    distinct = sorted(set(sets))
    if any(True for _ in overlapping_pairs(distinct)):
        return None
    return sum(one.elements for one in distinct)


def _extent(dims: tuple[tuple[int, int], ...]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in dims)


def _meet(
    a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...], gap: int, steps: list[int]
) -> bool:
    """Whether a number of `a` equals `gap` plus a number of `b`; both begin at 0."""
    steps[0] -= 1
    if steps[0] < 0:
        return True
    if gap >= _extent(a) or -gap >= _extent(b):
        return False
    if not a and not b:
        return gap == 0
    if not a or (b and b[0][1] > a[0][1]):
        return _meet(b, a, -gap, steps)
    (size, stride), inner = a[0], a[1:]
    if b and b[0][1] == stride:
        # Rows of both have one pitch: only the difference of the row numbers matters.
        other, rest = b[0][0], b[1:]
        low = max(-(other - 1), -((_extent(inner) - 1 - gap) // stride))
        high = min(size - 1, (gap + _extent(rest) - 1) // stride)
        return any(_meet(inner, rest, gap - rows * stride, steps) for rows in range(low, high + 1))
    low = max(0, -((_extent(inner) - 1 - gap) // stride))
    high = min(size - 1, (gap + _extent(b) - 1) // stride)
    for row in range(low, high + 1):
        if _meet(inner, b, gap - row * stride, steps):
            return True
        if steps[0] < 0:
            break
    return steps[0] < 0
