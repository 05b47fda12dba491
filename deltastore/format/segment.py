"""An object that does not say what it belongs to gets applied to the wrong weights: a segment does.

One uploaded object: a header that names layout, base and target version, a table of blocks, their
fingerprint changes, and the streams of its frames. FORMAT.md is the specification of every byte.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deltastore.errors import FormatError, IntegrityError, InvalidInputError, Kind
from deltastore.format.block import Block, ValueKind
from deltastore.format.fingerprint import Fingerprint
from deltastore.format.frames import (
    VALUE_KINDS,
    FrameColumns,
    decode_frame,
    encode_frame,
    frame_ends,
)
from deltastore.format.indices import IndexEncoding, Numbers
from deltastore.format.kernels_base import frozen
from deltastore.format.kernels_values import estimated_bits_of_each, estimated_step_bits
from deltastore.format.layout import Layout, require_same_layout
from deltastore.format.segment_checks import (
    DEFAULT_LIMITS,
    DecodeLimits,
    check_blocks,
    check_geometry,
    columns_of,
    tensors_of,
)
from deltastore.format.segment_table import (
    MAX_BLOCKS,
    FrameRow,
    SegmentTable,
    read_forms,
    read_table,
    write_table,
)
from deltastore.format.streams import Bytes, Packer, unpack
from deltastore.ids import MAX_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BYTE_ORDER",
    "DEFAULT_LEVEL",
    "DEFAULT_LIMITS",
    "FORMAT_VERSION",
    "HEADER",
    "HEADER_BYTES",
    "MAGIC",
    "DecodeLimits",
    "DecodedSegment",
    "SegmentIdentity",
    "SegmentStats",
    "decode_segment",
    "encode_segment",
    "estimated_bytes",
    "estimated_sizes",
    "segment_encodings",
]

MAGIC = b"\x89DSSEG\r\n"
BYTE_ORDER = 0xFEFF
FORMAT_VERSION = 1
HEADER = struct.Struct("<8sHHI32sQQIIQIIQ")
HEADER_BYTES = HEADER.size
FINGERPRINT_BYTES = 16
DEFAULT_LEVEL = 1
"""zstd level of streams that may repeat; higher ones find nothing more in most updates."""


@dataclass(frozen=True, slots=True)
class SegmentIdentity:
    """What a segment belongs to: its layout, and the versions it leads from and to."""

    layout_digest: str
    base_version: int
    version: int


@dataclass(frozen=True, slots=True)
class SegmentStats:
    """Figures of a segment, for manifests, metrics and people."""

    blocks: int
    frames: int
    nnz: int
    stored_bytes: int
    decoded_bytes: int
    encodings: frozenset[str]


@dataclass(frozen=True, slots=True)
class DecodedSegment:
    """A segment's blocks, in order of tensor and start, disjoint."""

    identity: SegmentIdentity
    blocks: list[Block]
    stats: SegmentStats


@dataclass(frozen=True, slots=True)
class _Header:
    identity: SegmentIdentity
    blocks: int
    frames: int
    nnz: int
    table_raw_bytes: int
    table_stored_bytes: int
    body_bytes: int


def encode_segment(
    layout: Layout,
    identity: SegmentIdentity,
    blocks: Sequence[Block],
    *,
    level: int = DEFAULT_LEVEL,
) -> bytes:
    """The segment of these blocks: each in its smallest encoding, sorted by tensor and start.

    The same blocks give the same bytes, whatever their order and wherever it runs (for one version
    of zstd). InvalidInputError names what cannot be encoded.
    """
    require_same_layout(layout.digest, identity.layout_digest, what="segment to encode")
    if not 0 <= identity.base_version < identity.version <= MAX_VERSION:
        raise InvalidInputError(
            f"a segment cannot lead from {identity.base_version} to {identity.version}",
            kind=Kind.VERSION,
        )
    if len(blocks) > MAX_BLOCKS:
        raise InvalidInputError(
            f"segment of {len(blocks)} blocks",
            kind=Kind.LIMIT,
            hint=f"at most {MAX_BLOCKS}: use more segments",
        )
    blocks = sorted(blocks, key=lambda b: (b.tensor, b.box.start))
    tensors = tensors_of(layout, blocks)
    columns = columns_of(layout, tensors, blocks)
    boxes = [block.box for block in blocks]
    check_blocks(blocks, columns)
    check_geometry(layout, tensors, boxes, columns)
    packer = Packer(level)
    frames: list[FrameRow] = []
    body: list[bytes] = []
    begin = 0
    for end in frame_ends(_stream_bytes(columns)):
        rows, stored = encode_frame(blocks[begin:end], columns.part(begin, end), packer)
        frames.append(FrameRow(end - begin, tuple(rows)))
        body += stored
        begin = end
    table = write_table(tensors, boxes, columns, frames)
    packed_table = packer.pack(table, repeats=True)
    header = HEADER.pack(
        MAGIC,
        BYTE_ORDER,
        FORMAT_VERSION,
        0,
        bytes.fromhex(identity.layout_digest),
        identity.base_version,
        identity.version,
        len(blocks),
        len(frames),
        int(columns.counts.sum()),
        len(table),
        len(packed_table),
        sum(map(len, body)),
    )
    changes = np.array(
        [(b.fingerprint_change.low, b.fingerprint_change.high) for b in blocks], "<u8"
    )
    return b"".join([header, packed_table, changes.tobytes(), *body])


def decode_segment(
    layout: Layout,
    data: bytes | memoryview,
    *,
    expect: SegmentIdentity | None = None,
    limits: DecodeLimits = DEFAULT_LIMITS,
) -> DecodedSegment:
    """Read a segment, believing nothing: sizes are checked before anything of that size is made.

    FormatError when the bytes are not a segment of this layout, IntegrityError when they are one
    of another layout or not the `expect`ed one.
    """
    view = memoryview(data).cast("B").toreadonly()
    header = _read_header(view, limits)
    require_same_layout(layout.digest, header.identity.layout_digest, what="segment")
    if expect is not None and header.identity != expect:
        raise IntegrityError(
            f"segment leads from {header.identity.base_version} to {header.identity.version},"
            f" not from {expect.base_version} to {expect.version}",
            kind=Kind.WRONG_BASE,
        )
    table = read_table(layout, _table_bytes(view, header), header.blocks, header.frames)
    decoded_bytes = table.columns.decoded_bytes()
    if decoded_bytes > limits.max_decoded_bytes:
        raise FormatError(
            f"segment decodes to {decoded_bytes} bytes, at most {limits.max_decoded_bytes} are"
            " allowed",
            kind=Kind.LIMIT,
        )
    stored = sum(row.stored_bytes for frame in table.frames for row in frame.streams)
    if table.nnz != header.nnz or stored != header.body_bytes:
        raise FormatError("segment header and table disagree on sizes", kind=Kind.FIELD)
    blocks = _read_blocks(view, header, table)
    encodings = frozenset(_labels(table.columns))
    stats = SegmentStats(
        header.blocks, header.frames, header.nnz, len(view), decoded_bytes, encodings
    )
    return DecodedSegment(header.identity, blocks, stats)


def segment_encodings(data: bytes | memoryview) -> frozenset[str]:
    """The names of the index and value encodings a segment uses, for the manifest."""
    view = memoryview(data).cast("B").toreadonly()
    header = _read_header(view, DEFAULT_LIMITS)
    return frozenset(read_forms(_table_bytes(view, header), header.blocks))


def estimated_bytes(block: Block) -> int:
    """About how many bytes a block takes in a segment, for packing; never far below the truth."""
    if block.kind is ValueKind.STEPS:
        return _sparse_bytes(block, int(estimated_step_bits(frozen(block.values))))
    if block.kind is ValueKind.DENSE:
        return block.values.nbytes + 64
    return _sparse_bytes(block, block.values.nbytes * 8)


def estimated_sizes(blocks: Sequence[Block]) -> list[int]:
    """`estimated_bytes` of each: one call where they are many and alike, as small tensors are."""
    kinds = {(block.kind, block.values.dtype) for block in blocks}
    if len(kinds) != 1 or next(iter(kinds))[0] is not ValueKind.STEPS or len(blocks) == 1:
        return [estimated_bytes(block) for block in blocks]
    ends = np.cumsum([block.values.size for block in blocks])
    bits = np.empty(ends.size, np.int64)
    values = np.concatenate([block.values for block in blocks])
    estimated_bits_of_each(frozen(values), frozen(ends), bits)
    return [_sparse_bytes(*pair) for pair in zip(blocks, bits.tolist(), strict=True)]


def _sparse_bytes(block: Block, value_bits: int) -> int:
    box, count = block.box, block.values.size
    elements = box.shape[0] if box.flat else box.elements
    gap = max(elements // count, 1)
    return (count * (gap.bit_length() + 1) + value_bits) // 8 + 64


def _stream_bytes(columns: FrameColumns) -> Numbers:
    widths = columns.element_bits // 8
    per_value = np.choose(columns.kinds, [np.ones_like(widths), 1 + widths, widths])
    sizes: Numbers = columns.counts * per_value + columns.counts // 2
    return sizes


def _labels(columns: FrameColumns) -> set[str]:
    names = {VALUE_KINDS[number].value for number in np.unique(columns.kinds).tolist()}
    numbers = np.unique(columns.encodings[columns.encodings != IndexEncoding.NONE]).tolist()
    return names | {IndexEncoding(number).label for number in numbers}


def _read_header(view: memoryview, limits: DecodeLimits) -> _Header:
    if len(view) < HEADER_BYTES:
        raise FormatError(
            f"segment of {len(view)} bytes is shorter than its header", kind=Kind.TRUNCATED
        )
    magic, order, fmt, flags, digest, base, version, *sizes = HEADER.unpack(view[:HEADER_BYTES])
    if magic != MAGIC:
        raise FormatError("these bytes are not a deltastore segment", kind=Kind.MAGIC)
    if order != BYTE_ORDER:
        raise FormatError("segment is not little-endian", kind=Kind.MAGIC)
    if fmt != FORMAT_VERSION:
        raise FormatError(
            f"segment format {fmt} is not {FORMAT_VERSION}",
            kind=Kind.FORMAT_VERSION,
            hint="upgrade deltastore",
        )
    if flags:
        raise FormatError(f"segment flags {flags:#x} are reserved", kind=Kind.FIELD)
    if not base < version <= MAX_VERSION:
        raise FormatError(f"segment leads from {base} to {version}", kind=Kind.FIELD)
    header = _Header(SegmentIdentity(digest.hex(), base, version), *sizes)
    if header.blocks > MAX_BLOCKS or header.frames > header.blocks:
        raise FormatError(
            f"segment of {header.blocks} blocks in {header.frames} frames", kind=Kind.LIMIT
        )
    if header.table_raw_bytes > limits.max_table_bytes:
        raise FormatError(f"segment table of {header.table_raw_bytes} bytes", kind=Kind.LIMIT)
    expected = (
        HEADER_BYTES
        + header.table_stored_bytes
        + header.blocks * FINGERPRINT_BYTES
        + header.body_bytes
    )
    if len(view) != expected:
        short = len(view) < expected
        raise FormatError(
            f"segment has {len(view)} bytes, its header says {expected}",
            kind=Kind.TRUNCATED if short else Kind.TRAILING,
        )
    return header


def _table_bytes(view: memoryview, header: _Header) -> Bytes:
    stored = view[HEADER_BYTES : HEADER_BYTES + header.table_stored_bytes]
    return unpack(stored, header.table_raw_bytes, what="segment table")


def _read_blocks(view: memoryview, header: _Header, table: SegmentTable) -> list[Block]:
    at = HEADER_BYTES + header.table_stored_bytes
    changes = np.frombuffer(view, "<u8", 2 * header.blocks, at).tolist()
    at += header.blocks * FINGERPRINT_BYTES
    blocks: list[Block] = []
    for number, frame in enumerate(table.frames):
        stored: list[memoryview] = []
        for row in frame.streams:
            stored.append(view[at : at + row.stored_bytes])
            at += row.stored_bytes
        first = len(blocks)
        columns = table.columns.part(first, first + frame.blocks)
        kinds = columns.kinds.tolist()
        parts = decode_frame(columns, frame.streams, stored, what=f"frame {number}")
        for i, (indices, values) in enumerate(parts):
            place = first + i
            change = Fingerprint(changes[2 * place], changes[2 * place + 1])
            kind = VALUE_KINDS[kinds[i]]
            blocks.append(
                Block(table.tensors[place], table.boxes[place], kind, indices, values, change)
            )
    return blocks
