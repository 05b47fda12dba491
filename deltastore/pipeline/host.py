"""Without host weights to publish from and apply to, every test and tool would need torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.format.box import Box
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.mixing import fingerprint_state
from deltastore.pipeline.protocols import SourceBox

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from deltastore.format.dtypes import Bits
    from deltastore.format.fingerprint import Fingerprint


class HostSource:
    """A WeightSource over a state on the host; change `state.arrays` between publishes."""

    def __init__(self, state: BitState) -> None:
        self.state = state

    def entries(self) -> Sequence[TensorEntry]:
        """The layout's own rows."""
        return [TensorEntry(s.name, s.dtype, s.shape, s.aliases) for s in self.state.layout.tensors]

    def boxes(self, layout: Layout) -> Iterator[SourceBox]:
        """One flat box per tensor, as views."""
        for spec in layout.tensors:
            position = layout.position(spec.name)
            if position is not None:
                yield SourceBox(position, Box.run(0, spec.elements), self.state[spec.name])


class HostTarget:
    """A WeightTarget over a state on the host."""

    def __init__(self, state: BitState) -> None:
        self.state = state

    @property
    def layout(self) -> Layout:
        """The state's layout."""
        return self.state.layout

    def gather(self, tensor: int, box: Box, indices: NDArray[np.uint32] | None) -> Bits:
        """The patterns at those indices of the box (None: the whole box), as a flat copy."""
        return self._read(tensor, box, indices)

    def scatter(
        self, tensor: int, box: Box, indices: NDArray[np.uint32] | None, bits: Bits
    ) -> None:
        """Write patterns there, in place."""
        bits_of = self.state.arrays[tensor]
        if box.flat and indices is None:
            bits_of[box.start[0] : box.start[0] + box.shape[0]] = bits
            return
        bits_of[self._offsets(tensor, box, indices)] = bits

    def fingerprint(self) -> Fingerprint:
        """One pass over the state."""
        return fingerprint_state(self.state)

    def _read(self, tensor: int, box: Box, indices: NDArray[np.uint32] | None) -> Bits:
        bits_of = self.state.arrays[tensor]
        if box.flat and indices is None:
            return bits_of[box.start[0] : box.start[0] + box.shape[0]].copy()
        picked: Bits = bits_of[self._offsets(tensor, box, indices)]
        return picked

    def _offsets(
        self, tensor: int, box: Box, indices: NDArray[np.uint32] | None
    ) -> NDArray[np.int64]:
        return box.offsets_of(indices, self.layout.tensors[tensor].element_shape)
