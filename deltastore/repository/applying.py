"""A composite whose boxes did not agree is right only in sum: its blocks wait until that is known.

Applies the verified blocks of one delta or composite to a state on the host, list by list. Blocks
that declare what they do are written at once; the others are held back, unwritten, until all of
their tensor's blocks, in whatever segments they came, have been seen.

Memory: the blocks held back (none where all versions have the same boxes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.chain.apply import PreparedBlock, prepare_block
from deltastore.errors import IntegrityError, Kind
from deltastore.format.fingerprint import ZERO

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deltastore.format.block import Block
    from deltastore.format.layout import BitState


class Application:
    """One delta or composite on its way into a state. Call `add` for all blocks, then `finish`."""

    def __init__(self, state: BitState) -> None:
        self._state = state
        self._held: dict[int, list[PreparedBlock]] = {}
        self.touched = False

    def add(self, blocks: Iterable[Block]) -> None:
        """Apply, or hold back."""
        for block in blocks:
            bits = self._state.arrays[block.tensor]
            prepared = prepare_block(self._state.layout, block, bits)
            if prepared.change == block.fingerprint_change:
                self.touched = True
                prepared.write(bits)
            else:
                self._held.setdefault(block.tensor, []).append(prepared)

    def finish(self) -> None:
        """Write what was held back; IntegrityError(fingerprint) if its sum is not the declared."""
        for tensor, held in self._held.items():
            open_sum = ZERO
            for prepared in held:
                open_sum = open_sum + prepared.change - prepared.block.fingerprint_change
            if open_sum != ZERO:
                raise IntegrityError(
                    f"{len(held)} blocks of tensor {self._state.layout.tensors[tensor].name!r}"
                    " would not change the fingerprint by what they declare",
                    kind=Kind.FINGERPRINT,
                    hint="the state is not the base, or the blocks are damaged",
                )
        for tensor, held in self._held.items():
            self.touched = True
            for prepared in held:
                prepared.write(self._state.arrays[tensor])
        self._held.clear()
