"""What is worked out at the safe point makes the pause: a prepared update needs only be written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from deltastore.pipeline.rank_target import P

if TYPE_CHECKING:
    from deltastore.format.layout import BitState
    from deltastore.pipeline.tally import Sums
    from deltastore.repository.points import ActiveVersion


@dataclass(frozen=True, slots=True, eq=False)
class PreparedUpdate(Generic[P]):
    """An update, located on one rank. For one activation at a time.

    Args:
        parts: what of it meets this rank; none when `state` is given.
        declared: what the blocks of each tensor declare, whether this rank holds it or not.
        nnz: changes of the whole update, on all ranks.
        state: the whole target state, when a full version was the way.
    """

    base: ActiveVersion
    target: ActiveVersion
    parts: list[P]
    declared: Sums
    nnz: int
    state: BitState | None = None

    @property
    def undo_bytes(self) -> int:
        """Old bits that are kept while it is written."""
        return sum(part.undo_bytes for part in self.parts)
