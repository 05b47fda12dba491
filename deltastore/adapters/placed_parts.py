"""Index math during the pause costs more than the write: what meets a region is located before.

A *held region* is a region of a tensor with the window of memory that it lies in. `part_of` gives
what of a block meets it. Where a region is a run and lies in memory as one, a sparse block's own
indices are the offsets, and nothing is allocated; elsewhere a change costs an offset, an element
and a value (10 bytes in BF16). Dense blocks are located again at every pass, a
piece at a time, for their offsets would be larger than they are.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.adapters.live_memory import Journal, Piece
from deltastore.errors import InvalidInputError, Kind
from deltastore.format.block import ValueKind
from deltastore.format.kernels_base import Array, frozen
from deltastore.format.kernels_placed import locate_count, locate_fill, walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from deltastore.adapters.live_memory import LiveMemory
    from deltastore.adapters.placements import Region
    from deltastore.format.block import Block
    from deltastore.format.fingerprint import Fingerprint
    from deltastore.format.layout import TensorSpec


@cache
def _counting(count: int) -> NDArray[np.uint32]:
    """0, 1, 2, …: one array per length of piece, of which a process has two."""
    return frozen(np.arange(count, dtype=np.uint32))


class HeldRegion:
    """A region and where it lies.

    Args:
        live: strides in the window, per dimension of the region.
    """

    __slots__ = ("__dict__", "linear", "live", "memory", "number", "region", "spec")

    def __init__(
        self,
        number: int,
        region: Region,
        spec: TensorSpec,
        memory: LiveMemory,
        live: tuple[int, ...],
    ) -> None:
        self.number = number
        self.region = region
        self.spec = spec
        self.memory = memory
        self.live = live
        packed = _row_major(region.sizes)
        self.linear = region.strides == packed and live == packed

    @property
    def extent(self) -> int:
        """Elements of the tensor from the region's first to its last."""
        region = self.region
        steps = zip(region.sizes, region.strides, strict=True)
        return 1 + sum((n - 1) * s for n, s in steps) if region.elements else 0

    @cached_property
    def shape(self) -> tuple[Array, Array, Array]:
        """Sizes, strides and live strides as kernels take them."""
        region = self.region
        rows = (region.sizes, region.strides, self.live)
        first, second, third = (frozen(np.array(row, np.int64)) for row in rows)
        return first, second, third

    @cached_property
    def numbers(self) -> np.dtype[Any]:
        """The dtype that offsets and elements fit in."""
        small = self.memory.size < 1 << 32 and self.spec.elements < 1 << 32
        return np.dtype(np.uint32 if small else np.int64)

    def pieces(self) -> Iterator[Piece]:
        """All its elements, in its own order, without values."""
        region = self.region
        most = self.memory.run_elements
        if self.linear:
            first = self.spec.first_element + region.offset
            for begin in range(0, region.elements, most):
                some = _counting(most)[: min(most, region.elements - begin)]
                yield Piece(some, begin, some, first + begin, run=True)
            return
        for begin in range(0, region.elements, most):
            count = min(most, region.elements - begin)
            offsets = np.empty(count, self.numbers)
            elements = np.empty(count, self.numbers)
            walk(begin, region.offset, *self.shape, offsets, elements)
            yield Piece(frozen(offsets), 0, frozen(elements), self.spec.first_element)

    def fingerprint(self) -> Fingerprint:
        """Of all its elements, as they are now."""
        return self.memory.fingerprint(self.pieces())

    def part_of(self, block: Block) -> PlacedPart | None:
        """What of the block meets the region; None when nothing does."""
        low, high = self._reach(block)
        if low >= high:
            return None
        if block.kind is ValueKind.DENSE:
            part: PlacedPart = DensePart(self, block, low, high)
            return part if part.nnz else None
        if block.indices is None:
            raise InvalidInputError("a sparse block has no indices", kind=Kind.FIELD)
        indices, values = frozen(block.indices[low:high]), frozen(block.values[low:high])
        absolute = block.kind is not ValueKind.STEPS
        if self.linear and block.box.flat:
            start = block.box.start[0]
            first = self.spec.first_element + start
            piece = Piece(indices, start - self.region.offset, indices, first, values, absolute)
        else:
            piece = self._located(block, indices, values, absolute)
        return SparsePart(self, piece) if piece.offsets.size else None

    def _reach(self, block: Block) -> tuple[int, int]:
        """Which of the block's changes can meet the region: a range of them (dense: of its box)."""
        every = block.values.size
        if not block.box.flat:
            return 0, every
        first = self.region.offset - block.box.start[0]
        last = first + self.extent
        if first <= 0 and last >= block.box.elements:
            return 0, every
        if block.indices is None:
            return max(0, first), min(every, last)
        ends = np.searchsorted(block.indices, np.clip([first, last], 0, 1 << 32).astype(np.int64))
        return int(ends[0]), int(ends[1])

    def _located(self, block: Block, indices: Array, values: Array, absolute: bool) -> Piece:
        where = (*_box_rows(block, self.spec), self.region.offset, *self.shape)
        count = int(locate_count(indices, *where))
        offsets = np.empty(count, self.numbers)
        elements = np.empty(count, self.numbers)
        chosen = np.empty(count, values.dtype)
        locate_fill(indices, *where, values, offsets, elements, chosen)
        if count == values.size:
            chosen = values
        first = self.spec.first_element
        return Piece(frozen(offsets), 0, frozen(elements), first, frozen(chosen), absolute)


@dataclass(slots=True, eq=False)
class PlacedPart(ABC):
    """What of one block meets one held region. Its journal says how far it is written."""

    held: HeldRegion
    journal: Journal = field(default_factory=Journal, kw_only=True)

    @property
    def tensor(self) -> int:
        """Position in the layout."""
        return self.held.region.tensor

    @property
    @abstractmethod
    def nnz(self) -> int:
        """How many changes."""

    @property
    @abstractmethod
    def undo_bytes(self) -> int:
        """Old bits that must be kept to undo it."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How many pieces it has."""

    @abstractmethod
    def piece(self, number: int) -> Piece:
        """One of them; the same each time."""

    def change(self) -> Fingerprint:
        """What writing it would add to the fingerprint."""
        return self.held.memory.change(map(self.piece, range(self.count)))

    def write(self, *, keep: bool) -> None:
        """Write all of it."""
        journal, memory = self.journal, self.held.memory
        journal.clear()
        journal.keep = keep
        for number in range(self.count):
            memory.write(self.piece(number), journal)

    def undo(self) -> None:
        """Undo what is written."""
        journal, memory = self.journal, self.held.memory
        while journal.writing is not None or journal.done[0]:
            memory.undo(self.piece(max(int(journal.done[0]) - 1, 0)), journal)

    def forget(self) -> None:
        """As if it had not been written."""
        self.journal.clear()


@dataclass(slots=True, eq=False)
class SparsePart(PlacedPart):
    """Changes at places that were located beforehand."""

    whole: Piece

    @property
    def nnz(self) -> int:
        """How many changes."""
        return int(self.whole.offsets.size)

    @property
    def undo_bytes(self) -> int:
        """Old bits of absolute values; steps need none."""
        values = self.whole.values
        return values.nbytes if self.whole.absolute and values is not None else 0

    @property
    def count(self) -> int:
        """How many pieces it has: one on the host."""
        return -(-self.nnz // self.held.memory.piece_elements)

    def piece(self, number: int) -> Piece:
        """One of them; the same each time."""
        most, whole = self.held.memory.piece_elements, self.whole
        if self.nnz <= most:
            return whole
        some = slice(number * most, (number + 1) * most)
        values = None if whole.values is None else whole.values[some]
        return Piece(
            whole.offsets[some], whole.base, whole.elements[some], whole.first, values,
            whole.absolute,
        )  # fmt: skip


class DensePart(PlacedPart):
    """New patterns of a box, or of the part of it that meets the region.

    Args:
        low, high: which of the box's elements can meet the region.
    """

    __slots__ = ("_block", "_high", "_low", "_most", "_nnz", "_straight")

    def __init__(self, held: HeldRegion, block: Block, low: int, high: int) -> None:
        super().__init__(held)
        self._block = block
        self._low = low
        self._high = high
        self._most = held.memory.run_elements
        self._straight = held.linear and block.box.flat
        self._nnz = high - low if self._straight else self._counted()

    @property
    def nnz(self) -> int:
        """How many elements."""
        return self._nnz

    @property
    def undo_bytes(self) -> int:
        """Old bits of all of them."""
        return self._nnz * self._block.values.itemsize

    @property
    def count(self) -> int:
        """How many pieces it has."""
        return -(-(self._high - self._low) // self._most)

    def piece(self, number: int) -> Piece:
        """One of them; the same each time. It may be empty."""
        begin, end = self._range(number)
        held, block = self.held, self._block
        values = frozen(block.values[begin:end])
        if self._straight:
            some = _counting(self._most)[: end - begin]
            start = block.box.start[0] + begin
            first = held.spec.first_element + start
            base = start - held.region.offset
            return Piece(some, base, some, first, values, absolute=True, run=True)
        return held._located(block, _indices(begin, end), values, absolute=True)

    def _range(self, number: int) -> tuple[int, int]:
        begin = self._low + number * self._most
        return begin, min(begin + self._most, self._high)

    def _counted(self) -> int:
        held, total = self.held, 0
        where = (*_box_rows(self._block, held.spec), held.region.offset, *held.shape)
        for number in range(self.count):
            total += int(locate_count(_indices(*self._range(number)), *where))
        return total


def _indices(begin: int, end: int) -> NDArray[np.uint32]:
    return frozen(np.arange(begin, end, dtype=np.uint32))


def _box_rows(block: Block, spec: TensorSpec) -> tuple[Array, Array, Array]:
    """Start, shape and full shape of a box as kernels take them; of a run in one dimension."""
    box = block.box
    full = (spec.elements,) if box.flat else spec.element_shape
    first, second, third = (frozen(np.array(row, np.int64)) for row in (box.start, box.shape, full))
    return first, second, third


def _row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[at + 1 :]) for at in range(len(sizes)))
