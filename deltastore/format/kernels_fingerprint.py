"""A fingerprint that two machines compute differently proves nothing: the mix is defined here.

mix(i, b) is two 64-bit lanes of an element's flat index i and its zero-extended pattern b, with
nothing but wrapping add, multiply, exclusive or and logical shift (FORMAT.md, "Fingerprint").
Loops are kept plain so that the compiler turns them into vector code.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deltastore.format.kernels_base import Array, helper, kernel

U = np.uint64
LOW_KEYS = (0x27D4EB2F165667C5, 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Low lane: constant, factor of the index, factor of the pattern, factor of the mix."""
HIGH_KEYS = (0x85EBCA77C2B2AE63, 0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
"""High lane, likewise."""
LOW_SHIFTS = (29, 32)
HIGH_SHIFTS = (31, 30)

_L0, _L1, _L2, _L3 = (U(k) for k in LOW_KEYS)
_H0, _H1, _H2, _H3 = (U(k) for k in HIGH_KEYS)
_LS, _LT = (U(s) for s in LOW_SHIFTS)
_HS, _HT = (U(s) for s in HIGH_SHIFTS)


@helper
def mix_low(place: Any, bits: Any) -> Any:
    """Low lane of one element; `place` is constant plus index times factor."""
    x = place + bits * _L2
    x = (x ^ (x >> _LS)) * _L3
    return x ^ (x >> _LT)


@helper
def mix_high(place: Any, bits: Any) -> Any:
    """High lane of one element."""
    x = place + bits * _H2
    x = (x ^ (x >> _HS)) * _H3
    return x ^ (x >> _HT)


@kernel
def mix_run(bits: Array, first: Any) -> Any:
    """Sum of the lanes over a contiguous run whose first element has flat index `first`."""
    low = U(0)
    high = U(0)
    start = U(first)
    for i in range(bits.size):
        b = U(bits[i])
        e = start + U(i)
        low += mix_low(_L0 + e * _L1, b)
        high += mix_high(_H0 + e * _H1, b)
    return low, high


@kernel
def mix_change(indices: Array, first: Any, old: Array, new: Array, count: Any) -> Any:
    """Sum over changes of mix(new) - mix(old); flat index = first + indices[i]."""
    low = U(0)
    high = U(0)
    start = U(first)
    for i in range(count):
        e = start + U(indices[i])
        o = U(old[i])
        n = U(new[i])
        p = _L0 + e * _L1
        q = _H0 + e * _H1
        low += mix_low(p, n) - mix_low(p, o)
        high += mix_high(q, n) - mix_high(q, o)
    return low, high


@kernel
def mix_places(elements: Array, bits: Array) -> Any:
    """Sum of the lanes over elements anywhere, by their flat indices."""
    low = U(0)
    high = U(0)
    for i in range(bits.size):
        e = U(elements[i])
        b = U(bits[i])
        low += mix_low(_L0 + e * _L1, b)
        high += mix_high(_H0 + e * _H1, b)
    return low, high
