"""A module that maps a weight elsewhere publishes nonsense: it is compared before it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from deltastore.format.layout import BitState
    from deltastore.pipeline.protocols import WeightSource


def differing_tensors(source: WeightSource, state: BitState) -> list[str]:
    """Names of the tensors in which a source does not reproduce a state bit for bit."""
    names: list[str] = []
    for box in source.boxes(state.layout):
        spec = state.layout.tensors[box.tensor]
        offsets = (
            slice(box.box.start[0], box.box.start[0] + box.box.shape[0])
            if box.box.flat
            else box.box.offsets_of(None, spec.element_shape)
        )
        if spec.name not in names and not np.array_equal(
            state.arrays[box.tensor][offsets], box.bits
        ):
            names.append(spec.name)
    return names
