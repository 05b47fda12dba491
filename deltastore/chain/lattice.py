"""Composites made ad hoc never fit together: these are the spans that every chain is given.

Tiles of 8 versions serve laggards. Cumulative composites serve joiners: from the newest whole state
to the last multiple of 64, and from there to the last multiple of 8. With them a join is at most
one whole state, two composites and seven deltas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

TILE_VERSIONS = 8
BLOCK_VERSIONS = 64
"""Anchors stand on multiples of this, cumulative composites start there."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The versions above `base` up to and including `version`."""

    base: int
    version: int

    @property
    def is_tile(self) -> bool:
        """Whether it is one of the aligned spans that stay useful for ever: of 8 or of 64."""
        size = self.version - self.base
        return size in {TILE_VERSIONS, BLOCK_VERSIONS} and self.base % size == 0


def wanted_composites(
    head: int, *, lowest: int, anchors: Iterable[int], full: Iterable[int]
) -> list[Span]:
    """The composites that a chain should have, in the order in which they are best made.

    Args:
        head: the newest version.
        lowest: the oldest version whose successors still have bodies.
        anchors: versions that have an anchor.
        full: versions that are full: no delta leads to them, so no span may cross them.
    """
    barriers = sorted(v for v in full if lowest <= v <= head)
    starts = sorted({*barriers, *(v for v in anchors if lowest <= v <= head)})
    spans = _aligned(TILE_VERSIONS, lowest, head)
    spans += _aligned(BLOCK_VERSIONS, lowest, head)
    block = head - head % BLOCK_VERSIONS
    inside = [v for v in barriers if v > block]
    fine_base = inside[-1] if inside else block
    spans.append(Span(fine_base, head - head % TILE_VERSIONS))
    below = [v for v in starts if v <= block]
    if below:
        spans.append(Span(below[-1], block))
    wanted: list[Span] = []
    for span in spans:
        crossed = any(span.base < v <= span.version for v in barriers)
        if (
            span.version - span.base > 1
            and span.base >= lowest
            and not crossed
            and span not in wanted
        ):
            wanted.append(span)
    return wanted


def superseded(span: Span, others: Iterable[Span]) -> Span | None:
    """The longer composite from the same base that makes this one needless, if there is one.

    Aligned tiles stay: laggards anywhere in the chain use them.
    """
    if span.is_tile:
        return None
    longer = [o for o in others if o.base == span.base and o.version > span.version]
    return min(longer, default=None)


def _aligned(size: int, lowest: int, head: int) -> list[Span]:
    first = -(-lowest // size) * size
    return [Span(base, base + size) for base in range(first, head - size + 1, size)]
