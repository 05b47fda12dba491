"""Ten small updates applied one by one pause ten times: what waits is composed to one update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.chain.apply import apply_blocks
from deltastore.chain.compose import compose

if TYPE_CHECKING:
    from deltastore.format.block import Block
    from deltastore.format.layout import BitState, Layout
    from deltastore.repository.points import ActiveVersion


@dataclass(frozen=True, slots=True, eq=False)
class StagedUpdate:
    """What turns weights at `base` into weights at `target`, verified and decoded.

    Args:
        blocks: disjoint changes; empty when `state` is given.
        state: the whole target state, when a full version was the way.
        size_bytes: bytes fetched for it.
        versions: how many versions it covers.
    """

    base: ActiveVersion
    target: ActiveVersion
    blocks: list[Block]
    size_bytes: int
    versions: int = 1
    state: BitState | None = None

    @property
    def nnz(self) -> int:
        """Stored changes; of a whole state every element."""
        if self.state is not None:
            return self.state.layout.elements
        return sum(block.nnz for block in self.blocks)

    @property
    def host_bytes(self) -> int:
        """Memory that the decoded changes take."""
        if self.state is not None:
            return self.state.layout.size_bytes
        return sum(
            block.values.nbytes + (0 if block.indices is None else block.indices.nbytes)
            for block in self.blocks
        )


def join_updates(layout: Layout, first: StagedUpdate, second: StagedUpdate) -> StagedUpdate:
    """One update that does what `first` and then `second` do."""
    if first.target != second.base:
        raise ValueError("the second update does not start where the first ends")
    size_bytes = first.size_bytes + second.size_bytes
    versions = first.versions + second.versions
    if second.state is not None:
        return StagedUpdate(first.base, second.target, [], size_bytes, versions, second.state)
    if first.state is not None:
        return StagedUpdate(
            first.base, second.target, [], size_bytes, versions, _applied(first.state, second)
        )
    blocks = compose(layout, first.blocks, second.blocks)
    return StagedUpdate(first.base, second.target, blocks, size_bytes, versions)


def _applied(state: BitState, update: StagedUpdate) -> BitState:
    apply_blocks(state, update.blocks)
    return state
