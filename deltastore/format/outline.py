"""A merge that decodes everything to learn what lies where needs all of it in memory at once.

The outline of a segment is its table alone: which boxes of which tensors it holds. It is read by
range, without the segment's streams. It is unverified (the SHA-256 covers the whole object): use
it to plan, and compare it with the segment once that has been read whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from deltastore.errors import FormatError, Kind
from deltastore.format.segment import DEFAULT_LIMITS, HEADER, HEADER_BYTES, MAGIC, DecodeLimits
from deltastore.format.segment_table import MAX_BLOCKS, read_table
from deltastore.format.streams import unpack

if TYPE_CHECKING:
    from deltastore.format.box import Box
    from deltastore.format.layout import Layout

ReadRange: TypeAlias = Callable[[int, int], bytes]
"""Given begin and end, those bytes of the object."""

FIRST_READ_BYTES = 64 << 10
"""Enough for the tables of most segments: then one request is all."""


@dataclass(frozen=True, slots=True)
class SegmentOutline:
    """What a segment holds, block by block, in its order."""

    tensors: list[int]
    boxes: list[Box]
    decoded_bytes: int


def read_outline(
    layout: Layout, read: ReadRange, size_bytes: int, *, limits: DecodeLimits = DEFAULT_LIMITS
) -> SegmentOutline:
    """The outline of a segment of that size; FormatError when its table is not one."""
    head = read(0, min(FIRST_READ_BYTES, size_bytes))
    if len(head) < HEADER_BYTES or head[: len(MAGIC)] != MAGIC:
        raise FormatError("these bytes are not a deltastore segment", kind=Kind.MAGIC)
    fields = HEADER.unpack(head[:HEADER_BYTES])
    blocks, frames, raw_bytes, stored_bytes = fields[7], fields[8], fields[10], fields[11]
    end = HEADER_BYTES + stored_bytes
    if blocks > MAX_BLOCKS or frames > blocks or raw_bytes > limits.max_table_bytes:
        raise FormatError("a segment's table is beyond its limits", kind=Kind.LIMIT)
    if end > size_bytes:
        raise FormatError("a segment ends inside its table", kind=Kind.TRUNCATED)
    if end > len(head):
        head += read(len(head), end)
    text = unpack(memoryview(head)[HEADER_BYTES:end], raw_bytes, what="segment table")
    table = read_table(layout, text, blocks, frames)
    return SegmentOutline(table.tensors, table.boxes, table.columns.decoded_bytes())
