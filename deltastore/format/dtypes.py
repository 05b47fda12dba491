"""A cast on the way loses bits nobody asked to lose: a dtype here is a width of pattern.

Elements are unsigned integers of 8 to 64 bits. Complex numbers are pairs of float elements.
Names are those of the safetensors format.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bits: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Unsigned patterns of elements: uint8, uint16, uint32 or uint64, little-endian."""


class DType(StrEnum):
    """Element types by their safetensors names. Append only."""

    BOOL = "BOOL"
    U8 = "U8"
    I8 = "I8"
    F8_E4M3 = "F8_E4M3"
    F8_E5M2 = "F8_E5M2"
    F8_E8M0 = "F8_E8M0"
    I16 = "I16"
    U16 = "U16"
    F16 = "F16"
    BF16 = "BF16"
    I32 = "I32"
    U32 = "U32"
    F32 = "F32"
    I64 = "I64"
    U64 = "U64"
    F64 = "F64"
    C64 = "C64"

    @property
    def element_bits(self) -> int:
        """Width of one element: 8, 16, 32 or 64. A C64 item is two 32-bit elements."""
        return _WIDTHS[self]

    @property
    def elements_per_item(self) -> int:
        """2 for complex items, else 1."""
        return 2 if self is DType.C64 else 1

    @property
    def item_bytes(self) -> int:
        """Bytes of one item as a checkpoint stores it."""
        return self.element_bits // 8 * self.elements_per_item

    @property
    def bits_dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The little-endian unsigned numpy dtype that holds one element's pattern."""
        return _BITS[self.element_bits]


_WIDTHS = {
    DType.BOOL: 8,
    DType.U8: 8,
    DType.I8: 8,
    DType.F8_E4M3: 8,
    DType.F8_E5M2: 8,
    DType.F8_E8M0: 8,
    DType.I16: 16,
    DType.U16: 16,
    DType.F16: 16,
    DType.BF16: 16,
    DType.I32: 32,
    DType.U32: 32,
    DType.F32: 32,
    DType.C64: 32,
    DType.I64: 64,
    DType.U64: 64,
    DType.F64: 64,
}
_BITS: dict[int, np.dtype[np.unsignedinteger[Any]]] = {
    8: np.dtype("<u1"),
    16: np.dtype("<u2"),
    32: np.dtype("<u4"),
    64: np.dtype("<u8"),
}
