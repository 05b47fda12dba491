"""Indices cost more than values: each block takes the coding that is smallest for its gaps.

Scattered changes have geometric gaps, where Golomb-Rice is within half a per cent of the floor;
clustered ones do better as byte planes under zstd; LEB128 is there for blocks of few changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deltastore.errors import FormatError, InvalidInputError, Kind
from deltastore.format import kernels_cost
from deltastore.format import kernels_index as kernels
from deltastore.format.kernels_base import frozen
from deltastore.format.streams import (
    GAP16_HIGH,
    GAP16_LOW,
    GAP16_WIDE,
    LEB128_GAPS,
    RICE_CODES,
    Bytes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

Numbers = NDArray[np.int64]
MAX_GAP_BYTES = 4
"""A gap is below 2^22: four bytes of LEB128 at most."""
PLANE_STREAMS_BYTES = 96
"""About what two more zstd streams cost a frame: planes must save more than that in all."""

_FAULTS = {
    kernels.TRUNCATED: (Kind.TRUNCATED, "its gaps end early"),
    kernels.TRAILING: (Kind.TRAILING, "bytes follow the last gap"),
    kernels.RANGE: (Kind.ORDER, "an index lies outside its box"),
    kernels.NOT_MINIMAL: (Kind.ENCODING, "a number is not in its shortest form"),
    kernels.PADDING: (Kind.ENCODING, "padding bits are set"),
}


class IndexEncoding(IntEnum):
    """How the indices of a sparse block are stored; the numbers are those of the format."""

    NONE = kernels.NO_INDEX
    """A dense block has no indices."""
    LEB128 = kernels.LEB128
    GAP16 = kernels.GAP16
    RICE = kernels.RICE

    @property
    def label(self) -> str:
        """The name manifests use."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """The encoding of every sparse block of a frame, and the sizes that follow from it."""

    encodings: Numbers
    parameters: Numbers
    rice_bytes: int
    leb_bytes: int
    plane_bytes: int
    wide_bytes: int


_NO_BYTES: Bytes = np.empty(0, np.uint8)


def plan_indices(indices: NDArray[np.uint32], ends: Numbers, elements: Numbers) -> IndexPlan:
    """Choose each block's encoding; InvalidInputError(order) names a block with bad indices."""
    costs = np.zeros((ends.size, kernels_cost.COST_COLUMNS), np.int64)
    bad = kernels_cost.index_costs(frozen(indices), frozen(ends), frozen(elements), costs)
    if bad >= 0:
        raise InvalidInputError(
            f"indices of sparse block {bad} are not strictly increasing inside its box",
            kind=Kind.ORDER,
        )
    encodings = np.empty(ends.size, np.int64)
    parameters = np.empty(ends.size, np.int64)
    sizes = kernels_cost.choose_encodings(
        frozen(ends), frozen(costs), PLANE_STREAMS_BYTES, encodings, parameters
    )
    return IndexPlan(encodings, parameters, *sizes)


def planned_bits(indices: NDArray[np.uint32], elements: int) -> int:
    """About how many bits the indices of one block take in their best encoding."""
    ends = np.array([indices.size], np.int64)
    costs = np.zeros((1, kernels_cost.COST_COLUMNS), np.int64)
    kernels_cost.index_costs(frozen(indices), frozen(ends), frozen(np.array([elements])), costs)
    row = costs[0].tolist()
    rice_bits = int(row[kernels_cost.COST_RICE_BITS])
    leb_bits = 8 * int(row[kernels_cost.COST_LEB_BYTES])
    return min(rice_bits, leb_bits, int(row[kernels_cost.COST_PLANE_BITS]))


def encode_gaps(
    indices: NDArray[np.uint32], ends: Numbers, plan: IndexPlan
) -> list[tuple[int, Bytes]]:
    """The index streams of a frame, ascending, empty ones left out."""
    rice = np.zeros(plan.rice_bytes + kernels.PADDING_BYTES, np.uint8)
    leb = np.empty(plan.leb_bytes, np.uint8)
    low = np.empty(plan.plane_bytes, np.uint8)
    high = np.empty(plan.plane_bytes, np.uint8)
    wide = np.empty(plan.wide_bytes, np.uint8)
    used = kernels.encode_indices(
        frozen(indices),
        frozen(ends),
        frozen(plan.encodings),
        frozen(plan.parameters),
        rice,
        leb,
        low,
        high,
        wide,
    )
    if used != (plan.rice_bytes, leb.size, low.size, wide.size):
        raise AssertionError(f"gap streams of {used} bytes do not match {plan}")
    streams = [
        (RICE_CODES, rice[: plan.rice_bytes]),
        (LEB128_GAPS, leb),
        (GAP16_LOW, low),
        (GAP16_HIGH, high),
        (GAP16_WIDE, wide),
    ]
    return [(stream, content) for stream, content in streams if content.size]


def gap_stream_limits(
    counts: Numbers, elements: Numbers, encodings: Numbers, parameters: Numbers
) -> dict[int, tuple[int, int]]:
    """Least and most bytes of every index stream of such blocks; 0 means it may be absent."""
    limits: dict[int, tuple[int, int]] = {}
    rice = encodings == IndexEncoding.RICE
    if rice.any():
        n, k = counts[rice], parameters[rice]
        least = n * (k + 1)
        most = least + ((elements[rice] - n) >> k)
        limits[RICE_CODES] = (int(((least + 7) // 8).sum()), int(((most + 7) // 8).sum()))
    leb = int(counts[encodings == IndexEncoding.LEB128].sum())
    if leb:
        limits[LEB128_GAPS] = (leb, leb * MAX_GAP_BYTES)
    planes = int(counts[encodings == IndexEncoding.GAP16].sum())
    if planes:
        limits[GAP16_LOW] = limits[GAP16_HIGH] = (planes, planes)
        limits[GAP16_WIDE] = (0, planes * MAX_GAP_BYTES)
    return limits


def decode_gaps(
    streams: Mapping[int, Bytes],
    counts: Numbers,
    elements: Numbers,
    encodings: Numbers,
    parameters: Numbers,
) -> NDArray[np.uint32]:
    """The indices of all sparse blocks of a frame; FormatError says what is wrong with which.

    The Rice stream carries kernels_index.PADDING_BYTES of padding.
    """
    out: NDArray[np.uint32] = np.empty(int(counts.sum()), np.uint32)
    rice = streams.get(RICE_CODES)
    rice_bytes = 0 if rice is None else rice.size - kernels.PADDING_BYTES
    arguments: list[Any] = [
        frozen(streams.get(stream, _NO_BYTES))
        for stream in (LEB128_GAPS, GAP16_LOW, GAP16_HIGH, GAP16_WIDE)
    ]
    block, found = kernels.decode_indices(
        frozen(counts),
        frozen(elements),
        frozen(encodings),
        frozen(parameters),
        frozen(_NO_BYTES if rice is None else rice),
        rice_bytes,
        *arguments,
        out,
    )
    if found != kernels.OK:
        kind, reason = _FAULTS[found]
        raise FormatError(f"sparse block {block} of the frame: {reason}", kind=kind)
    return out
