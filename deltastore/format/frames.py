"""A table per tensor costs more than its changes: neighbouring blocks share the streams of a frame.

Per frame there is one stream of each kind (and per element width, for values), holding the parts
of its blocks in their order. A frame is decoded at once; which streams it has, and how long each
may be, follows from the table of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deltastore.errors import FormatError, Kind
from deltastore.format.block import Block, ValueKind
from deltastore.format.indices import (
    Numbers,
    decode_gaps,
    encode_gaps,
    gap_stream_limits,
    plan_indices,
)
from deltastore.format.kernels_index import PADDING_BYTES
from deltastore.format.streams import (
    GAP16_HIGH,
    GAP16_LOW,
    GAP16_WIDE,
    LEB128_GAPS,
    MAX_FRAME_BYTES,
    RICE_CODES,
    Bytes,
    Packer,
    StreamRow,
    unpack,
)
from deltastore.format.values import ENCODINGS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from deltastore.format.dtypes import Bits

FRAME_BYTES = 256 << 10
"""A writer closes a frame once its streams may have this many bytes: tables are shared."""

VALUE_KINDS = (ValueKind.STEPS, ValueKind.BITS, ValueKind.DENSE)
"""Value kinds by their number in the format."""
KIND_NUMBERS = {kind: number for number, kind in enumerate(VALUE_KINDS)}
GAPS = frozenset({LEB128_GAPS, GAP16_LOW, GAP16_HIGH, GAP16_WIDE})
_DENSE = KIND_NUMBERS[ValueKind.DENSE]
_WIDTHS = (8, 16, 32, 64)
_WIDTH_CLASSES = np.zeros(65, np.int64)
_WIDTH_CLASSES[list(_WIDTHS)] = range(len(_WIDTHS))


@dataclass(frozen=True, slots=True)
class FrameColumns:
    """What the table says of the blocks of a frame, one entry per block.

    `counts` are stored values (of a dense block all elements); `encodings` and `parameters` are
    those of the indices, 0 where there are none.
    """

    kinds: Numbers
    element_bits: Numbers
    counts: Numbers
    elements: Numbers
    encodings: Numbers
    parameters: Numbers

    def part(self, begin: int, end: int) -> FrameColumns:
        """The columns of some of the blocks."""
        return FrameColumns(
            self.kinds[begin:end],
            self.element_bits[begin:end],
            self.counts[begin:end],
            self.elements[begin:end],
            self.encodings[begin:end],
            self.parameters[begin:end],
        )

    def groups(self) -> Iterator[tuple[ValueKind, int, NDArray[np.bool_]]]:
        """Value kind, element width and block mask of every group of values that is there."""
        numbers = self.kinds * len(_WIDTHS) + _WIDTH_CLASSES[self.element_bits]
        for number in np.flatnonzero(np.bincount(numbers)).tolist():
            kind, width = divmod(number, len(_WIDTHS))
            yield VALUE_KINDS[kind], _WIDTHS[width], numbers == number

    def decoded_bytes(self) -> int:
        """Bytes of the indices and values of all blocks once decoded."""
        sparse = self.counts[self.kinds != _DENSE]
        return 4 * int(sparse.sum()) + int((self.counts * self.element_bits).sum()) // 8


def frame_ends(raw_bytes: Numbers) -> list[int]:
    """Where a writer ends its frames, from about how many stream bytes each block has."""
    ends: list[int] = []
    held = 0
    for position, size in enumerate(raw_bytes.tolist(), 1):
        held += size
        if held >= FRAME_BYTES:
            ends.append(position)
            held = 0
    if held:
        ends.append(raw_bytes.size)
    return ends


def encode_frame(
    blocks: Sequence[Block], columns: FrameColumns, packer: Packer
) -> tuple[list[StreamRow], list[bytes]]:
    """Rows and stored bytes of the frame's streams; fills `encodings` and `parameters`."""
    streams: list[tuple[int, Bytes]] = []
    sparse = columns.kinds != _DENSE
    if sparse.any():
        parts = [block.indices for block in blocks if block.indices is not None]
        indices = parts[0] if len(parts) == 1 else np.concatenate(parts)
        ends = np.cumsum(columns.counts[sparse])
        plan = plan_indices(indices, ends, columns.elements[sparse])
        columns.encodings[sparse] = plan.encodings
        columns.parameters[sparse] = plan.parameters
        streams += encode_gaps(indices, ends, plan)
    for kind, _element_bits, mask in columns.groups():
        chosen = [blocks[i].values for i in np.flatnonzero(mask).tolist()]
        values = chosen[0] if len(chosen) == 1 else np.concatenate(chosen)
        streams += ENCODINGS[kind].encode(values, columns.counts[mask])
    streams.sort(key=lambda pair: pair[0])
    rows: list[StreamRow] = []
    stored: list[bytes] = []
    for stream, raw in streams:
        # Rice codes have no redundancy that zstd could find.
        packed = raw.tobytes() if stream == RICE_CODES else packer.pack(raw, repeats=stream in GAPS)
        rows.append(StreamRow(stream, raw.size, len(packed)))
        stored.append(packed)
    return rows, stored


def check_frame(columns: FrameColumns, rows: Sequence[StreamRow], *, what: str) -> None:
    """FormatError unless the frame has exactly the streams its blocks need, of possible sizes."""
    sparse = columns.kinds != _DENSE
    limits = gap_stream_limits(
        columns.counts[sparse],
        columns.elements[sparse],
        columns.encodings[sparse],
        columns.parameters[sparse],
    )
    for kind, element_bits, mask in columns.groups():
        limits |= ENCODINGS[kind].limits(element_bits, columns.counts[mask])
    total = 0
    previous = 0
    for row in rows:
        if row.stream <= previous:
            raise FormatError(f"{what}: streams are not in ascending order", kind=Kind.ORDER)
        previous = row.stream
        least, most = limits.pop(row.stream, (0, 0))
        if not max(least, 1) <= row.raw_bytes <= most:
            raise FormatError(
                f"{what}: stream {row.stream:#04x} declares {row.raw_bytes} bytes,"
                f" its blocks allow {least} to {most}",
                kind=Kind.LIMIT,
            )
        total += row.raw_bytes
    missing = [stream for stream, (least, _most) in limits.items() if least]
    if missing:
        raise FormatError(f"{what}: stream {missing[0]:#04x} is missing", kind=Kind.FIELD)
    if total > MAX_FRAME_BYTES:
        raise FormatError(
            f"{what}: streams of {total} bytes, at most {MAX_FRAME_BYTES} are allowed",
            kind=Kind.LIMIT,
        )


def decode_frame(
    columns: FrameColumns, rows: Sequence[StreamRow], stored: Sequence[memoryview], *, what: str
) -> list[tuple[NDArray[np.uint32] | None, Bits]]:
    """Indices and values of every block of a frame that `check_frame` has passed."""
    streams: dict[int, Bytes] = {}
    for row, content in zip(rows, stored, strict=True):
        padding = PADDING_BYTES if row.stream == RICE_CODES else 0
        name = f"{what}: stream {row.stream:#04x}"
        streams[row.stream] = unpack(content, row.raw_bytes, what=name, padding_bytes=padding)
    return _assemble(columns, streams, what)


def _assemble(
    columns: FrameColumns, streams: Mapping[int, Bytes], what: str
) -> list[tuple[NDArray[np.uint32] | None, Bits]]:
    sparse = columns.kinds != _DENSE
    try:
        indices = decode_gaps(
            streams,
            columns.counts[sparse],
            columns.elements[sparse],
            columns.encodings[sparse],
            columns.parameters[sparse],
        )
        values: list[Bits | None] = [None] * columns.kinds.size
        for kind, element_bits, mask in columns.groups():
            counts = columns.counts[mask]
            joined = ENCODINGS[kind].decode(streams, element_bits, counts)
            end = 0
            for i, count in zip(np.flatnonzero(mask).tolist(), counts.tolist(), strict=True):
                values[i] = joined[end : end + count]
                end += count
    except FormatError as err:
        raise FormatError(f"{what}: {err.message}", kind=err.kind) from err
    parts: list[tuple[NDArray[np.uint32] | None, Bits]] = []
    end = 0
    for value, is_sparse in zip(values, sparse.tolist(), strict=True):
        if value is None:
            raise AssertionError("a block of no group")
        if is_sparse:
            parts.append((indices[end : end + value.size], value))
            end += value.size
        else:
            parts.append((None, value))
    return parts
