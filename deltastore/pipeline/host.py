"""Without host weights to publish from and apply to, every test and tool would need torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.chain.places import read_places, write_places
from deltastore.errors import InvalidInputError, Kind
from deltastore.format.box import Box
from deltastore.format.kernels_apply import gather, scatter
from deltastore.format.kernels_base import frozen
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.mixing import fingerprint_state
from deltastore.pipeline.protocols import SourceBox

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
        same = layout == self.state.layout
        whole: dict[int, Box] = {}
        for position, spec in enumerate(layout.tensors):
            bits = self.state.arrays[position] if same else self.state[spec.name]
            box = whole.get(bits.size)
            if box is None:
                box = whole.setdefault(bits.size, Box.run(0, bits.size))
            yield SourceBox(position, box, bits)


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
        bits_of = self.state.arrays[tensor]
        if box.flat:
            if indices is None:
                return bits_of[box.start[0] : box.start[0] + box.shape[0]].copy()
            found = read_places(bits_of, box, indices)
            if found is None:
                raise self._outside(tensor, box)
            return found
        places = self._places(tensor, box, indices)
        picked: Bits = np.empty(places.size, bits_of.dtype)
        gather(bits_of, places, 0, picked)
        return picked

    def scatter(
        self, tensor: int, box: Box, indices: NDArray[np.uint32] | None, bits: Bits
    ) -> None:
        """Write patterns there, in place."""
        bits_of = self.state.arrays[tensor]
        if box.flat and indices is None:
            bits_of[box.start[0] : box.start[0] + box.shape[0]] = bits
            return
        shape = (box.elements,) if indices is None else indices.shape
        if bits.dtype != bits_of.dtype or bits.shape != shape:
            raise InvalidInputError(
                f"{bits.size} {bits.dtype} patterns for {shape} of {bits_of.dtype}",
                kind=Kind.TENSOR_SHAPE,
            )
        if not box.flat:
            scatter(bits_of, self._places(tensor, box, indices), 0, frozen(bits))
        elif indices is None or not write_places(bits_of, box, indices, bits):
            raise self._outside(tensor, box)

    def fingerprint(self) -> Fingerprint:
        """One pass over the state."""
        return fingerprint_state(self.state)

    def _places(
        self, tensor: int, box: Box, indices: NDArray[np.uint32] | None
    ) -> NDArray[np.integer[Any]]:
        """Offsets in the tensor of a box's elements; checked, for the kernels do not."""
        shape = self.layout.tensors[tensor].element_shape
        if not box.fits(shape) or (
            indices is not None and indices.size and int(indices.max()) >= box.elements
        ):
            raise self._outside(tensor, box)
        return frozen(box.offsets_of(indices, shape))

    def _outside(self, tensor: int, box: Box) -> InvalidInputError:
        name = self.layout.tensors[tensor].name
        return InvalidInputError(f"indices or box {box} leave {name!r}", kind=Kind.BOX)
