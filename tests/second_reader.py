"""A second reader of segments, written from FORMAT.md alone: pure Python, no numpy, no numba.

It shares no code with the library. Where the two disagree, one of them or the document is wrong.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from dataclasses import dataclass

import zstandard

WIDTHS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32", "C64"), 32),
    **dict.fromkeys(("I64", "U64", "F64"), 64),
}
LANES = (
    (0x27D4EB2F165667C5, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 29, 32),
    (0x85EBCA77C2B2AE63, 0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 31, 30),
)
MASK = (1 << 64) - 1


class RefusedError(Exception):
    """These bytes are not a segment."""


def must(condition: bool, rule: str) -> None:
    """Refuse unless the condition holds."""
    if not condition:
        raise RefusedError(rule)


@dataclass
class Tensor:
    """A row of the layout."""

    bits: int
    shape: list[int]
    first_element: int
    elements: int


@dataclass
class Block:
    """A block as the document describes it."""

    tensor: int
    start: list[int]
    sizes: list[int]
    boxed: bool
    kind: str
    indices: list[int] | None
    values: list[int]
    change: tuple[int, int]


def read_layout(text: bytes) -> tuple[str, list[Tensor]]:
    """Digest and tensors."""
    tensors: list[Tensor] = []
    first = 0
    for _name, dtype, shape, _aliases in json.loads(text)["tensors"]:
        must(len(shape) <= 16, "dimensions")
        full = [*shape, 2] if dtype == "C64" else list(shape)
        count = product(full)
        tensors.append(Tensor(WIDTHS[dtype], full, first, count))
        first += count
        must(first <= 1 << 48, "elements of a layout")
    return hashlib.sha256(text).hexdigest(), tensors


def product(numbers: list[int]) -> int:
    """Of all numbers."""
    result = 1
    for n in numbers:
        result *= n
    return result


class Cursor:
    """Takes bytes and numbers off the front."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        """Exactly so many bytes."""
        must(self.at + count <= len(self.data), "ends early")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self) -> int:
        """A LEB128 number in its shortest form."""
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                must(not (byte == 0 and shift), "not the shortest form")
                must(value < 1 << 63, "number too large")
                return value
            shift += 7
            must(shift <= 56, "number too large")

    def finish(self) -> None:
        """All bytes are used."""
        must(self.at == len(self.data), "bytes left over")


class Bits:
    """Bits of a stream, least significant of each byte first."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def bit(self) -> int:
        """The next bit."""
        must(self.at < 8 * len(self.data), "ends early")
        self.at += 1
        return self.data[(self.at - 1) // 8] >> ((self.at - 1) % 8) & 1

    def align(self) -> None:
        """To the next byte; what is skipped is 0."""
        while self.at % 8:
            must(self.bit() == 0, "padding bits are set")

    def finish(self) -> None:
        """All bytes are used."""
        must(self.at == 8 * len(self.data), "bytes left over")


def expand(stored: bytes, raw_size: int) -> bytes:
    """The raw form of a table or stream."""
    must(len(stored) <= raw_size and bool(stored) >= bool(raw_size), "stored size is wrong")
    if len(stored) == raw_size:
        return stored
    frame = zstandard.get_frame_parameters(stored)
    must(frame.content_size == raw_size and not frame.dict_id, "zstd frame of another size")
    must(not frame.has_checksum, "zstd frame with a checksum")
    raw = zstandard.ZstdDecompressor().decompress(
        stored, max_output_size=raw_size, allow_extra_data=False
    )
    must(len(raw) == raw_size, "zstd frame of another size")
    return raw


def read_segment(layout_text: bytes, data: bytes) -> tuple[int, int, list[Block]]:
    """Base version, version and blocks."""
    digest, tensors = read_layout(layout_text)
    must(len(data) >= 96, "ends early")
    magic, order, fmt, flags, named, base, version, blocks, frames, nnz, raw, stored, body = (
        struct.unpack("<8sHHI32sQQIIQIIQ", data[:96])
    )
    must(magic == b"\x89DSSEG\r\n" and order == 0xFEFF, "magic")
    must((fmt, flags) == (1, 0) and named.hex() == digest, "version, flags or layout")
    must(base < version <= 9_999_999_999, "versions")
    must(blocks <= 131_072 and frames <= blocks and raw <= 32 << 20, "limits")
    must(len(data) == 96 + stored + 16 * blocks + body, "size")
    table = Cursor(expand(data[96 : 96 + stored], raw))
    rows = read_rows(table, blocks, tensors)
    decoded = sum(decoded_bytes(row, tensors) for row in rows)
    must(decoded <= 1 << 30, "decoded indices and values")
    counts = [(table.number(), table.number()) for _ in range(frames)]
    must(all(n >= 1 and s >= 1 for n, s in counts), "empty frame")
    must(sum(n for n, _ in counts) == blocks, "frames do not hold the blocks")
    total = sum(s for _, s in counts)
    ids = list(table.take(total))
    raw_sizes = [table.number() for _ in range(total)]
    stored_sizes = [table.number() for _ in range(total)]
    table.finish()
    at = 0
    for _blocks, n_streams in counts:
        must(sum(raw_sizes[at : at + n_streams]) <= 64 << 20, "streams of a frame")
        at += n_streams
    must(sum(stored_sizes) == body and sum(len_of(row) for row in rows) == nnz, "sums")
    changes = struct.unpack(f"<{2 * blocks}Q", data[96 + stored : 96 + stored + 16 * blocks])
    for i, row in enumerate(rows):
        row["change"] = (changes[2 * i], changes[2 * i + 1])
    at = 96 + stored + 16 * blocks
    first = stream = 0
    result: list[Block] = []
    for n_blocks, n_streams in counts:
        streams: dict[int, bytes] = {}
        last = 0
        for i in range(stream, stream + n_streams):
            must(ids[i] > last and raw_sizes[i] >= 1, "stream order")
            last = ids[i]
            streams[ids[i]] = expand(data[at : at + stored_sizes[i]], raw_sizes[i])
            at += stored_sizes[i]
        result += read_frame(rows[first : first + n_blocks], streams, tensors)
        first += n_blocks
        stream += n_streams
    return base, version, result


def len_of(row: dict) -> int:
    """Stored values of a block."""
    return row["nnz"] if row["kind"] != 2 else product(row["sizes"])


def decoded_bytes(row: dict, tensors: list[Tensor]) -> int:
    """What the indices and values of a block take."""
    width = tensors[row["tensor"]].bits // 8
    return len_of(row) * (width if row["kind"] == 2 else width + 4)


def read_rows(table: Cursor, blocks: int, tensors: list[Tensor]) -> list[dict]:
    """The columns over the blocks."""
    rows = [
        {"kind": f & 3, "encoding": f >> 2 & 7, "boxed": bool(f & 0x20), "form": f}
        for f in table.take(blocks)
    ]
    position = 0
    for row in rows:
        must(row["form"] < 0x40 and row["kind"] < 3 and row["encoding"] < 4, "form")
        must((row["kind"] == 2) == (row["encoding"] == 0), "dense has no indices")
        position += table.number()
        must(position < len(tensors), "tensor")
        row["tensor"] = position
    for row in rows:
        if row["encoding"] == 3:
            row["k"] = table.take(1)[0]
            must(row["k"] <= 22, "Rice parameter")
    for row in rows:
        if row["kind"] != 2:
            row["nnz"] = table.number()
    runs = [row for row in rows if not row["boxed"]]
    ends: dict[int, int] = {}
    skips = [table.number() for _ in runs]
    for row, skip in zip(runs, skips, strict=True):
        size = table.number()
        start = ends.get(row["tensor"], 0) + skip
        row["start"], row["sizes"] = [start], [size]
        ends[row["tensor"]] = start + size
        must(start + size <= tensors[row["tensor"]].elements, "run leaves its tensor")
    for row in rows:
        shape = tensors[row["tensor"]].shape
        if row["boxed"]:
            row["start"] = [table.number() for _ in shape]
            row["sizes"] = [table.number() for _ in shape]
            inside = zip(row["start"], row["sizes"], shape, strict=True)
            must(all(s + n <= full for s, n, full in inside), "box leaves its tensor")
        must(1 <= product(row["sizes"]) <= 1 << 22, "box size")
        must(row["kind"] == 2 or 1 <= row["nnz"] <= product(row["sizes"]), "nnz")
    check_disjoint(rows)
    return rows


def check_disjoint(rows: list[dict]) -> None:
    """Boxes of a tensor ascend and share no element; they are not mixed with runs, nor too many."""
    boxes = Counter(row["tensor"] for row in rows if row["boxed"])
    must(max(boxes.values(), default=0) <= 8192, "boxes of a tensor")
    for i, a in enumerate(rows):
        for b in rows[i + 1 :]:
            if a["tensor"] != b["tensor"]:
                continue
            must(a["boxed"] == b["boxed"] and a["start"] < b["start"], "order of boxes")
            edges = zip(a["start"], a["sizes"], b["start"], b["sizes"], strict=True)
            apart = any(s + n <= t or t + m <= s for s, n, t, m in edges)
            must(apart, "boxes overlap")


def read_frame(rows: list[dict], streams: dict[int, bytes], tensors: list[Tensor]) -> list[Block]:
    """Indices and values of the blocks of one frame."""
    rice = Bits(streams.pop(1, b""))
    gaps = Cursor(streams.pop(2, b""))
    low, high, wide = (Cursor(streams.pop(i, b"")) for i in (3, 4, 5))
    planes: dict[int, Cursor] = {}
    bits: dict[int, Bits] = {}

    def plane(base: int, w: int, p: int) -> Cursor:
        name = base + 8 * w + p
        if name not in planes:
            must(name in streams, "stream is missing")
            planes[name] = Cursor(streams.pop(name))
        return planes[name]

    def bit_stream(name: int) -> Bits:
        if name not in bits:
            must(name in streams, "stream is missing")
            bits[name] = Bits(streams.pop(name))
        return bits[name]

    def pattern(base: int, w: int) -> int:
        return sum(plane(base, w, p).take(1)[0] << 8 * p for p in range(1 << w))

    def gap(row: dict) -> int:
        if row["encoding"] == 1:
            return gaps.number()
        if row["encoding"] == 2:
            short = low.take(1)[0] | high.take(1)[0] << 8
            return short if short < 0xFFFF else short + wide.number()
        quotient = 0
        while not rice.bit():
            quotient += 1
        rest = sum(rice.bit() << j for j in range(row["k"]))
        return quotient << row["k"] | rest

    blocks: list[Block] = []
    for row in rows:
        b = tensors[row["tensor"]].bits
        w = b.bit_length() - 4
        elements = product(row["sizes"])
        indices: list[int] | None = None
        if row["kind"] != 2:
            indices = []
            index = -1
            for _ in range(row["nnz"]):
                index += gap(row) + 1
                must(index < elements, "index outside its box")
                indices.append(index)
            rice.align()
        values: list[int] = []
        if row["kind"] == 0:
            down = [bit_stream(0x10 + w).bit() for _ in range(row["nnz"])]
            more = [bit_stream(0x14 + w).bit() for _ in range(row["nnz"])]
            bit_stream(0x10 + w).align()
            bit_stream(0x14 + w).align()
            for falls, beyond in zip(down, more, strict=True):
                size = pattern(0x20, w) + 2 if beyond else 1
                must(size <= (1 << (b - 1)) - 1 + falls, "magnitude out of range")
                values.append((-size if falls else size) % (1 << b))
        else:
            base = 0x40 if row["kind"] == 1 else 0x60
            values = [pattern(base, w) for _ in range(len_of(row))]
        kind = ("ulp", "bits", "dense")[row["kind"]]
        place = (row["tensor"], row["start"], row["sizes"], row["boxed"])
        blocks.append(Block(*place, kind, indices, values, row["change"]))
    must(not streams, "unknown stream")
    for cursor in (rice, gaps, low, high, wide, *planes.values(), *bits.values()):
        cursor.finish()
    return blocks


def mix(index: int, pattern: int) -> tuple[int, int]:
    """Both lanes of one element."""
    lanes = []
    for c0, c1, c2, c3, s, t in LANES:
        x = (c0 + index * c1 + pattern * c2) & MASK
        x = ((x ^ (x >> s)) * c3) & MASK
        lanes.append(x ^ (x >> t))
    return lanes[0], lanes[1]


def offsets(block: Block, shape: list[int]) -> list[int]:
    """Offsets in the tensor of the changed elements."""
    indices = block.indices if block.indices is not None else range(product(block.sizes))
    if not block.boxed:
        return [block.start[0] + i for i in indices]
    result = []
    for index in indices:
        place = []
        for n in reversed(block.sizes):
            index, inside = divmod(index, n)
            place.append(inside)
        offset = 0
        for inside, start, full in zip(reversed(place), block.start, shape, strict=True):
            offset = offset * full + start + inside
        result.append(offset)
    return result


def apply(layout_text: bytes, state: list[list[int]], blocks: list[Block]) -> None:
    """Apply blocks that each declare their own change; refuse before a block is written."""
    _digest, tensors = read_layout(layout_text)
    for block in blocks:
        tensor = tensors[block.tensor]
        bits = state[block.tensor]
        low = high = 0
        writes = []
        for offset, value in zip(offsets(block, tensor.shape), block.values, strict=True):
            new = (bits[offset] + value) % (1 << tensor.bits) if block.kind == "ulp" else value
            after = mix(tensor.first_element + offset, new)
            before = mix(tensor.first_element + offset, bits[offset])
            low += after[0] - before[0]
            high += after[1] - before[1]
            writes.append((offset, new))
        must((low & MASK, high & MASK) == block.change, "fingerprint change")
        for offset, new in writes:
            bits[offset] = new
