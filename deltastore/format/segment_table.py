"""A reader that meets a size before its limit can be killed by it: the table is read first.

The table of a segment is columns over its blocks, then over its frames, then over their streams.
All of it is read and checked against the layout before any stream is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from deltastore.errors import FormatError, Kind
from deltastore.format import kernels_index as kernels
from deltastore.format.box import MAX_BOX_ELEMENTS, Box
from deltastore.format.disjoint import check_boxes
from deltastore.format.frames import VALUE_KINDS, FrameColumns, check_frame
from deltastore.format.indices import IndexEncoding, Numbers
from deltastore.format.kernels_base import frozen
from deltastore.format.streams import LAST_STREAM, Bytes, StreamRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from deltastore.format.layout import Layout

MAX_BLOCKS = 1 << 17
"""Most blocks in one segment."""

_KIND_MASK = 0x03
_ENCODING_SHIFT = 2
_ENCODING_MASK = 0x07
_BOXED = 0x20
_FORM_MASK = 0x3F
_DENSE = len(VALUE_KINDS) - 1


@dataclass(frozen=True, slots=True)
class LayoutColumns:
    """Elements, widths and first elements of a layout's tensors as arrays."""

    elements: Numbers
    element_bits: Numbers


@dataclass(frozen=True, slots=True)
class FrameRow:
    """How many blocks a frame holds, and its streams."""

    blocks: int
    streams: tuple[StreamRow, ...]


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """The checked table of a segment."""

    tensors: list[int]
    boxes: list[Box]
    columns: FrameColumns
    frames: tuple[FrameRow, ...]

    @property
    def nnz(self) -> int:
        """Stored values of all blocks."""
        return int(self.columns.counts.sum())


@lru_cache(maxsize=8)
def layout_columns(layout: Layout) -> LayoutColumns:
    """The arrays of a layout, made once: it may have 20,000 tensors and a hundred segments."""
    specs = layout.tensors
    return LayoutColumns(
        np.array([spec.elements for spec in specs], np.int64),
        np.array([spec.dtype.element_bits for spec in specs], np.int64),
    )


def write_table(
    tensors: Numbers, boxes: Sequence[Box], columns: FrameColumns, frames: Sequence[FrameRow]
) -> bytes:
    """The bytes of a table; the caller has checked that its blocks are legal."""
    flat = np.array([box.flat for box in boxes], bool)
    forms = columns.kinds | (columns.encodings << _ENCODING_SHIFT) | np.where(flat, 0, _BOXED)
    rice = columns.encodings == IndexEncoding.RICE
    starts = np.array([box.start[0] if box.flat else 0 for box in boxes], np.int64)
    rows = [row for frame in frames for row in frame.streams]
    parts = [
        forms.astype(np.uint8).tobytes(),
        _numbers(tensors[:1], tensors[1:] - tensors[:-1]),
        columns.parameters[rice].astype(np.uint8).tobytes(),
        _numbers(
            columns.counts[columns.kinds != _DENSE],
            (starts - _run_origins(tensors, flat, starts, columns.elements))[flat],
            columns.elements[flat],
            np.array([n for b in boxes if not b.flat for n in (*b.start, *b.shape)], np.int64),
            np.array([n for f in frames for n in (f.blocks, len(f.streams))], np.int64),
        ),
        bytes(row.stream for row in rows),
        _numbers(
            np.array([row.raw_bytes for row in rows], np.int64),
            np.array([row.stored_bytes for row in rows], np.int64),
        ),
    ]
    return b"".join(parts)


def read_table(layout: Layout, text: Bytes, blocks: int, frames: int) -> SegmentTable:
    """Read and check a table: every field, every box, every frame's streams and sizes."""
    reader = _TableReader(text)
    known = layout_columns(layout)
    forms = reader.bytes_column(blocks)
    if (forms & ~np.int64(_FORM_MASK)).any():
        raise FormatError("a block's form has reserved bits set", kind=Kind.FIELD)
    kinds = forms & _KIND_MASK
    encodings = (forms >> _ENCODING_SHIFT) & _ENCODING_MASK
    dense = kinds == _DENSE
    if (kinds > _DENSE).any() or (encodings > IndexEncoding.RICE).any():
        raise FormatError("a block's value or index encoding is unknown", kind=Kind.ENCODING)
    if (dense != (encodings == IndexEncoding.NONE)).any():
        raise FormatError("dense blocks, and only those, have no indices", kind=Kind.ENCODING)
    flat = (forms & _BOXED) == 0
    steps = reader.numbers(blocks)
    if (steps > known.elements.size).any():
        raise FormatError("a block names a tensor beyond the layout", kind=Kind.FIELD)
    tensors = np.cumsum(steps)
    if blocks and tensors[-1] >= known.elements.size:
        raise FormatError("a block names a tensor beyond the layout", kind=Kind.FIELD)
    parameters = np.zeros(blocks, np.int64)
    rice = encodings == IndexEncoding.RICE
    parameters[rice] = reader.bytes_column(int(rice.sum()))
    if (parameters > kernels.MAX_RICE_PARAMETER).any():
        raise FormatError("a Rice parameter is out of range", kind=Kind.LIMIT)
    counts = np.zeros(blocks, np.int64)
    counts[~dense] = reader.numbers(blocks - int(dense.sum()))
    elements = np.zeros(blocks, np.int64)
    boxes = _read_boxes(reader, layout, known, tensors, flat, elements)
    counts[dense] = elements[dense]
    if blocks and not 0 < int(elements.min()) <= int(elements.max()) <= MAX_BOX_ELEMENTS:
        raise FormatError(f"a box is empty or above {MAX_BOX_ELEMENTS} elements", kind=Kind.LIMIT)
    if ((counts < 1) | (counts > elements)).any():
        raise FormatError("a block has no change, or more than elements", kind=Kind.LIMIT)
    columns = FrameColumns(
        kinds, known.element_bits[tensors], counts, elements, encodings, parameters
    )
    rows = _read_frames(reader, columns, frames)
    reader.finish()
    return SegmentTable(tensors.tolist(), boxes, columns, rows)


def read_forms(text: Bytes, blocks: int) -> set[str]:
    """The names of the encodings a table's first column names, without a layout."""
    forms = _TableReader(text).bytes_column(blocks)
    names: set[str] = set()
    for form in set(forms.tolist()):
        kind, encoding = form & _KIND_MASK, (form >> _ENCODING_SHIFT) & _ENCODING_MASK
        if form & ~_FORM_MASK or kind > _DENSE or encoding > IndexEncoding.RICE:
            raise FormatError(f"block form {form:#04x} is unknown", kind=Kind.ENCODING)
        names.add(VALUE_KINDS[kind].value)
        if encoding:
            names.add(IndexEncoding(encoding).label)
    return names


def _read_boxes(
    reader: _TableReader,
    layout: Layout,
    known: LayoutColumns,
    tensors: Numbers,
    flat: NDArray[np.bool_],
    elements: Numbers,
) -> list[Box]:
    runs = int(flat.sum())
    skips = reader.numbers(runs)
    sizes = reader.numbers(runs)
    limits = known.elements[tensors[flat]]
    if ((skips > limits) | (sizes > limits)).any():
        raise FormatError("a run leaves its tensor", kind=Kind.BOX)
    elements[flat] = sizes
    # Prefix sums restart where the tensor changes; boxed blocks do not move the origin.
    owner = tensors[flat]
    ends = np.cumsum(skips + sizes)
    fresh = np.flatnonzero(np.diff(owner, prepend=-1))
    before = np.repeat(ends[fresh] - (skips + sizes)[fresh], np.diff([*fresh.tolist(), runs]))
    starts = ends - sizes - before
    if (ends - before > limits).any():
        raise FormatError("a run leaves its tensor", kind=Kind.BOX)
    runs_left = zip(starts.tolist(), sizes.tolist(), strict=True)
    boxes: list[Box] = []
    # Small tensors are alike: objects made anew for each would have the collector go through all.
    whole: dict[int, Box] = {}
    for position, (tensor, is_flat) in enumerate(zip(tensors.tolist(), flat.tolist(), strict=True)):
        if is_flat:
            start, size = next(runs_left)
            box = None if start else whole.get(size)
            if box is None:
                box = Box.run(start, size)
                if not start:
                    whole[size] = box
            boxes.append(box)
            continue
        shape = layout.tensors[tensor].element_shape
        numbers = reader.numbers(2 * len(shape)).tolist()
        box = Box(tuple(numbers[: len(shape)]), tuple(numbers[len(shape) :]), flat=False)
        if not box.fits(shape):
            raise FormatError(f"block {position}: its box leaves its tensor", kind=Kind.BOX)
        boxes.append(box)
        elements[position] = box.elements
    if runs < flat.size:
        check_boxes(tensors, boxes)
    return boxes


def _read_frames(reader: _TableReader, columns: FrameColumns, frames: int) -> tuple[FrameRow, ...]:
    shape = reader.numbers(2 * frames).reshape(-1, 2)
    blocks, streams = shape[:, 0], shape[:, 1]
    total = columns.kinds.size
    if ((blocks < 1) | (blocks > total)).any() or int(blocks.sum()) != total:
        raise FormatError("the frames do not hold the segment's blocks", kind=Kind.FIELD)
    if ((streams < 1) | (streams > LAST_STREAM)).any():
        raise FormatError("a frame has no stream, or too many", kind=Kind.LIMIT)
    count = int(streams.sum())
    names = reader.bytes_column(count).tolist()
    raw = reader.numbers(count).tolist()
    stored = reader.numbers(count).tolist()
    rows = [StreamRow(*row) for row in zip(names, raw, stored, strict=True)]
    result: list[FrameRow] = []
    block = stream = 0
    for number, (n_blocks, n_streams) in enumerate(shape.tolist()):
        frame = FrameRow(n_blocks, tuple(rows[stream : stream + n_streams]))
        check_frame(columns.part(block, block + n_blocks), frame.streams, what=f"frame {number}")
        for row in frame.streams:
            if not 0 < row.stored_bytes <= row.raw_bytes:
                raise FormatError(
                    f"frame {number}: stream {row.stream:#04x} of {row.raw_bytes} bytes"
                    f" is stored in {row.stored_bytes}",
                    kind=Kind.LIMIT,
                )
        result.append(frame)
        block += n_blocks
        stream += n_streams
    return tuple(result)


def _run_origins(
    tensors: Numbers, flat: NDArray[np.bool_], starts: Numbers, elements: Numbers
) -> Numbers:
    """Where a run's start is counted from: the end of the run before it in its tensor, else 0."""
    origins = np.zeros(tensors.size, np.int64)
    runs = np.flatnonzero(flat)
    if runs.size > 1:
        before, after = runs[:-1], runs[1:]
        same = tensors[before] == tensors[after]
        origins[after] = np.where(same, starts[before] + elements[before], 0)
    return origins


def _numbers(*columns: Numbers) -> bytes:
    values = np.concatenate(columns)
    out = np.empty(9 * values.size, np.uint8)
    return out[: kernels.write_numbers(frozen(values), out)].tobytes()


class _TableReader:
    """Takes columns off the front of a table; FormatError when it ends early."""

    __slots__ = ("_at", "_text")

    def __init__(self, text: Bytes) -> None:
        self._text = frozen(text)
        self._at = 0

    def bytes_column(self, count: int) -> Numbers:
        """`count` bytes as numbers."""
        if count > self._text.size - self._at:
            raise FormatError("the segment table ends early", kind=Kind.TRUNCATED)
        column = self._text[self._at : self._at + count].astype(np.int64)
        self._at += count
        return column

    def numbers(self, count: int) -> Numbers:
        """`count` LEB128 numbers."""
        if count > self._text.size - self._at:
            raise FormatError("the segment table ends early", kind=Kind.TRUNCATED)
        column = np.empty(count, np.int64)
        self._at, found = kernels.read_numbers(self._text, self._at, column)
        if found == kernels.TRUNCATED:
            raise FormatError("the segment table ends early", kind=Kind.TRUNCATED)
        if found != kernels.OK:
            raise FormatError(
                "a number in the table is not in its shortest form", kind=Kind.ENCODING
            )
        return column

    def finish(self) -> None:
        """Nothing may be left."""
        if self._at != self._text.size:
            raise FormatError(
                f"{self._text.size - self._at} bytes follow the segment table", kind=Kind.TRAILING
            )
