"""Ranks that only say "mine is right" miss a change that lies between them: they add up what holds.

A *tally* is a rank's report: per region that it holds of a tensor one fingerprint (of a change, or
of what is there). The same region of a tensor, held by several ranks or several times by one, is
copies of the same elements, and its numbers must be equal; other regions of a tensor are disjoint
and add up. Tensors without a row are held by nobody.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deltastore.errors import FormatError, IntegrityError, Kind
from deltastore.format.fingerprint import ZERO, Fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deltastore.format.block import Block
    from deltastore.format.layout import Layout

Tally: TypeAlias = NDArray[np.void]
"""One-dimensional, of ROW."""
ROW = np.dtype(
    [
        ("tensor", "<u4"),
        ("shape", "<u8"),  # digest of the region's sizes and strides
        ("offset", "<i8"),  # of the region's first element in the tensor
        ("low", "<u8"),
        ("high", "<u8"),
    ]
)
_MASK = (1 << 64) - 1


def empty_tally(count: int = 0) -> Tally:
    """`count` rows of zeros."""
    return np.zeros(count, ROW)


def shape_digest(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """What tells regions of one tensor with one first element apart."""
    text = repr((tuple(sizes), tuple(strides))).encode("ascii")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


class Sums:
    """One fingerprint per tensor, for some tensors of a layout."""

    def __init__(self, tensors: NDArray[Any], low: NDArray[Any], high: NDArray[Any]) -> None:
        self.tensors = tensors
        self.low = low
        self.high = high

    @classmethod
    def declared(cls, blocks: Iterable[Block]) -> Sums:
        """What the blocks of each tensor declare to change."""
        found: dict[int, Fingerprint] = {}
        for block in blocks:
            found[block.tensor] = found.get(block.tensor, ZERO) + block.fingerprint_change
        order = sorted(found)
        return cls(
            np.array(order, np.uint32),
            np.array([found[tensor].low for tensor in order], np.uint64),
            np.array([found[tensor].high for tensor in order], np.uint64),
        )

    @classmethod
    def joined(cls, layout: Layout, tallies: Sequence[Tally]) -> Sums:
        """What all ranks hold; IntegrityError(alias_drift) when copies of a region differ."""
        rows = np.concatenate([empty_tally(), *tallies])
        if not rows.size:
            none = np.zeros(0, np.uint64)
            return cls(np.zeros(0, np.uint32), none, none)
        rows = rows[np.lexsort((rows["shape"], rows["offset"], rows["tensor"]))]
        above, below = rows[1:], rows[:-1]
        same = (
            (above["tensor"] == below["tensor"])
            & (above["offset"] == below["offset"])
            & (above["shape"] == below["shape"])
        )
        differ = same & ((above["low"] != below["low"]) | (above["high"] != below["high"]))
        if differ.any():
            names = _names(layout, np.unique(above["tensor"][differ]))
            raise IntegrityError(
                f"copies of one tensor hold different bits: {names}",
                kind=Kind.ALIAS_DRIFT,
                hint="something else writes to the live weights: re-anchor",
            )
        rows = rows[np.concatenate([[True], ~same])]
        tensors, starts = np.unique(rows["tensor"], return_index=True)
        if tensors[-1] >= len(layout):
            raise FormatError(f"a rank holds tensor {tensors[-1]}, there is none", kind=Kind.FIELD)
        return cls(
            tensors,
            np.add.reduceat(rows["low"], starts),
            np.add.reduceat(rows["high"], starts),
        )

    def total(self) -> Fingerprint:
        """The sum over all tensors."""
        return Fingerprint(int(self.low.sum(dtype=np.uint64)), int(self.high.sum(dtype=np.uint64)))

    def of(self, tensor: int) -> Fingerprint | None:
        """Of one tensor, if it is among them."""
        at = int(np.searchsorted(self.tensors, tensor))
        if at == self.tensors.size or self.tensors[at] != tensor:
            return None
        return Fingerprint(int(self.low[at]), int(self.high[at]))

    def unlike(self, declared: Sums) -> list[int]:
        """Tensors of these that declare another sum; those that nobody holds count as declared."""
        at = np.minimum(np.searchsorted(declared.tensors, self.tensors), declared.tensors.size - 1)
        if not declared.tensors.size:
            return [int(tensor) for tensor in self.tensors]
        equal = (
            (declared.tensors[at] == self.tensors)
            & (declared.low[at] == self.low)
            & (declared.high[at] == self.high)
        )
        return [int(tensor) for tensor in self.tensors[~equal]]


def tally_bytes(tally: Tally) -> bytes:
    """The rows as they travel."""
    return tally.tobytes()


def tally_of(text: bytes | memoryview) -> Tally:
    """Rows that travelled; FormatError(truncated) when they are not whole rows."""
    if len(text) % ROW.itemsize:
        raise FormatError(f"a tally of {len(text)} bytes is not whole rows", kind=Kind.TRUNCATED)
    return np.frombuffer(text, ROW)


def _names(layout: Layout, tensors: Iterable[Any]) -> list[str]:
    return [layout.tensors[int(tensor)].name for tensor in tensors][:5]
