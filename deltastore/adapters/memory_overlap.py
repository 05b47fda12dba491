"""Views that interleave without touching look like overlaps to a range check: here bytes decide.

Columns of one fused weight share their storage and never an element: they are fine. Whether strided
views truly share a byte is decided by ranges where those are apart, and else by marking bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class MemoryView:
    """Where the elements of one tensor lie. None of its sizes is 0, no stride negative.

    Args:
        device: views on different devices never overlap.
        address: of the first element.
        shape: elements per dimension.
        strides_bytes: per dimension.
        item_bytes: of one element.
    """

    device: str
    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    item_bytes: int

    @property
    def end(self) -> int:
        """The byte after its last."""
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides_bytes, strict=True))
        return self.address + reach + self.item_bytes


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of one strided tensor are in one place: expanded views are."""
    dimensions = sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1)
    if any(stride == 0 for stride, _ in dimensions):
        return True
    reach = 1
    for stride, size in dimensions:
        if stride < reach:
            return _repeats_a_place(dimensions)
        reach = stride * (size - 1) + reach
    return False


def find_overlap(views: Sequence[MemoryView]) -> tuple[int, int] | None:
    """Positions of two views that share a byte, or None. No view may overlap itself.

    Takes memory only where ranges meet: as many bytes as those views reach over.
    """
    for cluster in _clusters(views):
        if len(cluster) == 1:
            continue
        origin = views[cluster[0]].address
        marks = np.zeros(max(views[i].end for i in cluster) - origin, np.bool_)
        for count, position in enumerate(cluster):
            window = _window(marks, views[position], origin)
            if window.any():
                return _partner(views, cluster[:count], position, marks), position
            window[...] = True
    return None


def _clusters(views: Sequence[MemoryView]) -> Iterator[list[int]]:
    """Positions grouped so that ranges of different groups are apart; lowest address first."""
    cluster: list[int] = []
    device, reach = "", 0
    for position in sorted(range(len(views)), key=lambda i: (views[i].device, views[i].address)):
        view = views[position]
        if cluster and (view.device != device or view.address >= reach):
            yield cluster
            cluster, reach = [], 0
        cluster.append(position)
        device, reach = view.device, max(reach, view.end)
    if cluster:
        yield cluster


def _partner(
    views: Sequence[MemoryView], before: list[int], position: int, marks: NDArray[np.bool_]
) -> int:
    """Which of the views before shares a byte with the one at `position`."""
    origin = views[before[0]].address
    for other in before[:-1]:
        marks[...] = False
        _window(marks, views[other], origin)[...] = True
        if _window(marks, views[position], origin).any():
            return other
    return before[-1]


def _window(marks: NDArray[np.bool_], view: MemoryView, origin: int) -> NDArray[np.bool_]:
    return np.lib.stride_tricks.as_strided(
        marks[view.address - origin :],
        (*view.shape, view.item_bytes),
        (*view.strides_bytes, 1),
    )


def _repeats_a_place(dimensions: list[tuple[int, int]]) -> bool:
    """Count places where strides alone do not tell (an unusual as_strided view)."""
    reach = sum((size - 1) * stride for stride, size in dimensions) + 1
    marks = np.zeros(reach, np.bool_)
    shape, strides = [n for _, n in dimensions], [s for s, _ in dimensions]
    np.lib.stride_tricks.as_strided(marks, shape, strides)[...] = True
    return int(marks.sum()) != math.prod(shape)
