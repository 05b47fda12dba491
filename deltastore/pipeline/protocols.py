"""A pipeline that knows torch cannot be tested without it: sources and targets are protocols.

A *source* yields the trainer's serving state as patterns of bits, box by box. A *target* is live
weights that can be read and written at named places. Both speak in positions of a `Layout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from deltastore.format.block import Block
    from deltastore.format.box import Box
    from deltastore.format.dtypes import Bits
    from deltastore.format.fingerprint import Fingerprint
    from deltastore.format.layout import BitState, Layout, TensorEntry


@dataclass(frozen=True, slots=True, eq=False)
class SourceBox:
    """One box of the serving state.

    Args:
        tensor: position in the layout.
        box: a flat run (of any length) or an n-dimensional box of at most 2^22 elements.
        bits: unsigned patterns of the tensor's element width, flat, row-major in the box. May be
            a view of live memory: it is read before the next box is asked for.
    """

    tensor: int
    box: Box
    bits: Bits


class WeightSource(Protocol):
    """The trainer's serving state: the exact bits an actor would load."""

    def entries(self) -> Sequence[TensorEntry]:
        """What is offered: checkpoint names, serving dtypes, shapes; either or both tied names."""
        ...

    def boxes(self, layout: Layout) -> Iterator[SourceBox]:
        """Boxes that cover every element of the layout exactly once, in layout order."""
        ...


@runtime_checkable
class DiffingSource(WeightSource, Protocol):
    """A source that finds its changes itself, where its weights are."""

    def changes(self, base: BitState, fingerprint: Fingerprint) -> Iterator[Block]:
        """Blocks of all that differs from `base`, by tensor and start, covering every tensor.

        Args:
            base: the bits of the last committed version, on the host.
            fingerprint: of `base`: tells whether a copy held elsewhere is still the same, and
                whether the changes yielded last were committed.
        """
        ...


class WeightTarget(Protocol):
    """Live weights. Not thread-safe: the applier calls it at safe points only."""

    @property
    def layout(self) -> Layout:
        """The tensor table that positions refer to."""
        ...

    def gather(self, tensor: int, box: Box, indices: NDArray[np.uint32] | None) -> Bits:
        """The patterns at those indices of the box (None: the whole box), as a flat copy."""
        ...

    def scatter(
        self, tensor: int, box: Box, indices: NDArray[np.uint32] | None, bits: Bits
    ) -> None:
        """Write patterns there, in place, never rebinding the storage."""
        ...

    def fingerprint(self) -> Fingerprint:
        """One pass over all live weights."""
        ...
