"""20,000 tensors cost 20,000 calls where each is a call: short runs are compared many at a time.

What comes out is what `diff_run` gives of each run by itself, in the order they were added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

    The new bits are copied when a run is added, the base's are read when it is compared.

    Memory: `BATCH_ELEMENTS` twice, and their changes if all of them changed.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        columns = layout_columns(layout)
        self._firsts = (np.cumsum(columns.elements) - columns.elements).tolist()
        self._sizes = columns.elements.tolist()
        self._widths = (columns.element_bits // 8).tolist()
        self._new: Bits = np.empty(0, np.uint8)
        self._old: list[Bits] = []
        self._runs: list[tuple[int, Box]] = []
        self._ends: list[int] = []
        self._used = 0

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
        end = self._used + size
        if dtype != self._new.dtype or end > self._new.size:
            ready, end = self.take(), size
            if dtype != self._new.dtype or not self._new.size:
                self._new = np.empty(BATCH_ELEMENTS, dtype)
        self._new[self._used : end] = new if new.ndim == 1 else new.reshape(-1)
        self._old.append(base if base.ndim == 1 else base.reshape(-1))
        self._runs.append((tensor, box))
        self._ends.append(end)
        self._used = end
        return ready

    def take(self) -> list[Block]:
        """Compare what waits; the blocks of all runs that changed."""
        if not self._runs:
            return []
        runs, ends, used = self._runs, self._ends, self._used
        old, new = np.concatenate(self._old), self._new[:used]
        self._old, self._runs, self._ends, self._used = [], [], [], 0
        firsts = np.array([self._firsts[tensor] + box.start[0] for tensor, box in runs], np.int64)
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
        blocks: list[Block] = []
        steps_kind = ValueKind.STEPS
        begin = at = 0
        rows = zip(runs, ends, counts.tolist(), changes.tolist(), strict=True)
        for (tensor, box), end, count, lanes in rows:
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
                blocks.append(block)
            begin = end
        return blocks
