"""Kernels that each pick their own compiler switches drift apart: every kernel is declared here.

All kernels release the GIL, are compiled at first use and cached on disk, do no bounds checks
(callers check before they call), and never do float arithmetic on patterns.

A cached kernel is compiled anew when its own file changes, not when a function changes that it
calls from another file: after editing this file or the mix, delete `__pycache__` here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import config, types
from numba.cpython.unsafe.numbers import trailing_zeros as _trailing_zeros
from numba.extending import intrinsic as numba_intrinsic
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable

Array: TypeAlias = NDArray[Any]
if sys.byteorder != "little":
    # Words are loaded from and stored to the format's bytes as they are.
    raise ImportError("deltastore's kernels need a little-endian machine")

_U64 = ir.IntType(64)
trailing_zeros: Any = _trailing_zeros
"""How many low bits of an unsigned number are 0 (64 where all are)."""


def kernel(function: Callable[..., Any]) -> Any:
    """Compile at first call, cached, without the GIL."""
    return numba.njit(cache=True, nogil=True, error_model="numpy")(function)


def helper(function: Callable[..., Any]) -> Any:
    """A small function that kernels inline."""
    return numba.njit(nogil=True, error_model="numpy", inline="always")(function)


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function that gives kernels LLVM instructions of its own."""
    return numba_intrinsic(function)


def frozen(array: Array) -> Array:
    """A contiguous, aligned, read-only view: one compiled signature whatever the caller holds."""
    if type(array) is not np.ndarray:
        array = np.asarray(array)
    flags = array.flags
    if not (flags.c_contiguous and flags.aligned):
        array = np.array(array, order="C")
        flags = array.flags
    if flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def _address(
    context: Any, builder: Any, array_type: Any, array: Any, index: Any, count: int
) -> Any:
    """Where the `count` elements from an index on are.

    Numba's own bounds checks do not reach what is loaded and stored here: where they are on
    (NUMBA_BOUNDSCHECK), so are these.
    """
    struct = context.make_array(array_type)(context, builder, array)
    if config.BOUNDSCHECK:  # type: ignore[attr-defined]
        last = builder.sub(struct.nitems, ir.Constant(index.type, count))
        early = builder.icmp_signed("<", index, ir.Constant(index.type, 0))
        late = builder.icmp_signed(">", index, last)
        with builder.if_then(builder.or_(early, late), likely=False):
            message = f"{count} elements at once leave an array"
            context.call_conv.return_user_exc(builder, IndexError, (message,))
    return builder.gep(struct.data, [index])


@intrinsic
def load_u64(_typing: Any, array: Any, offset: Any) -> Any:
    """Eight bytes of a uint8 array from any byte offset, as one little-endian word."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _address(context, builder, signature.args[0], args[0], args[1], 8)
        return builder.load(builder.bitcast(place, _U64.as_pointer()), align=1)

    return types.uint64(array, types.int64), codegen


@intrinsic
def store_u64(_typing: Any, array: Any, offset: Any, word: Any) -> Any:
    """Write one little-endian word to any byte offset of a uint8 array."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = _address(context, builder, signature.args[0], args[0], args[1], 8)
        builder.store(args[2], builder.bitcast(place, _U64.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), codegen


@intrinsic
def changed_mask(_typing: Any, old: Any, new: Any, offset: Any) -> Any:
    """Bit j: whether element offset + j differs between the two arrays, j from 0 to 63.

    One vector compare in portable LLVM: 64 patterns cost a few instructions on any machine.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = signature.args[0].dtype.bitwidth
        vector = ir.VectorType(ir.IntType(width), 64)
        sides = []
        for array_type, array in zip(signature.args[:2], args[:2], strict=True):
            place = _address(context, builder, array_type, array, args[2], 64)
            place = builder.bitcast(place, vector.as_pointer())
            sides.append(builder.load(place, align=width // 8))
        differs = builder.icmp_unsigned("!=", *sides)
        return builder.bitcast(differs, _U64)

    return types.uint64(old, new, types.int64), codegen


def _lanes(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    """64 elements from an offset on, as one vector, and where they are."""
    width = array_type.dtype.bitwidth
    vector = ir.VectorType(ir.IntType(width), 64)
    place = _address(context, builder, array_type, array, offset, 64)
    place = builder.bitcast(place, vector.as_pointer())
    return vector, place, width // 8


def _all(vector: Any, value: int) -> Any:
    return ir.Constant(vector, [value] * 64)


@intrinsic
def falling_mask(_typing: Any, steps: Any, offset: Any) -> Any:
    """Bit j: whether step offset + j is negative as a signed number."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector, place, align = _lanes(context, builder, signature.args[0], *args)
        lanes = builder.load(place, align=align)
        return builder.bitcast(builder.icmp_signed("<", lanes, _all(vector, 0)), _U64)

    return types.uint64(steps, types.int64), codegen


@intrinsic
def zero_mask(_typing: Any, steps: Any, offset: Any) -> Any:
    """Bit j: whether step offset + j is 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector, place, align = _lanes(context, builder, signature.args[0], *args)
        lanes = builder.load(place, align=align)
        return builder.bitcast(builder.icmp_unsigned("==", lanes, _all(vector, 0)), _U64)

    return types.uint64(steps, types.int64), codegen


@intrinsic
def beyond_mask(_typing: Any, steps: Any, offset: Any) -> Any:
    """Bit j: whether step offset + j is none of -1, 0 and 1."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector, place, align = _lanes(context, builder, signature.args[0], *args)
        lanes = builder.add(builder.load(place, align=align), _all(vector, 1))
        return builder.bitcast(builder.icmp_unsigned(">", lanes, _all(vector, 2)), _U64)

    return types.uint64(steps, types.int64), codegen


@intrinsic
def put_ones(_typing: Any, steps: Any, offset: Any, falling: Any) -> Any:
    """Store 64 steps from an offset on: -1 where the bit is set, else 1."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector, place, align = _lanes(context, builder, signature.args[0], *args[:2])
        bits = builder.bitcast(args[2], ir.VectorType(ir.IntType(1), 64))
        builder.store(builder.select(bits, _all(vector, -1), _all(vector, 1)), place, align=align)
        return context.get_dummy_value()

    return types.void(steps, types.int64, types.uint64), codegen
