"""Half an update is worse than none: nothing of a block is written before its change is proved.

For every block the old bits are read, the new ones worked out, and the fingerprint change of that
compared with the one the block declares. A block whose own change differs may still be part of a
composite whose boxes did not agree: there the blocks of one tensor declare the right *sum*. Such
blocks are held back, unwritten, until the sum over their tensor is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.chain.diff import block_offsets, flat_elements
from deltastore.errors import IntegrityError, InvalidInputError, Kind
from deltastore.format.block import Block, ValueKind
from deltastore.format.fingerprint import ZERO, Fingerprint
from deltastore.format.kernels_apply import change_proved, gather_change, scatter
from deltastore.format.kernels_base import frozen
from deltastore.format.mixing import fingerprint_change

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from deltastore.format.box import Box
    from deltastore.format.dtypes import Bits
    from deltastore.format.layout import BitState, Layout, TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class PreparedBlock:
    """A block on a tensor's bits, worked out and not written.

    Args:
        block: what is to be applied.
        offsets, base: the places in the tensor are offsets + base.
        old, new: bits at those places, before and after.
        change: what the fingerprint of the state would gain.
    """

    block: Block
    offsets: NDArray[np.uint32] | NDArray[np.int64]
    base: int
    old: Bits
    new: Bits
    change: Fingerprint

    def write(self, bits: Bits) -> None:
        """Put the new bits into the tensor."""
        scatter(bits, frozen(self.offsets), self.base, frozen(self.new))

    def undo(self, bits: Bits) -> None:
        """Put the old bits back."""
        scatter(bits, frozen(self.offsets), self.base, frozen(self.old))


def apply_blocks(state: BitState, blocks: Iterable[Block]) -> Fingerprint:
    """Apply blocks to a state on the host; returns the verified change of its fingerprint.

    Blocks of one tensor must follow each other (a segment's do). IntegrityError(fingerprint) when a
    declared change is not what applying would do: that block, and those held back with it, are not
    written; blocks before it are.
    """
    total = ZERO
    low = high = 0
    steps = ValueKind.STEPS
    for tensor, group in groupby(blocks, key=lambda block: block.tensor):
        _check_tensor(state, tensor)
        bits = _contiguous(state, tensor)
        spec = state.layout.tensors[tensor]
        held: list[PreparedBlock] = []
        for block in group:
            _check_block(block, bits, spec)
            offsets, base = _places(block, spec.element_shape)
            change = block.fingerprint_change
            found = change_proved(
                bits, frozen(offsets), base, spec.first_element, frozen(block.values),
                block.kind is not steps, np.uint64(change.low), np.uint64(change.high),
            )  # fmt: skip
            if found == (change.low, change.high):
                low += change.low
                high += change.high
            else:
                held.append(prepare_block(state.layout, block, bits))
        if held:
            total = total + _settle(state.layout, tensor, held)
            for prepared in held:
                prepared.write(bits)
    return total + Fingerprint(low, high)


def prepare_block(layout: Layout, block: Block, bits: Bits) -> PreparedBlock:
    """Work a block out on its tensor's flat bits (contiguous), writing nothing."""
    spec = layout.tensors[block.tensor]
    _check_block(block, bits, spec)
    offsets, base = _places(block, spec.element_shape)
    old = np.empty(offsets.size, bits.dtype)
    new = np.empty(offsets.size, bits.dtype)
    low, high = gather_change(
        bits,
        frozen(offsets),
        base,
        spec.first_element,
        frozen(block.values),
        block.kind is not ValueKind.STEPS,
        old,
        new,
    )
    return PreparedBlock(block, offsets, base, old, new, Fingerprint(int(low), int(high)))


def new_bits(block: Block, old_bits: Bits) -> Bits:
    """The bits after the block, at its changed places in order, from those before it."""
    if old_bits.size != block.values.size or old_bits.dtype != block.values.dtype:
        raise InvalidInputError(
            f"block of {block.values.size} {block.values.dtype} values met {old_bits.size}"
            f" {old_bits.dtype} bits",
            kind=Kind.TENSOR_SHAPE,
        )
    if block.kind is ValueKind.STEPS:
        return old_bits.reshape(-1) + block.values
    return block.values


def block_change(layout: Layout, block: Block, old: Bits, new: Bits) -> Fingerprint:
    """What replacing `old` by `new` at the block's places adds to the fingerprint."""
    elements = flat_elements(layout, block.tensor, block.box, block_indices(block))
    return fingerprint_change(elements, old, new)


def inverse(block: Block, old_bits: Bits) -> Block:
    """The block that undoes this one, given the bits it replaced."""
    back = ZERO - block.fingerprint_change
    if block.kind is ValueKind.STEPS:
        negated = np.subtract(block.values.dtype.type(0), block.values)
        return Block(block.tensor, block.box, block.kind, block.indices, negated, back)
    if old_bits.size != block.values.size or old_bits.dtype != block.values.dtype:
        raise InvalidInputError(
            f"undo of {block.values.size} values needs as many old bits, not {old_bits.size}",
            kind=Kind.TENSOR_SHAPE,
        )
    old = np.array(old_bits.reshape(-1))
    return Block(block.tensor, block.box, block.kind, block.indices, old, back)


def block_indices(block: Block) -> NDArray[np.uint32]:
    """The block's own indices; of a dense block all of its box."""
    if block.indices is not None:
        return block.indices
    return np.arange(block.box.elements, dtype=np.uint32)


def unsettled_tensors(changes: Iterable[tuple[Block, Fingerprint]]) -> list[int]:
    """Tensors whose blocks declare another sum than the changes found, for who applies in parts.

    This is the rule of `apply_blocks`: blocks are right one by one, or summed over their tensor.
    """
    open_sums: dict[int, Fingerprint] = {}
    for block, found in changes:
        gap = found - block.fingerprint_change
        open_sums[block.tensor] = open_sums.get(block.tensor, ZERO) + gap
    return [tensor for tensor, gap in open_sums.items() if gap != ZERO]


def _check_block(block: Block, bits: Bits, spec: TensorSpec) -> None:
    if not block.box.fits(spec.element_shape) or block.values.dtype != bits.dtype:
        raise InvalidInputError(
            f"block at {block.box} of {block.values.dtype} does not fit {spec.name!r}",
            kind=Kind.BOX,
        )
    if bits.shape != (spec.elements,):
        raise InvalidInputError(
            f"tensor {spec.name!r} has {bits.shape} bits, not ({spec.elements},)",
            kind=Kind.TENSOR_SHAPE,
        )


def _places(
    block: Block, shape: tuple[int, ...]
) -> tuple[NDArray[np.uint32] | NDArray[np.int64], int]:
    indices = block_indices(block)
    if block.box.flat:
        return indices, block.box.start[0]
    return block_offsets(block.box, indices, shape), 0


def _settle(layout: Layout, tensor: int, held: list[PreparedBlock]) -> Fingerprint:
    found = declared = ZERO
    for prepared in held:
        found = found + prepared.change
        declared = declared + prepared.block.fingerprint_change
    if found != declared:
        boxes = [prepared.block.box for prepared in held]
        raise IntegrityError(
            f"tensor {layout.tensors[tensor].name!r}: blocks at {_short(boxes)} would change the"
            f" fingerprint by {found}, they declare {declared}",
            kind=Kind.FINGERPRINT,
            hint="the state is not the delta's base, or the delta is damaged",
        )
    return found


def _short(boxes: list[Box]) -> str:
    text = ", ".join(f"{list(box.start)}+{list(box.shape)}" for box in boxes[:3])
    return text + (f" and {len(boxes) - 3} more" if len(boxes) > 3 else "")


def _check_tensor(state: BitState, tensor: int) -> None:
    if not 0 <= tensor < len(state.arrays):
        raise InvalidInputError(f"no tensor {tensor} in the layout", kind=Kind.FIELD)


def _contiguous(state: BitState, tensor: int) -> Any:
    bits = state.arrays[tensor]
    view = np.asarray(bits)
    if not (view.flags.c_contiguous and view.flags.writeable):
        raise InvalidInputError(
            f"bits of {state.layout.tensors[tensor].name!r} are not contiguous and writable",
            kind=Kind.TENSOR_STORAGE,
        )
    return view
