"""Hashing the whole model at every version costs seconds: this hash moves with the changes.

128 bits in two independently keyed 64-bit lanes, each the sum modulo 2^64 of a mix of (element
index, bits zero-extended). Additive: subtract the old, add the new. Integrity, not authenticity.
The mixing function and its test vectors are in FORMAT.md and in `kernels.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltastore.errors import FormatError, Kind

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A point of (Z / 2^64)^2: the fingerprint of a state, or the change between two states."""

    low: int
    high: int

    def __add__(self, other: Fingerprint) -> Fingerprint:
        """Lane-wise sum modulo 2^64."""
        return Fingerprint((self.low + other.low) & _MASK, (self.high + other.high) & _MASK)

    def __sub__(self, other: Fingerprint) -> Fingerprint:
        """Lane-wise difference modulo 2^64."""
        return Fingerprint((self.low - other.low) & _MASK, (self.high - other.high) & _MASK)

    def __str__(self) -> str:
        """32 hex digits: low lane, then high lane."""
        return f"{self.low:016x}{self.high:016x}"

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        """Read what `str` writes; FormatError(field) on anything else."""
        if len(text) != 32 or text.strip("0123456789abcdef"):
            raise FormatError(f"fingerprint {text[:40]!r} is not 32 hex digits", kind=Kind.FIELD)
        return cls(int(text[:16], 16), int(text[16:], 16))


ZERO = Fingerprint(0, 0)
"""The fingerprint of a state without elements, and the change of nothing."""
