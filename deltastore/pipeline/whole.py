"""A trainer whose base is lost cannot send a delta, and must not stop: it sends the whole state.

The way out when the bits of HEAD can be proved neither here nor from the bucket: the source is read
whole and becomes a `full` version, which keeps the hash chain and from which everybody goes on.

Memory: the state, which becomes the baseline, and two shards of the upload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deltastore.errors import InvalidInputError, Kind
from deltastore.format.layout import BitState
from deltastore.repository.fullversion import upload_full
from deltastore.repository.template import read_template

if TYPE_CHECKING:
    from deltastore.format.layout import Layout
    from deltastore.format.manifest import FileRef
    from deltastore.pipeline.protocols import WeightSource
    from deltastore.repository.run import Run
    from deltastore.storage.transfer import OnBytes


def read_source(source: WeightSource, layout: Layout) -> BitState:
    """The source's present bits as a state; InvalidInputError when it leaves some out."""
    state = BitState.zeros(layout)
    covered = np.zeros(len(layout), np.int64)
    for part in source.boxes(layout):
        shape = layout.tensors[part.tensor].element_shape
        bits = state.arrays[part.tensor]
        if part.box.flat:
            start = part.box.start[0]
            bits[start : start + part.box.elements] = part.bits
        else:
            bits[part.box.offsets_of(None, shape)] = part.bits
        covered[part.tensor] += part.box.elements
    short = [
        spec.name
        for spec, found in zip(layout.tensors, covered, strict=True)
        if found != spec.elements
    ]
    if short:
        raise InvalidInputError(
            f"the source does not cover {len(short)} tensors exactly once: {short[:5]}",
            kind=Kind.TENSOR_SHAPE,
            hint="its boxes must partition every tensor of the layout",
        )
    return state


def upload_whole(
    home: Run, state: BitState, version: int, *, streams: int, on_bytes: OnBytes | None = None
) -> tuple[FileRef, ...]:
    """Put a state's files into home, as a version of that number may name them."""
    template = read_template(home)
    return upload_full(home, version, state, template, streams=streams, on_bytes=on_bytes)
