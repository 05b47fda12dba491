"""Two writers that disagree on what a change means corrupt weights: a block is one meaning.

A block is a box of one tensor with its changes, decoded. `indices`/`values` codings live in
`segment.py` and below; everything above the format floor deals in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from deltastore.format.fingerprint import ZERO, Fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from deltastore.format.box import Box
    from deltastore.format.dtypes import Bits


class ValueKind(Enum):
    """What the values of a block are."""

    STEPS = "ulp"
    """New minus old pattern, modulo 2^w; never 0."""
    BITS = "bits"
    """New patterns at the changed places; applying twice is harmless."""
    DENSE = "dense"
    """New patterns of every element of the box."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The changes of one box.

    Args:
        tensor: position of the tensor in the layout.
        box: which of its elements the block speaks of.
        kind: what `values` are.
        indices: uint32, strictly increasing, row-major in the box; None for DENSE.
        values: unsigned patterns of the tensor's element width, one per index (DENSE: per element).
        fingerprint_change: what the block adds to the state's fingerprint.
    """

    tensor: int
    box: Box
    kind: ValueKind
    indices: NDArray[np.uint32] | None
    values: Bits
    fingerprint_change: Fingerprint

    @property
    def nnz(self) -> int:
        """Stored changes: DENSE counts every element of its box."""
        return int(self.values.size)


def total_change(blocks: Iterable[Block]) -> Fingerprint:
    """The sum of the blocks' fingerprint changes."""
    changes = [block.fingerprint_change for block in blocks]
    return ZERO + Fingerprint(sum(c.low for c in changes), sum(c.high for c in changes))
