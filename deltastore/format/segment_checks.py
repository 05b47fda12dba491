"""A block no reader would take is found hours later, elsewhere: a writer refuses it at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deltastore.errors import FormatError, InvalidInputError, Kind
from deltastore.format.block import Block, ValueKind
from deltastore.format.box import MAX_BOX_ELEMENTS, Box
from deltastore.format.disjoint import check_boxes
from deltastore.format.frames import KIND_NUMBERS, FrameColumns
from deltastore.format.segment_table import layout_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltastore.format.indices import Numbers
    from deltastore.format.layout import Layout


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What a reader is ready to hold of one segment.

    Args:
        max_table_bytes: of its table before compression (a full one of runs is about 3 MiB).
        max_decoded_bytes: of indices and values (a segment of 32 MiB holds about 160 MiB).
    """

    max_table_bytes: int = 32 << 20
    max_decoded_bytes: int = 1 << 30


DEFAULT_LIMITS = DecodeLimits()


def tensors_of(layout: Layout, blocks: Sequence[Block]) -> Numbers:
    """Positions of the blocks' tensors, all of them in the layout."""
    tensors = np.array([block.tensor for block in blocks], np.int64)
    if ((tensors < 0) | (tensors >= len(layout))).any():
        raise InvalidInputError("a block names a tensor beyond the layout", kind=Kind.FIELD)
    return tensors


def columns_of(layout: Layout, tensors: Numbers, blocks: Sequence[Block]) -> FrameColumns:
    """The table's columns of the blocks; index encodings are still to be chosen."""
    numbers = {kind.value: number for kind, number in KIND_NUMBERS.items()}
    return FrameColumns(
        np.array([numbers[block.kind.value] for block in blocks], np.int64),
        layout_columns(layout).element_bits[tensors],
        np.array([block.values.size for block in blocks], np.int64),
        np.array([block.box.elements for block in blocks], np.int64),
        np.zeros(len(blocks), np.int64),
        np.zeros(len(blocks), np.int64),
    )


def check_blocks(blocks: Sequence[Block], columns: FrameColumns) -> None:
    """Refuse blocks whose arrays do not fit each other, and more than a reader would hold."""
    widths = columns.element_bits.tolist()
    sizes = columns.elements.tolist()
    whole = ValueKind.DENSE
    for block, bits, elements in zip(blocks, widths, sizes, strict=True):
        dense = block.kind is whole
        indices, values = block.indices, block.values
        count = values.size
        if (
            values.dtype.kind != "u"
            or values.itemsize * 8 != bits
            or values.ndim != 1
            or dense != (indices is None)
            or not 0 < count <= elements <= MAX_BOX_ELEMENTS
            or (dense and count != elements)
            or (indices is not None and (indices.dtype != np.uint32 or indices.shape != (count,)))
        ):
            raise InvalidInputError(
                f"block of tensor {block.tensor} at {block.box} is malformed: {block.kind.name},"
                f" {block.values.dtype} values {block.values.shape}, indices"
                f" {None if indices is None else (indices.dtype, indices.shape)}",
                kind=Kind.FIELD,
                hint=f"boxes have 1 to {MAX_BOX_ELEMENTS} elements, sparse blocks a change",
            )
    if columns.decoded_bytes() > DEFAULT_LIMITS.max_decoded_bytes:
        raise InvalidInputError(
            f"segment would decode to {columns.decoded_bytes()} bytes",
            kind=Kind.LIMIT,
            hint=f"at most {DEFAULT_LIMITS.max_decoded_bytes}: use more segments",
        )


def check_geometry(
    layout: Layout, tensors: Numbers, boxes: Sequence[Box], columns: FrameColumns
) -> None:
    """Refuse boxes that leave their tensor or share an element."""
    is_run = [b.flat and len(b.start) == 1 and len(b.shape) == 1 for b in boxes]
    for tensor, box, run in zip(tensors.tolist(), boxes, is_run, strict=True):
        if not run and not box.fits(layout.tensors[tensor].element_shape):
            raise InvalidInputError(
                f"box {box} leaves tensor {layout.tensors[tensor].name!r}", kind=Kind.BOX
            )
    runs = np.array(is_run, bool)
    starts = np.array([b.start[0] for b, run in zip(boxes, is_run, strict=True) if run], np.int64)
    ends = starts + columns.elements[runs]
    owner = tensors[runs]
    if ((starts < 0) | (ends > layout_columns(layout).elements[owner])).any():
        raise InvalidInputError("a run leaves its tensor", kind=Kind.BOX)
    if ((owner[1:] == owner[:-1]) & (starts[1:] < ends[:-1])).any():
        raise InvalidInputError("runs of a tensor overlap", kind=Kind.BOX)
    if not runs.all():
        try:
            check_boxes(tensors, boxes)
        except FormatError as err:
            raise InvalidInputError(err.message, kind=err.kind) from err
