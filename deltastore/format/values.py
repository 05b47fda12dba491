"""Absolute patterns cost two bytes where a step costs a quarter: each value kind is one class here.

Every class turns the values of all blocks of one width in a frame into streams, and back. Patterns
are stored as byte planes: plane p holds byte p of every value, least significant first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from deltastore.errors import FormatError, InvalidInputError, Kind
from deltastore.format.block import ValueKind
from deltastore.format.kernels_base import frozen
from deltastore.format.kernels_values import count_mores, join_steps, split_steps
from deltastore.format.streams import (
    BITS_PLANES,
    DENSE_PLANES,
    STEP_DIRECTIONS,
    STEP_MAGNITUDES,
    STEP_MORES,
    Bytes,
    width_class,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltastore.format.dtypes import Bits
    from deltastore.format.indices import Numbers


class ValueEncoding(Protocol):
    """One way to store the values of blocks of one element width."""

    def encode(self, values: Bits, counts: Numbers) -> list[tuple[int, Bytes]]:
        """The streams, ascending, empty ones left out."""
        ...

    def limits(self, element_bits: int, counts: Numbers) -> dict[int, tuple[int, int]]:
        """Least and most bytes of each stream of such blocks; a least of 0 means may be absent."""
        ...

    def decode(self, streams: Mapping[int, Bytes], element_bits: int, counts: Numbers) -> Bits:
        """The values back; FormatError when the streams hold anything `encode` never writes."""
        ...


@dataclass(frozen=True, slots=True)
class PlaneValues:
    """Patterns as byte planes, from stream `base` on: absolute bits, and dense blocks."""

    base: int

    def encode(self, values: Bits, counts: Numbers) -> list[tuple[int, Bytes]]:
        """One stream per byte plane."""
        first = self.base + 8 * width_class(values.itemsize * 8)
        return [(first + p, plane) for p, plane in enumerate(to_planes(values))]

    def limits(self, element_bits: int, counts: Numbers) -> dict[int, tuple[int, int]]:
        """Every plane has one byte per value."""
        first = self.base + 8 * width_class(element_bits)
        size = int(counts.sum())
        return {first + p: (size, size) for p in range(element_bits // 8)}

    def decode(self, streams: Mapping[int, Bytes], element_bits: int, counts: Numbers) -> Bits:
        """Put the planes together."""
        first = self.base + 8 * width_class(element_bits)
        return from_planes([streams[first + p] for p in range(element_bits // 8)])


@dataclass(frozen=True, slots=True)
class StepValues:
    """Steps as direction bits, "more than one" bits and magnitudes."""

    def encode(self, values: Bits, counts: Numbers) -> list[tuple[int, Bytes]]:
        """Bits of each block start on a byte; InvalidInputError(encoding) on a step of 0."""
        w = width_class(values.itemsize * 8)
        bit_bytes = int(((counts + 7) // 8).sum())
        directions = np.empty(bit_bytes, np.uint8)
        mores = np.empty(bit_bytes, np.uint8)
        magnitudes = np.empty(values.size + 1, values.dtype)
        ends = frozen(np.cumsum(counts))
        beyond, bad = split_steps(frozen(values), ends, directions, mores, magnitudes)
        if bad:
            raise InvalidInputError("a sparse block has a step of 0", kind=Kind.ENCODING)
        streams = [(STEP_DIRECTIONS + w, directions), (STEP_MORES + w, mores)]
        if beyond:
            first = STEP_MAGNITUDES + 8 * w
            planes = to_planes(magnitudes[:beyond])
            streams += [(first + p, plane) for p, plane in enumerate(planes)]
        return streams

    def limits(self, element_bits: int, counts: Numbers) -> dict[int, tuple[int, int]]:
        """Bit streams are exact; magnitudes are as many as bits set."""
        w = width_class(element_bits)
        bit_bytes = int(((counts + 7) // 8).sum())
        most = int(counts.sum())
        first = STEP_MAGNITUDES + 8 * w
        exact = {s + w: (bit_bytes, bit_bytes) for s in (STEP_DIRECTIONS, STEP_MORES)}
        return exact | {first + p: (0, most) for p in range(element_bits // 8)}

    def decode(self, streams: Mapping[int, Bytes], element_bits: int, counts: Numbers) -> Bits:
        """Check the number of magnitudes, then rebuild every step."""
        w = width_class(element_bits)
        mores = frozen(streams[STEP_MORES + w])
        beyond = int(count_mores(mores))
        first = STEP_MAGNITUDES + 8 * w
        planes = [streams.get(first + p) for p in range(element_bits // 8)]
        if any((0 if plane is None else plane.size) != beyond for plane in planes):
            raise FormatError(
                f"steps of {element_bits} bits: {beyond} are more than one, but the magnitudes"
                " are not as many",
                kind=Kind.ENCODING,
            )
        magnitudes: Bits = np.zeros(beyond + 1, f"<u{element_bits // 8}")
        if beyond:
            magnitudes[:-1] = from_planes([plane for plane in planes if plane is not None])
        steps: Bits = np.empty(int(counts.sum()), magnitudes.dtype)
        directions = frozen(streams[STEP_DIRECTIONS + w])
        block, padding = join_steps(frozen(counts), directions, mores, frozen(magnitudes), steps)
        if block >= 0:
            reason = "padding bits are set" if padding else "a magnitude is out of range"
            raise FormatError(
                f"step block {block} of {element_bits} bits in the frame: {reason}",
                kind=Kind.ENCODING,
            )
        return steps


ENCODINGS: Mapping[ValueKind, ValueEncoding] = {
    ValueKind.STEPS: StepValues(),
    ValueKind.BITS: PlaneValues(BITS_PLANES),
    ValueKind.DENSE: PlaneValues(DENSE_PLANES),
}


def to_planes(values: Bits) -> list[Bytes]:
    """Byte p of every value, for each p."""
    if values.itemsize == 1:
        return [values.view(np.uint8)]
    table = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize)
    return [np.ascontiguousarray(table[:, p]) for p in range(values.itemsize)]


def from_planes(planes: list[Bytes]) -> Bits:
    """The inverse of `to_planes`."""
    table = np.empty((planes[0].size, len(planes)), np.uint8)
    for p, plane in enumerate(planes):
        table[:, p] = plane
    values: Bits = table.reshape(-1).view(f"<u{len(planes)}")
    return values
