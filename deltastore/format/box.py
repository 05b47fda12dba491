"""Sharded writers that flatten on their own overlap or leave gaps: a box says what it covers.

A box is a region of one tensor. Flat boxes are runs of the tensor's row-major order and serve whole
tensors; boxes with a start and a shape per dimension are what sharded trainers and tensor-parallel
actors hold. Indices inside a box are row-major in the box's own shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BOX_ELEMENTS = 1 << 22
"""Most elements in one box: indices in it fit 22 bits, scratch memory for it is bounded."""
MAX_RANK = 16


@dataclass(frozen=True, slots=True)
class Box:
    """A region of one tensor.

    Args:
        start: first element per dimension; of a flat box one number, in row-major order.
        shape: elements per dimension; of a flat box one number.
        flat: whether the numbers count the flattened tensor.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    flat: bool = True

    @classmethod
    def run(cls, start: int, count: int) -> Box:
        """The flat box of `count` elements from `start` in row-major order."""
        return cls((start,), (count,), flat=True)

    @property
    def elements(self) -> int:
        """How many elements the box holds."""
        return math.prod(self.shape)

    def fits(self, tensor_shape: tuple[int, ...]) -> bool:
        """Whether the box is well formed and lies inside a tensor of that element shape."""
        if self.flat and len(self.start) == len(self.shape) == 1:
            start, count = self.start[0], self.shape[0]
            return start >= 0 and 0 <= count <= math.prod(tensor_shape) - start
        if self.flat or len(self.start) != len(self.shape):
            return False
        if min((*self.start, *self.shape), default=0) < 0:
            return False
        return len(self.start) == len(tensor_shape) and all(
            s + n <= full for s, n, full in zip(self.start, self.shape, tensor_shape, strict=True)
        )

    def tensor_offsets(
        self, indices: NDArray[np.integer], tensor_shape: tuple[int, ...]
    ) -> NDArray[np.int64]:
        """Row-major offsets in the tensor, int64, of the box's own indices."""
        wide = indices.astype(np.int64)
        if self.flat:
            return wide + self.start[0]
        if not self.shape:
            return wide
        coordinates = np.unravel_index(wide, self.shape)
        offsets = np.zeros(wide.shape, np.int64)
        for coordinate, first, full in zip(coordinates, self.start, tensor_shape, strict=True):
            offsets = offsets * full + (coordinate + first)
        return offsets

    def offsets_of(
        self, indices: NDArray[np.integer] | None, tensor_shape: tuple[int, ...]
    ) -> NDArray[np.int64]:
        """Like `tensor_offsets`; None means every element of the box, in order."""
        if indices is None:
            indices = np.arange(self.elements, dtype=np.int64)
        return self.tensor_offsets(indices, tensor_shape)
