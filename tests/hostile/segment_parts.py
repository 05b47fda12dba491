"""Takes a segment apart and puts it together with any field changed: for tests of the reader."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import zstandard

from deltastore.format.segment import HEADER, MAGIC


def leb128(*numbers: int) -> bytes:
    """Numbers in minimal LEB128, of any size."""
    out = bytearray()
    for n in numbers:
        while n >= 128:
            out.append(n & 127 | 128)
            n >>= 7
        out.append(n)
    return bytes(out)


@dataclass(frozen=True)
class Parts:
    """Every column of a segment, as values; `encode` writes them, right or wrong.

    Sizes of the header follow from the content unless `header` overrides them by name.
    """

    digest: str
    forms: list[int]
    tensors: list[int]
    parameters: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    skips: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    boxes: list[int] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)
    streams: list[tuple[int, bytes]] = field(default_factory=list)
    raw_sizes: list[int] | None = None
    changes: bytes | None = None
    trailing: bytes = b""
    table_tail: bytes = b""
    nnz: int | None = None
    header: dict[str, Any] = field(default_factory=dict)

    def but(self, **fields: Any) -> Parts:
        """The same parts with some replaced."""
        return replace(self, **fields)

    def table(self) -> bytes:
        """The columns."""
        raw = self.raw_sizes or [len(content) for _stream, content in self.streams]
        return b"".join(
            [
                bytes(self.forms),
                leb128(*self.tensors),
                bytes(self.parameters),
                leb128(*self.counts),
                leb128(*self.skips),
                leb128(*self.sizes),
                leb128(*self.boxes),
                leb128(*self.frames),
                bytes(stream for stream, _content in self.streams),
                leb128(*raw),
                leb128(*(len(content) for _stream, content in self.streams)),
                self.table_tail,
            ]
        )

    def encode(self) -> bytes:
        """The segment."""
        table = self.table()
        body = b"".join(content for _stream, content in self.streams)
        fields = {
            "magic": MAGIC,
            "order": 0xFEFF,
            "format": 1,
            "flags": 0,
            "digest": bytes.fromhex(self.digest),
            "base": 6,
            "version": 7,
            "blocks": len(self.forms),
            "frames": len(self.frames) // 2,
            "nnz": sum(self.counts) if self.nnz is None else self.nnz,
            "table_raw": len(table),
            "table_stored": len(table),
            "body": len(body),
        } | self.header
        changes = bytes(16 * len(self.forms)) if self.changes is None else self.changes
        return HEADER.pack(*fields.values()) + table + changes + body + self.trailing


ULP_RICE, ULP_LEB, ULP_GAP16, BITS_LEB, DENSE = 0x0C, 0x04, 0x08, 0x05, 0x02
BOXED = 0x20


def sparse(digest: str, gaps: bytes, count: int, *, elements: int = 64) -> Parts:
    """One `ulp` block of one-steps up with LEB128 gaps in tensor 0 of 16-bit elements."""
    bits = (count + 7) // 8
    return Parts(
        digest,
        forms=[ULP_LEB],
        tensors=[0],
        counts=[count],
        skips=[0],
        sizes=[elements],
        frames=[1, 3],
        streams=[(0x02, gaps), (0x11, bytes(bits)), (0x15, bytes(bits))],
    )


def rice_bits(*codes: tuple[int, int, int]) -> bytes:
    """(quotient, rest, k) codes as a Rice stream."""
    bits: list[int] = []
    for quotient, rest, k in codes:
        bits += [0] * quotient + [1] + [rest >> j & 1 for j in range(k)]
    return np.packbits(np.array(bits, np.uint8), bitorder="little").tobytes()


def zstd(raw: bytes, **options: Any) -> bytes:
    """One zstd frame."""
    return zstandard.ZstdCompressor(level=1, **options).compress(raw)
