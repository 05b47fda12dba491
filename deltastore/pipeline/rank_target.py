"""An applier that knows torch cannot be tested without it: what it needs of live weights is here.

A *rank target* is the part of an engine's weights that one process holds. Its *parts* are the
changes of an update that meet what it holds, located beforehand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from deltastore.errors import InvalidInputError, Kind
from deltastore.format.fingerprint import ZERO, Fingerprint
from deltastore.format.mixing import fingerprint_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from deltastore.format.block import Block
    from deltastore.format.layout import BitState, Layout
    from deltastore.pipeline.tally import Sums, Tally

SCRATCH_MAX_BYTES = 256 << 20
"""Room for pieces of 2^21 elements in int64: in smaller ones a device waits for launches."""


class Part(Protocol):
    """The changes of one block that meet one region that this process holds."""

    @property
    def tensor(self) -> int:
        """Position in the layout."""
        ...

    @property
    def nnz(self) -> int:
        """How many changes."""
        ...

    @property
    def undo_bytes(self) -> int:
        """Old bits that must be kept to undo it: none of steps."""
        ...

    def forget(self) -> None:
        """Let go of what was kept to undo it: it is as if it had not been written."""
        ...


P = TypeVar("P", bound=Part)


class RankTarget(Protocol[P]):
    """What one process holds. All but `plan` is called at safe points only, from one thread."""

    @property
    def layout(self) -> Layout:
        """The tensor table that positions refer to."""
        ...

    @property
    def unheld(self) -> UnheldTensors:
        """What is known of tensors that this process does not hold."""
        ...

    def plan(self, blocks: Sequence[Block]) -> list[P]:
        """Locate what meets this process; any thread; touches no live weights.

        Raises InvalidInputError when a block does not fit the layout.
        """
        ...

    def tally(self, parts: Sequence[P], tensors: Sequence[int]) -> Tally:
        """Pass 1, read only: the change of every region that it holds of `tensors`.

        Args:
            parts: of one update.
            tensors: that the update changes: regions of them that no part meets have a row too.

        Raises IntegrityError(fingerprint) when the weights hold what no version can.
        """
        ...

    def write_all(self, parts: Sequence[P], *, keep: bool) -> None:
        """Pass 2: write the parts in place. Whatever it raises, every part knows how far it came.

        Args:
            keep: whether old bits are kept, `undo_bytes` of each.
        """
        ...

    def undo_all(self, parts: Sequence[P]) -> None:
        """Undo what was written of the parts: all, some, or nothing."""
        ...

    def settle(self, tensors: Sequence[int], *, undoing: bool) -> None:
        """Derive anew what is derived from these tensors: after all is written, or undone.

        Raises IntegrityError(digest) when after undoing it is not what it was before.
        """
        ...

    def whole(self) -> Tally:
        """One pass over all that it holds; raises IntegrityError as `tally` does."""
        ...

    def check_derived(self) -> None:
        """IntegrityError(digest) when derived weights are not what was derived last."""
        ...

    def write_state(self, state: BitState) -> None:
        """Write a whole state, in place, and derive what is derived. Cannot be undone."""
        ...


class UnheldTensors:
    """Fingerprints of tensors that no rank holds: they move as declared.

    Args:
        tensors: positions of the layout that this process does not hold.
        read: the fingerprint of one as the engine was loaded; asked only for what no rank holds.
    """

    def __init__(
        self, tensors: Iterable[int] = (), read: Callable[[int], Fingerprint] | None = None
    ) -> None:
        self.tensors = frozenset(tensors)
        self._read = read
        self._at: dict[int, Fingerprint] = {}
        self._moved: dict[int, Fingerprint] = {}

    def of(self, layout: Layout, tensor: int) -> Fingerprint:
        """Of one tensor now; InvalidInputError when nobody can know it."""
        if tensor not in self._at:
            name = layout.tensors[tensor].name
            if self._read is None or tensor not in self.tensors:
                raise InvalidInputError(
                    f"no rank holds tensor {name!r}, and nothing says what it is",
                    kind=Kind.TENSOR_NAMES,
                    hint="give the checkpoint that the engine was loaded from",
                )
            self._at[tensor] = self._read(tensor) + self._moved.pop(tensor, ZERO)
        return self._at[tensor]

    def move(self, declared: Sums) -> None:
        """A version was activated that declares these changes."""
        for tensor in self.tensors.intersection(declared.tensors.tolist()):
            change = declared.of(tensor) or ZERO
            book = self._at if tensor in self._at else self._moved
            book[tensor] = book.get(tensor, ZERO) + change

    def replace(self, state: BitState, tensors: Iterable[int]) -> None:
        """A whole state was written: these tensors, which nobody holds, are as it says."""
        self._moved.clear()
        for tensor in tensors:
            spec = state.layout.tensors[tensor]
            self._at[tensor] = fingerprint_run(state.arrays[tensor], spec.first_element)
