"""A change that is missed drifts for ever: diffs compare every bit and prove what they found.

Differences are found over runs of at most 2^22 elements, on a fixed grid per tensor, so that the
blocks of two versions have the same boxes and compose one by one. Every block carries the
fingerprint change that the scan itself computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deltastore.chain.density import dense_is_smaller
from deltastore.errors import InvalidInputError, Kind
from deltastore.format.block import Block, ValueKind
from deltastore.format.box import MAX_BOX_ELEMENTS, Box
from deltastore.format.fingerprint import Fingerprint
from deltastore.format.kernels_apply import locate
from deltastore.format.kernels_base import frozen
from deltastore.format.kernels_diff import CHUNK_ELEMENTS, scan_changes
from deltastore.format.mixing import fingerprint_change, fingerprint_elements

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from deltastore.format.dtypes import Bits
    from deltastore.format.layout import Layout

_FIRST_ROOM_SHARE = 16
"""The scan starts with room for one change in so many elements, and grows when that is full."""


def diff_run(layout: Layout, tensor: int, start: int, base: Bits, new: Bits) -> Block | None:
    """The block of one flat run from element `start`, or None when no bit of it changed."""
    _check_pair(layout, tensor, base, new)
    _check_box(layout, tensor, Box.run(start, base.size))
    first = layout.tensors[tensor].first_element + start
    return _diff_flat(tensor, start, first, frozen(base.reshape(-1)), frozen(new.reshape(-1)))


def diff_tensor(layout: Layout, tensor: int, base: Bits, new: Bits) -> Iterator[Block]:
    """The blocks of one whole tensor, flat; runs without a change have none."""
    _check_pair(layout, tensor, base, new)
    spec = layout.tensors[tensor]
    if base.size != spec.elements:
        raise InvalidInputError(
            f"tensor {spec.name!r} has {spec.elements} elements, not {base.size}",
            kind=Kind.TENSOR_SHAPE,
        )
    base, new = frozen(base.reshape(-1)), frozen(new.reshape(-1))
    for start in range(0, base.size, MAX_BOX_ELEMENTS):
        end = min(start + MAX_BOX_ELEMENTS, base.size)
        first = spec.first_element + start
        block = _diff_flat(tensor, start, first, base[start:end], new[start:end])
        if block is not None:
            yield block


def diff_box(layout: Layout, tensor: int, box: Box, base: Bits, new: Bits) -> Block | None:
    """The block of any box, from the box's own bits in row-major order (flat or in its shape)."""
    _check_pair(layout, tensor, base, new)
    _check_box(layout, tensor, box)
    if base.size != box.elements:
        raise InvalidInputError(
            f"box {box} has {box.elements} elements, not {base.size}", kind=Kind.TENSOR_SHAPE
        )
    if box.flat:
        return diff_run(layout, tensor, box.start[0], base, new)
    old_bits, new_bits = frozen(base.reshape(-1)), frozen(new.reshape(-1))
    indices, steps, _change = _scan(old_bits, new_bits, 0)
    if not indices.size:
        return None
    elements = flat_elements(layout, tensor, box, indices)
    change = fingerprint_change(elements, old_bits[indices], new_bits[indices])
    return _block(tensor, box, indices, steps, new_bits, change)


def dense_block(
    layout: Layout, tensor: int, box: Box, bits: Bits, base: Bits | None = None
) -> Block:
    """The box's bits whole, changed or not.

    Its fingerprint change is that from `base`; without one it is that from no state at all, so that
    the blocks of a full state add up to the state's fingerprint.
    """
    _check_pair(layout, tensor, bits if base is None else base, bits)
    _check_box(layout, tensor, box)
    values = np.array(bits.reshape(-1))
    everything = np.arange(box.elements, dtype=np.uint32)
    elements = flat_elements(layout, tensor, box, everything)
    if base is None:
        change = fingerprint_elements(elements, values)
    else:
        change = fingerprint_change(elements, base.reshape(-1), values)
    return Block(tensor, box, ValueKind.DENSE, None, values, change)


def dense_blocks(
    layout: Layout, tensor: int, bits: Bits, base: Bits | None = None
) -> Iterator[Block]:
    """A whole tensor as dense runs; `base` as in `dense_block`."""
    bits = bits.reshape(-1)
    old = None if base is None else base.reshape(-1)
    for start in range(0, bits.size, MAX_BOX_ELEMENTS):
        end = min(start + MAX_BOX_ELEMENTS, bits.size)
        run = Box.run(start, end - start)
        part = None if old is None else old[start:end]
        yield dense_block(layout, tensor, run, bits[start:end], part)


def split_box(box: Box) -> Iterator[Box]:
    """The box in pieces of at most 2^22 elements, cut along its outermost dimensions."""
    if box.elements <= MAX_BOX_ELEMENTS:
        yield box
        return
    d = next(i for i, n in enumerate(box.shape) if n > 1)
    rows = max(MAX_BOX_ELEMENTS // (box.elements // box.shape[d]), 1)
    for first in range(0, box.shape[d], rows):
        start = (*box.start[:d], box.start[d] + first, *box.start[d + 1 :])
        shape = (*box.shape[:d], min(rows, box.shape[d] - first), *box.shape[d + 1 :])
        yield from split_box(Box(start, shape, box.flat))


def flat_elements(
    layout: Layout, tensor: int, box: Box, indices: NDArray[np.uint32]
) -> NDArray[np.int64]:
    """Flat element indices of a block's own indices."""
    spec = layout.tensors[tensor]
    return block_offsets(box, indices, spec.element_shape) + spec.first_element


def block_offsets(
    box: Box,
    indices: NDArray[np.uint32],
    shape: tuple[int, ...],
) -> NDArray[np.int64]:
    """Row-major offsets in a tensor of that shape of a box's own indices."""
    if box.flat:
        return indices.astype(np.int64) + box.start[0]
    offsets = np.empty(indices.size, np.int64)
    numbers = [frozen(np.array(row, np.int64)) for row in (box.start, box.shape, shape)]
    locate(frozen(indices), *numbers, offsets)
    return offsets


def _diff_flat(tensor: int, start: int, first: int, base: Bits, new: Bits) -> Block | None:
    indices, steps, change = _scan(base, new, first)
    if not indices.size:
        return None
    return _block(tensor, Box.run(start, base.size), indices, steps, new, change)


def _scan(
    base: Bits, new: Bits, first: int
) -> tuple[
    NDArray[np.uint32],
    Bits,
    Fingerprint,
]:
    size = base.size
    room = min(size, max(size // _FIRST_ROOM_SHARE, CHUNK_ELEMENTS)) + 1
    indices = np.empty(room, np.uint32)
    steps: Bits = np.empty(room, base.dtype)
    position = count = low = high = 0
    while True:
        position, count, more_low, more_high = scan_changes(
            base, new, position, first, indices, steps, count
        )
        low, high = low + int(more_low), high + int(more_high)
        if position >= size:
            break
        room = min(size, max(room * 4, count + CHUNK_ELEMENTS)) + 1
        indices, steps = _grown(indices, count, room), _grown(steps, count, room)
    mask = (1 << 64) - 1
    change = Fingerprint(low & mask, high & mask)
    return indices[:count].copy(), steps[:count].copy(), change


def _grown(array: Bits, used: int, room: int) -> Bits:
    larger = np.empty(room, array.dtype)
    larger[:used] = array[:used]
    return larger


def _block(
    tensor: int,
    box: Box,
    indices: NDArray[np.uint32],
    steps: Bits,
    new: Bits,
    change: Fingerprint,
) -> Block:
    if dense_is_smaller(indices, steps, new):
        return Block(tensor, box, ValueKind.DENSE, None, np.array(new.reshape(-1)), change)
    return Block(tensor, box, ValueKind.STEPS, indices, steps, change)


def _check_pair(layout: Layout, tensor: int, base: Bits, new: Bits) -> None:
    spec = layout.tensors[tensor]
    wanted = spec.dtype.bits_dtype
    if base.dtype != wanted or new.dtype != wanted or base.size != new.size:
        raise InvalidInputError(
            f"tensor {spec.name!r} is {wanted}: base is {base.dtype} {base.shape},"
            f" new is {new.dtype} {new.shape}",
            kind=Kind.TENSOR_DTYPE,
        )


def _check_box(layout: Layout, tensor: int, box: Box) -> None:
    spec = layout.tensors[tensor]
    if not box.fits(spec.element_shape):
        raise InvalidInputError(f"box {box} leaves tensor {spec.name!r}", kind=Kind.BOX)
    if box.elements > MAX_BOX_ELEMENTS:
        raise InvalidInputError(
            f"box of {box.elements} elements in {spec.name!r}",
            kind=Kind.LIMIT,
            hint=f"at most {MAX_BOX_ELEMENTS}: use split_box",
        )
