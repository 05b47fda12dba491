"""Fingerprints from hand-made loops differ at the first mistake: these functions are the way.

All are sums of one mix (kernels_fingerprint.py), so parts may be computed anywhere and added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.errors import InvalidInputError, Kind
from deltastore.format.fingerprint import ZERO, Fingerprint
from deltastore.format.kernels_base import frozen
from deltastore.format.kernels_fingerprint import mix_change, mix_places, mix_run

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from deltastore.format.dtypes import Bits
    from deltastore.format.layout import BitState


def fingerprint_run(bits: Bits, first_element: int) -> Fingerprint:
    """Of a contiguous run of patterns whose first element has that flat index."""
    if not bits.size:
        return ZERO
    low, high = mix_run(frozen(bits.reshape(-1)), first_element)
    return Fingerprint(int(low), int(high))


def fingerprint_change(elements: NDArray[np.integer[Any]], old: Bits, new: Bits) -> Fingerprint:
    """What replacing `old` by `new` at those flat element indices adds to a state's fingerprint."""
    if not elements.size == old.size == new.size or old.dtype != new.dtype:
        raise InvalidInputError(
            f"change of {elements.size} elements has {old.size} old {old.dtype} and"
            f" {new.size} new {new.dtype}",
            kind=Kind.TENSOR_SHAPE,
        )
    flat = frozen(elements.reshape(-1).astype(np.int64, copy=False))
    low, high = mix_change(flat, 0, frozen(old.reshape(-1)), frozen(new.reshape(-1)), flat.size)
    return Fingerprint(int(low), int(high))


def fingerprint_elements(elements: NDArray[np.integer[Any]], bits: Bits) -> Fingerprint:
    """Of elements anywhere: their flat indices and their patterns."""
    if elements.size != bits.size:
        raise InvalidInputError(
            f"{elements.size} elements have {bits.size} patterns", kind=Kind.TENSOR_SHAPE
        )
    flat = frozen(elements.reshape(-1).astype(np.int64, copy=False))
    low, high = mix_places(flat, frozen(bits.reshape(-1)))
    return Fingerprint(int(low), int(high))


def fingerprint_tensors(state: BitState) -> list[Fingerprint]:
    """One fingerprint per tensor of the layout; their sum is the state's."""
    return [
        fingerprint_run(bits, spec.first_element)
        for spec, bits in zip(state.layout.tensors, state.arrays, strict=True)
    ]


def fingerprint_state(state: BitState) -> Fingerprint:
    """Of the whole state."""
    total = ZERO
    for one in fingerprint_tensors(state):
        total = total + one
    return total
