"""20,000 tensors cost 20,000 calls where each is a call: short blocks are proved many at a time.

What is found is what `block_change` finds of each block by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deltastore.chain.apply import block_change, new_bits
from deltastore.format.block import ValueKind
from deltastore.format.fingerprint import ZERO, Fingerprint
from deltastore.format.kernels_apply import change_runs
from deltastore.format.kernels_base import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deltastore.format.block import Block
    from deltastore.format.dtypes import Bits
    from deltastore.format.layout import Layout

SHORT_BLOCK_VALUES = 1 << 12
"""A longer block takes longer than the calls that prove it."""
BATCH_VALUES = 1 << 15
"""Most values that wait; they are still in cache when they are proved."""

_EVERY = frozen(np.arange(SHORT_BLOCK_VALUES, dtype=np.uint32))


class ShortBlocks:
    """Blocks and the bits that they meet, waiting to be proved together. Used by one thread.

    Args:
        layout: that the blocks are of.

    Memory: of `BATCH_VALUES` values.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._waiting: dict[np.dtype, list[tuple[Block, Bits]]] = {}
        self._values = 0
        self.total = ZERO
        """The change of all blocks proved so far."""
        self.found: list[tuple[Block, Fingerprint]] = []
        """Of those, blocks that change another thing than they declare, and what."""

    def add(self, block: Block, old: Bits) -> None:
        """Take a block and the bits at its places. Raises what `new_bits` raises."""
        values = block.values
        if values.size > SHORT_BLOCK_VALUES or not block.box.flat:
            change = block_change(self._layout, block, old, new_bits(block, old))
            self.total = self.total + change
            if change != block.fingerprint_change:
                self.found.append((block, change))
            return
        if old.shape != values.shape or old.dtype != values.dtype:
            new_bits(block, old)
            old = old.reshape(-1)
        self._waiting.setdefault(values.dtype, []).append((block, old))
        self._values += values.size
        if self._values >= BATCH_VALUES:
            self.settle()

    def settle(self) -> None:
        """Prove what waits."""
        for pairs in self._waiting.values():
            self._prove(pairs)
        self._waiting, self._values = {}, 0

    def _prove(self, pairs: list[tuple[Block, Bits]]) -> None:
        specs = self._layout.tensors
        blocks = [block for block, _old in pairs]
        ends = np.cumsum([block.values.size for block in blocks], dtype=np.int64)
        firsts = [specs[block.tensor].first_element + block.box.start[0] for block in blocks]
        absolute = [block.kind is not ValueKind.STEPS for block in blocks]
        changes = np.empty((len(blocks), 2), np.uint64)
        change_runs(
            frozen(np.concatenate([_indices(block) for block in blocks])),
            frozen(np.concatenate([old for _block, old in pairs])),
            frozen(np.concatenate([block.values for block in blocks])),
            frozen(ends),
            frozen(np.array(firsts, np.int64)),
            frozen(np.array(absolute, np.uint8)),
            changes,
        )
        self.total = self.total + Fingerprint(*changes.sum(axis=0, dtype=np.uint64).tolist())
        declared = [(b.fingerprint_change.low, b.fingerprint_change.high) for b in blocks]
        for i in _rows_that_differ(changes, declared):
            self.found.append((blocks[i], Fingerprint(*changes[i].tolist())))


def _indices(block: Block) -> Bits:
    return _EVERY[: block.values.size] if block.indices is None else block.indices


def _rows_that_differ(changes: Bits, declared: Iterable[tuple[int, int]]) -> list[int]:
    rows: list[int] = np.flatnonzero(
        (changes != np.array(list(declared), np.uint64)).any(axis=1)
    ).tolist()
    return rows
