"""A stream that expands without limit fills the reader's memory: sizes are declared and checked.

A stream is the bytes of one kind of all blocks of a frame. It is stored raw, or as one zstd frame
where that is smaller; which of the two follows from its sizes alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from deltastore.errors import FormatError, Kind

Bytes = NDArray[np.uint8]

RICE_CODES = 0x01
LEB128_GAPS = 0x02
GAP16_LOW = 0x03
GAP16_HIGH = 0x04
GAP16_WIDE = 0x05

STEP_DIRECTIONS = 0x10
"""Plus the width class: 0, 1, 2, 3 for elements of 8, 16, 32, 64 bits."""
STEP_MORES = 0x14
STEP_MAGNITUDES = 0x20
"""Plus 8 times the width class, plus the byte plane; likewise below."""
BITS_PLANES = 0x40
DENSE_PLANES = 0x60
LAST_STREAM = 0x7F

MAX_FRAME_BYTES = 64 << 20
"""Most bytes the streams of one frame may have before compression."""

SMALLEST_PACKED_BYTES = 16
"""The frame of zstd alone takes about so much: shorter streams are not tried."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

_LONG_MATCHES = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=19,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    write_content_size=True,
    write_checksum=False,
    write_dict_id=False,
)


@dataclass(frozen=True, slots=True)
class StreamRow:
    """One stream in the table of a segment."""

    stream: int
    raw_bytes: int
    stored_bytes: int


def width_class(element_bits: int) -> int:
    """0, 1, 2 or 3 for elements of 8, 16, 32 or 64 bits."""
    return element_bits.bit_length() - 4


class Packer:
    """Packs the streams of one segment. Not shared between threads: zstd contexts are not.

    Most streams have uneven bytes and no repeats. Short matches, which zstd finds in them by
    accident, cost more than they save and take most of its time: for those streams it is told to
    look for long ones only. Gaps may repeat from row to row, so they are packed both ways.
    """

    __slots__ = ("_even", "_repeating")

    def __init__(self, level: int) -> None:
        self._even = zstandard.ZstdCompressor(compression_params=_LONG_MATCHES)
        self._repeating = zstandard.ZstdCompressor(
            level=level, write_content_size=True, write_checksum=False, write_dict_id=False
        )

    def pack(self, raw: Bytes | bytes, *, repeats: bool = False) -> bytes:
        """The stored form: zstd where that is smaller."""
        view = raw.data if isinstance(raw, np.ndarray) else memoryview(raw)
        best: bytes | memoryview = view
        if len(view) > SMALLEST_PACKED_BYTES:
            for compressor in (self._even, self._repeating)[: 1 + repeats]:
                packed = compressor.compress(view)
                best = packed if len(packed) < len(best) else best
        return bytes(best)


def unpack(stored: memoryview, raw_bytes: int, *, what: str, padding_bytes: int = 0) -> Bytes:
    """The `raw_bytes` a stored form stands for, followed by that much zero padding.

    FormatError before anything larger than `raw_bytes` is allocated.
    """
    if len(stored) > raw_bytes:
        raise FormatError(
            f"{what} is stored in {len(stored)} bytes, more than its {raw_bytes}", kind=Kind.LIMIT
        )
    plain: memoryview | bytes = stored
    if len(stored) < raw_bytes:
        plain = _decompress(stored, raw_bytes, what)
    raw: Bytes = np.frombuffer(plain, np.uint8)
    if not padding_bytes:
        return raw
    padded = np.zeros(raw_bytes + padding_bytes, np.uint8)
    padded[:raw_bytes] = raw
    return padded


def _decompress(stored: memoryview, raw_bytes: int, what: str) -> bytes:
    try:
        if bytes(stored[:4]) != _ZSTD_MAGIC:
            raise FormatError(f"{what} is not a zstd frame", kind=Kind.ENCODING)
        header = zstandard.get_frame_parameters(stored)
        if header.content_size != raw_bytes or header.dict_id or header.has_checksum:
            raise FormatError(
                f"{what}: zstd frame of {header.content_size} bytes where {raw_bytes} are declared,"
                " or with a dictionary or checksum",
                kind=Kind.LIMIT,
            )
        plain = zstandard.ZstdDecompressor().decompress(
            stored, max_output_size=raw_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as err:
        raise FormatError(f"{what} does not decompress: {err}", kind=Kind.ENCODING) from err
    if len(plain) != raw_bytes:
        raise FormatError(
            f"{what} has {len(plain)} bytes, not the {raw_bytes} declared", kind=Kind.ENCODING
        )
    return plain
