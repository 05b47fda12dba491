"""A laggard that fetches every delta pays for each change many times: composites say it once.

Blocks compose without the weights. Where the boxes of both deltas agree, block by block: each keeps
a change of its own, the sum of the two. Where they do not, all of a tensor is merged into flat
runs; only the sum of its changes is known then, and the first of its blocks carries it
(`apply_blocks` checks such blocks by their sum).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deltastore.chain.apply import block_indices
from deltastore.chain.diff import block_offsets
from deltastore.errors import FormatError, IntegrityError, InvalidInputError, Kind
from deltastore.format.block import Block, ValueKind, total_change
from deltastore.format.box import MAX_BOX_ELEMENTS, Box
from deltastore.format.disjoint import check_disjoint
from deltastore.format.dtypes import Bits
from deltastore.format.fingerprint import ZERO, Fingerprint
from deltastore.format.frames import KIND_NUMBERS, VALUE_KINDS
from deltastore.format.indices import Numbers
from deltastore.format.kernels_base import frozen
from deltastore.format.kernels_merge import is_increasing, merge_changes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deltastore.format.layout import Layout

_DENSE = KIND_NUMBERS[ValueKind.DENSE]
_Changes = tuple[Numbers, Bits, NDArray[np.uint8]]
"""Places, values, and kinds of changes, by place."""


def compose(layout: Layout, first: Sequence[Block], second: Sequence[Block]) -> list[Block]:
    """One delta that does what `first` and then `second` do, by tensor and start.

    Steps on steps add up and drop 0; steps on bits give bits; later bits win; dense likewise.
    """
    ours = _by_tensor(first)
    theirs = _by_tensor(second)
    result: list[Block] = []
    for tensor in sorted(ours.keys() | theirs.keys()):
        result += _compose_tensor(layout, tensor, ours.get(tensor, []), theirs.get(tensor, []))
    return result


def _by_tensor(blocks: Sequence[Block]) -> dict[int, list[Block]]:
    groups: dict[int, list[Block]] = {}
    for block in blocks:
        groups.setdefault(block.tensor, []).append(block)
    return groups


def _compose_tensor(
    layout: Layout, tensor: int, first: list[Block], second: list[Block]
) -> list[Block]:
    if not first or not second:
        return sorted(first or second, key=lambda block: block.box.start)
    if not _boxes_agree(layout, first, second):
        return _compose_whole(layout, tensor, first, second)
    later = {block.box: block for block in second}
    result: list[Block] = []
    for block in first:
        after = later.pop(block.box, None)
        composed = [block] if after is None else _compose_box(layout, block, after)
        if composed is None:  # cut alone, its pieces could reach into a neighbour's box
            return _compose_whole(layout, tensor, first, second)
        result += composed
    result += later.values()
    return sorted(result, key=lambda block: block.box.start)


def _boxes_agree(layout: Layout, first: list[Block], second: list[Block]) -> bool:
    """Whether every box of one delta is a box of the other, or touches none of its boxes."""
    distinct = {block.box: block for block in (*first, *second)}
    if len({box.flat for box in distinct}) > 1:
        return False
    try:
        check_disjoint(layout, ((block.tensor, box) for box, block in distinct.items()))
    except FormatError:
        return False
    return True


def _compose_box(layout: Layout, first: Block, second: Block) -> list[Block] | None:
    """At most one block in the same box; None when its changes would be of two kinds."""
    change = first.fingerprint_change + second.fingerprint_change
    if second.kind is ValueKind.DENSE:
        return [_like(second, None, second.values, change)]
    if first.kind is ValueKind.DENSE:
        values = first.values.copy()
        places = block_indices(second)
        moved = values[places] + second.values if _is_steps(second) else second.values
        values[places] = moved
        return [_like(first, None, values, change)]
    at, values, kinds = _merge(_box_changes(first), _box_changes(second))
    if not at.size:
        return _nothing_left(layout, first.tensor, change)
    if (kinds == kinds[0]).all():
        kind = VALUE_KINDS[int(kinds[0])]
        indices = at.astype(np.uint32)
        return [Block(first.tensor, first.box, kind, indices, values, change)]
    return None


def _compose_whole(
    layout: Layout, tensor: int, first: list[Block], second: list[Block]
) -> list[Block]:
    change = total_change(first) + total_change(second)
    merged = _merge(_tensor_changes(layout, first), _tensor_changes(layout, second))
    if not merged[0].size:
        return _nothing_left(layout, tensor, change)
    result = list(_runs(layout, tensor, merged))
    head = result[0]
    result[0] = Block(tensor, head.box, head.kind, head.indices, head.values, change)
    return result


def _nothing_left(layout: Layout, tensor: int, change: Fingerprint) -> list[Block]:
    if change != ZERO:
        raise IntegrityError(
            f"the changes of {layout.tensors[tensor].name!r} cancel out, their fingerprints do not",
            kind=Kind.FINGERPRINT,
            hint="the two deltas do not follow each other",
        )
    return []


def _merge(first: _Changes, second: _Changes) -> _Changes:
    room = first[0].size + second[0].size
    at = np.empty(room, np.int64)
    values = np.empty(room, first[1].dtype)
    kinds = np.empty(room, np.uint8)
    sides = [frozen(column) for column in (*first, *second)]
    count = merge_changes(*sides, at, values, kinds)
    return at[:count].copy(), values[:count].copy(), kinds[:count].copy()


def _box_changes(block: Block) -> _Changes:
    at = block_indices(block).astype(np.int64)
    return at, block.values, np.full(at.size, KIND_NUMBERS[block.kind], np.uint8)


def _tensor_changes(layout: Layout, blocks: list[Block]) -> _Changes:
    shape = layout.tensors[blocks[0].tensor].element_shape
    at = np.concatenate([block_offsets(b.box, block_indices(b), shape) for b in blocks])
    values = np.concatenate([block.values for block in blocks])
    kinds = np.concatenate(
        [np.full(block.values.size, KIND_NUMBERS[block.kind], np.uint8) for block in blocks]
    )
    if not is_increasing(frozen(at)):
        order = np.argsort(at, kind="stable")
        at, values, kinds = at[order], values[order], kinds[order]
        if not is_increasing(frozen(at)):
            raise InvalidInputError(
                f"blocks of {layout.tensors[blocks[0].tensor].name!r} overlap", kind=Kind.BOX
            )
    return at, values, kinds


def _runs(layout: Layout, tensor: int, changes: _Changes) -> Iterator[Block]:
    """Flat blocks of one kind each, on the grid of `diff_tensor` wherever one kind fills a cell."""
    at, values, kinds = changes
    elements = layout.tensors[tensor].elements
    cells = at // MAX_BOX_ELEMENTS
    gap = (kinds[1:] == _DENSE) & (at[1:] != at[:-1] + 1)
    cuts = np.flatnonzero((cells[1:] != cells[:-1]) | (kinds[1:] != kinds[:-1]) | gap) + 1
    edges = [0, *cuts.tolist(), at.size]
    in_cell = np.bincount(np.searchsorted(np.unique(cells), cells[edges[:-1]]))
    parts = np.repeat(in_cell, in_cell).tolist()
    for begin, end, shared in zip(edges[:-1], edges[1:], parts, strict=True):
        kind = VALUE_KINDS[int(kinds[begin])]
        start, stop = int(at[begin]), int(at[end - 1]) + 1
        if kind is ValueKind.DENSE:
            box = Box.run(start, stop - start)
            yield Block(tensor, box, kind, None, values[begin:end], ZERO)
            continue
        if shared == 1:
            start = int(cells[begin]) * MAX_BOX_ELEMENTS
            stop = min(start + MAX_BOX_ELEMENTS, elements)
        indices = (at[begin:end] - start).astype(np.uint32)
        yield Block(tensor, Box.run(start, stop - start), kind, indices, values[begin:end], ZERO)


def _is_steps(block: Block) -> bool:
    return block.kind is ValueKind.STEPS


def _like(
    block: Block, indices: NDArray[np.uint32] | None, values: Bits, change: Fingerprint
) -> Block:
    return Block(block.tensor, block.box, block.kind, indices, values, change)
