"""Ranks that each decode the same update waste a core each: decoded once, it is a file they map.

A staged update as one file, laid out so that a reader needs no copy. All numbers are little-endian;
every part begins at a multiple of 64 bytes, zeros between them:

    header   64 bytes: magic, byte order mark, format version, flags (0), bytes of the core,
             blocks, numbers of all boxes, bytes of the whole file; rest zero
    core     canonical JSON: what the update leads from and to
    table    one row of 32 bytes per block: tensor, kind (0 ulp, 1 bits, 2 dense), flat, rank,
             changes, fingerprint change
    boxes    int64: per block its start, then its shape
    arrays   per block its indices (uint32; none of a dense one) and its values; of a whole state
             (no blocks, "state" in the core) every tensor's bits, in layout order

It never leaves the host and is not kept: a reader takes the format version it was built with. Its
SHA-256 travels beside it. A reader MUST still check every number before it believes it: kernels do
no bounds checks.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.errors import FormatError, Kind
from deltastore.format.block import Block, ValueKind
from deltastore.format.box import MAX_BOX_ELEMENTS, MAX_RANK, Box
from deltastore.format.canonical import canonical_json, parse_canonical_json
from deltastore.format.disjoint import check_disjoint
from deltastore.format.fingerprint import Fingerprint
from deltastore.format.frames import KIND_NUMBERS, VALUE_KINDS
from deltastore.format.kernels_base import frozen
from deltastore.format.kernels_merge import is_increasing
from deltastore.format.layout import BitState, require_same_layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from deltastore.format.layout import Layout

MAGIC = b"\x89DSSTG\r\n"
BYTE_ORDER = 0xFEFF
FORMAT_VERSION = 1
ALIGNMENT = 64
HEADER = struct.Struct("<8sHHIQQQQ")
MAX_CORE_BYTES = 1 << 16
MAX_BLOCKS = 1 << 26
CORE_FORMAT = "deltastore-staged/1"
_ROW = np.dtype(
    [
        ("tensor", "<u4"),
        ("kind", "u1"),
        ("flat", "u1"),
        ("rank", "<u2"),
        ("count", "<u8"),
        ("low", "<u8"),
        ("high", "<u8"),
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class StagedContent:
    """What a file holds.

    Args:
        about: plain values that say what the update leads from and to.
        blocks: its changes; none beside a state.
        state: a whole state, when that was the way.
    """

    about: dict[str, Any]
    blocks: list[Block]
    state: BitState | None = None


def staged_parts(layout: Layout, content: StagedContent) -> Iterator[memoryview]:
    """The file's bytes, part by part, without copying the arrays."""
    blocks = content.blocks
    core = canonical_json(
        {
            "format": CORE_FORMAT,
            "layout_digest": layout.digest,
            "state": content.state is not None,
            "about": content.about,
        }
    )
    rows = [
        (
            block.tensor,
            KIND_NUMBERS[block.kind],
            block.box.flat,
            len(block.box.shape),
            block.values.size,
            block.fingerprint_change.low,
            block.fingerprint_change.high,
        )
        for block in blocks
    ]
    numbers = [number for block in blocks for number in (*block.box.start, *block.box.shape)]
    parts = [
        memoryview(core),
        _bytes(np.array(rows, _ROW)),
        _bytes(np.array(numbers, "<i8")),
        *(_bytes(array) for array in _arrays(content)),
    ]
    total = ALIGNMENT + sum(_padded(part.nbytes) for part in parts)
    header = HEADER.pack(
        MAGIC, BYTE_ORDER, FORMAT_VERSION, 0, len(core), len(blocks), len(numbers), total
    )
    for part in (memoryview(header), *parts):
        yield part
        if part.nbytes % ALIGNMENT:
            yield memoryview(bytes(ALIGNMENT - part.nbytes % ALIGNMENT))


def staged_bytes(content: StagedContent) -> int:
    """About how large the file becomes; never less than its arrays."""
    arrays = sum(_padded(array.nbytes) for array in _arrays(content))
    return arrays + 4096 + len(content.blocks) * (_ROW.itemsize + 32)


def read_staged(layout: Layout, data: memoryview) -> StagedContent:
    """Read a file; its arrays are read-only views of `data`.

    Raises FormatError on anything `staged_parts` does not write, IntegrityError(layout_mismatch).
    """
    view = data.cast("B").toreadonly()
    core_bytes, count, numbers = _read_header(view)
    reader = _Reader(view, ALIGNMENT)
    core = _read_core(bytes(reader.take(core_bytes)))
    require_same_layout(layout.digest, core["layout_digest"], what="staged update")
    if core["state"]:
        if count or numbers:
            raise FormatError("a staged state has blocks", kind=Kind.FIELD)
        state = BitState(
            layout, [reader.array(spec.elements, spec.dtype.bits_dtype) for spec in layout.tensors]
        )
        reader.end()
        return StagedContent(core["about"], [], state)
    table = reader.array(count, _ROW)
    boxes = reader.array(numbers, np.dtype("<i8")).tolist()
    blocks = _read_blocks(layout, table, boxes, reader)
    reader.end()
    check_disjoint(layout, ((block.tensor, block.box) for block in blocks))
    return StagedContent(core["about"], blocks)


class _Reader:
    """Takes aligned parts from a view, never beyond its end."""

    def __init__(self, view: memoryview, at: int) -> None:
        self._view = view
        self._at = at

    def take(self, size_bytes: int) -> memoryview:
        if size_bytes > len(self._view) - self._at:
            raise FormatError("a staged update ends inside a part", kind=Kind.TRUNCATED)
        part = self._view[self._at : self._at + size_bytes]
        self._at += _padded(size_bytes)
        return part

    def array(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def end(self) -> None:
        if self._at != len(self._view):
            raise FormatError("bytes follow a staged update", kind=Kind.TRAILING)


def _read_header(view: memoryview) -> tuple[int, int, int]:
    if len(view) < ALIGNMENT:
        raise FormatError("a staged update is shorter than its header", kind=Kind.TRUNCATED)
    magic, order, fmt, flags, core_bytes, count, numbers, total = HEADER.unpack_from(view)
    if magic != MAGIC or order != BYTE_ORDER:
        raise FormatError("these bytes are not a staged update", kind=Kind.MAGIC)
    if fmt != FORMAT_VERSION:
        raise FormatError(
            f"staged update of format {fmt}, not {FORMAT_VERSION}",
            kind=Kind.FORMAT_VERSION,
            hint="run stager and ranks from one installation",
        )
    if flags or any(view[HEADER.size : ALIGNMENT]):
        raise FormatError("reserved bytes of a staged update are not 0", kind=Kind.FIELD)
    if core_bytes > MAX_CORE_BYTES or count > MAX_BLOCKS or numbers > 2 * MAX_RANK * count:
        raise FormatError(
            f"staged update of {count} blocks with {numbers} numbers", kind=Kind.LIMIT
        )
    if total != len(view):
        kind = Kind.TRUNCATED if len(view) < total else Kind.TRAILING
        raise FormatError(f"staged update has {len(view)} bytes, not {total}", kind=kind)
    return core_bytes, count, numbers


def _read_core(text: bytes) -> dict[str, Any]:
    document = parse_canonical_json(text, what="staged update", max_bytes=MAX_CORE_BYTES)
    match document:
        case {
            "format": str(fmt),
            "layout_digest": str(),
            "state": bool(),
            "about": dict(),
            **rest,
        } if not rest and fmt == CORE_FORMAT:
            return dict(document)
    raise FormatError("the core of a staged update has other fields", kind=Kind.FIELD)


def _read_blocks(
    layout: Layout, table: NDArray[Any], boxes: Sequence[int], reader: _Reader
) -> list[Block]:
    blocks: list[Block] = []
    at = 0
    for tensor, kind, flat, rank, count, low, high in table.tolist():
        if tensor >= len(layout) or kind >= len(VALUE_KINDS) or flat > 1 or rank > MAX_RANK:
            raise FormatError(f"staged block {len(blocks)} has an odd field", kind=Kind.FIELD)
        spec = layout.tensors[tensor]
        start, shape = boxes[at : at + rank], boxes[at + rank : at + 2 * rank]
        at += 2 * rank
        box = Box(tuple(start), tuple(shape), bool(flat))
        dense = VALUE_KINDS[kind] is ValueKind.DENSE
        if not box.fits(spec.element_shape) or not 0 < box.elements <= MAX_BOX_ELEMENTS:
            raise FormatError(f"staged block {len(blocks)} leaves its tensor", kind=Kind.BOX)
        if not 0 < count <= box.elements or (dense and count != box.elements):
            raise FormatError(f"staged block {len(blocks)} has {count} changes", kind=Kind.LIMIT)
        indices = None if dense else reader.array(count, np.dtype("<u4"))
        if indices is not None and (
            int(indices[-1]) >= box.elements or not is_increasing(frozen(indices))
        ):
            raise FormatError(f"indices of staged block {len(blocks)} jump", kind=Kind.ORDER)
        values = reader.array(count, spec.dtype.bits_dtype)
        change = Fingerprint(low, high)
        blocks.append(Block(tensor, box, VALUE_KINDS[kind], indices, values, change))
    if at != len(boxes):
        raise FormatError("boxes follow those of the staged blocks", kind=Kind.TRAILING)
    return blocks


def _arrays(content: StagedContent) -> Iterator[NDArray[Any]]:
    if content.state is not None:
        yield from content.state.arrays
    for block in content.blocks:
        if block.indices is not None:
            yield block.indices
        yield block.values


def _bytes(array: NDArray[Any]) -> memoryview:
    plain: Any = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    return memoryview(plain)


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
