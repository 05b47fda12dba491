"""20,000 tensors cost 20,000 calls where each is a call: short runs are compared many at a time.

What comes out is what `diff_run` gives of each run by itself, in the order they were added.
"""

from __future__ import annotations

from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.chain.density import dense_is_smaller, sparse_for_sure
from deltastore.chain.diff import diff_run
from deltastore.format.block import Block, ValueKind
from deltastore.format.fingerprint import Fingerprint
from deltastore.format.kernels_base import frozen
from deltastore.format.kernels_diff import scan_runs
from deltastore.format.segment_table import layout_columns

if TYPE_CHECKING:
    from deltastore.format.box import Box
    from deltastore.format.dtypes import Bits
    from deltastore.format.layout import Layout

SHORT_RUN_ELEMENTS = 1 << 14
"""A longer run takes longer than the call that compares it."""
BATCH_ELEMENTS = 1 << 17
"""Most elements compared in one call: they are still in cache when that begins."""


class ShortRuns:
    """Runs that wait to be compared together. Used by one thread.

    The new bits are copied when a run is added, the base's are read when it is compared. Runs of
    one type wait together, whatever comes between them: scales may lie between all weights.

    Memory: of each type `BATCH_ELEMENTS` twice, and their changes if all of them changed.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        columns = layout_columns(layout)
        self._firsts = (np.cumsum(columns.elements) - columns.elements).tolist()
        self._sizes = columns.elements.tolist()
        self._widths = (columns.element_bits // 8).tolist()
        self._lanes: dict[np.dtype[Any], _Lane] = {}
        self._number = 0

    def add(self, tensor: int, box: Box, base: Bits, new: Bits) -> list[Block]:
        """Take a flat box of at most SHORT_RUN_ELEMENTS; returns the blocks of those before it
        when there was no room for it. Raises what `diff_run` raises.
        """
        ready: list[Block] = []
        size, dtype, start = new.size, new.dtype, box.start[0]
        if not (
            0 <= start <= self._sizes[tensor] - size
            and 0 < size <= SHORT_RUN_ELEMENTS
            and base.size == size == box.shape[0]
            and base.dtype == dtype
            and dtype.kind == "u"
            and dtype.itemsize == self._widths[tensor]
        ):
            ready = self.take()
            block = diff_run(self._layout, tensor, start, base, new)
            return ready if block is None else [*ready, block]
        lane = self._lanes.get(dtype)
        if lane is None:
            lane = self._lanes[dtype] = _Lane(dtype)
        begin = lane.used
        end = begin + size
        if end > BATCH_ELEMENTS:
            ready, begin, end = self.take(), 0, size
        lane.new[begin:end] = new if new.ndim == 1 else new.reshape(-1)
        lane.old.append(base if base.ndim == 1 else base.reshape(-1))
        lane.runs.append((self._number, tensor, box))
        lane.ends.append(end)
        lane.used = end
        self._number += 1
        return ready

    def take(self) -> list[Block]:
        """Compare what waits; the blocks of all runs that changed."""
        if not self._number:
            return []
        self._number = 0
        found = [lane.take(self._firsts) for lane in self._lanes.values() if lane.runs]
        if len(found) == 1:
            return [block for _number, block in found[0]]
        return [block for _number, block in sorted(chain(*found), key=itemgetter(0))]


class _Lane:
    """Runs of one type, end to end."""

    __slots__ = ("ends", "new", "old", "runs", "used")

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.new: Bits = np.empty(BATCH_ELEMENTS, dtype)
        self.clear()

    def clear(self) -> None:
        """Nothing waits."""
        self.old: list[Bits] = []
        self.runs: list[tuple[int, int, Box]] = []
        self.ends: list[int] = []
        self.used = 0

    def take(self, firsts_of: list[int]) -> list[tuple[int, Block]]:
        """Compare what waits: which run, and its block, of all that changed."""
        runs, ends, used = self.runs, self.ends, self.used
        old, new = np.concatenate(self.old), self.new[:used]
        self.clear()
        firsts = np.array([firsts_of[tensor] + box.start[0] for _, tensor, box in runs], np.int64)
        indices = np.empty(used + 1, np.uint32)
        steps: Bits = np.empty(used + 1, new.dtype)
        counts = np.empty(len(runs), np.int64)
        changes = np.empty((len(runs), 2), np.uint64)
        ends_column = frozen(np.array(ends, np.int64))
        total = int(
            scan_runs(
                frozen(old), frozen(new), ends_column, frozen(firsts), indices, steps, counts,
                changes,
            )
        )  # fmt: skip
        # Read-only once here, or every kernel would be handed a view of its own of every block.
        indices, steps = frozen(indices[:total].copy()), frozen(steps[:total].copy())
        blocks: list[tuple[int, Block]] = []
        steps_kind = ValueKind.STEPS
        begin = at = 0
        rows = zip(runs, ends, counts.tolist(), changes.tolist(), strict=True)
        for (number, tensor, box), end, count, lanes in rows:
            if count:
                change = Fingerprint(*lanes)
                there, moved = indices[at : at + count], steps[at : at + count]
                at += count
                if sparse_for_sure(count, end - begin) or not dense_is_smaller(
                    there, moved, new[begin:end]
                ):
                    block = Block(tensor, box, steps_kind, there, moved, change)
                else:
                    bits = new[begin:end].copy()
                    block = Block(tensor, box, ValueKind.DENSE, None, bits, change)
                blocks.append((number, block))
            begin = end
        return blocks
