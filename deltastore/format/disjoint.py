"""Two blocks that write one element apply in an order nobody agreed on: boxes are disjoint."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.errors import FormatError, Kind
from deltastore.format.box import Box
from deltastore.format.kernels_base import Array, frozen, kernel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from deltastore.format.indices import Numbers
    from deltastore.format.layout import Layout

MAX_BOXES_PER_TENSOR = 1 << 13
"""Most boxes (other than runs) of one tensor in a segment: they are compared pair by pair."""


@kernel
def first_overlap(starts: Array, ends: Array) -> Any:
    """A pair of boxes that share an element, or (-1, -1); boxes are sorted by their first start."""
    count, rank = starts.shape
    for i in range(count):
        for j in range(i + 1, count):
            if starts[j, 0] >= ends[i, 0]:
                break
            shared = True
            for d in range(1, rank):
                if starts[j, d] >= ends[i, d] or starts[i, d] >= ends[j, d]:
                    shared = False
                    break
            if shared:
                return i, j
    return -1, -1


def check_boxes(tensors: Numbers, boxes: Sequence[Box]) -> None:
    """Check the boxes of a segment, in its order: runs and other boxes are never mixed in a tensor,
    starts increase, and no two boxes share an element. (Runs are disjoint as they are stored.)
    """
    for tensor, group in groupby(zip(tensors.tolist(), boxes, strict=True), lambda pair: pair[0]):
        held = [box for _tensor, box in group]
        if all(box.flat for box in held):
            continue
        if any(box.flat for box in held):
            raise FormatError(f"tensor {tensor} has runs and other boxes", kind=Kind.BOX)
        if len(held) > MAX_BOXES_PER_TENSOR:
            raise FormatError(f"tensor {tensor} has {len(held)} boxes", kind=Kind.LIMIT)
        if any(before.start >= after.start for before, after in pairwise(held)):
            raise FormatError(f"boxes of tensor {tensor} are not ascending", kind=Kind.ORDER)
        _check_pairs(tensor, held)


def check_disjoint(layout: Layout, boxes: Iterable[tuple[int, Box]]) -> None:
    """FormatError(box) when two boxes of a version share an element, in one segment or in several.

    `boxes` are pairs of tensor position and box: blocks need not be kept for this.
    """
    by_tensor: dict[int, list[Box]] = {}
    for position, box in boxes:
        by_tensor.setdefault(position, []).append(box)
    for tensor, held in by_tensor.items():
        if all(box.flat for box in held):
            runs = sorted((box.start[0], box.shape[0]) for box in held)
            if any(start + size > after for (start, size), (after, _n) in pairwise(runs)):
                raise FormatError(f"blocks of tensor {tensor} overlap", kind=Kind.BOX)
            continue
        shape = layout.tensors[tensor].element_shape
        split = [part for box in held for part in (run_boxes(box, shape) if box.flat else (box,))]
        _check_pairs(tensor, sorted(split, key=lambda box: box.start))


def run_boxes(run: Box, shape: tuple[int, ...]) -> Iterator[Box]:
    """The boxes of a tensor of that shape that a flat run consists of: at most 2 x rank - 1."""
    start, left = run.start[0], run.shape[0]
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    while left and shape:
        # The longest step is along the first dimension whose rows the run can take whole.
        for d, stride in enumerate(strides):
            if stride and start % stride == 0 and left >= stride:
                inside = (start // stride) % shape[d]
                rows = min(left // stride, shape[d] - inside)
                place = tuple((start // s) % n for s, n in zip(strides, shape, strict=True))
                sizes = (*(1 for _ in range(d)), rows, *shape[d + 1 :])
                yield Box(place, sizes, flat=False)
                start += rows * stride
                left -= rows * stride
                break
    if left:
        yield Box((), (), flat=False)


def _check_pairs(tensor: int, boxes: Sequence[Box]) -> None:
    if boxes and not boxes[0].shape:
        if len(boxes) > 1:
            raise FormatError(f"blocks of tensor {tensor} overlap", kind=Kind.BOX)
        return
    starts = np.array([box.start for box in boxes], np.int64)
    ends = starts + np.array([box.shape for box in boxes], np.int64)
    i, j = first_overlap(frozen(starts), frozen(ends))
    if i >= 0:
        raise FormatError(
            f"blocks of tensor {tensor} overlap: boxes {boxes[i]} and {boxes[j]}", kind=Kind.BOX
        )
