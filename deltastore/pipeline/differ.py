"""A trainer waits while its weights are read: one thread that compares 16 GB keeps it for seconds.

Compares a source with the bits of the last committed version, box by box, in runs of at most 2^22
elements. The runs of one box are compared on `threads` threads (the scan releases the interpreter
lock); small boxes are copied and compared many at a time. Nothing of a box is read after the next
was asked for: its bits may be a view of live memory.

Memory: of each thread one run's changes, and those of `threads` runs that wait for their turn; what
`ShortRuns` holds.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from deltastore.chain.diff import diff_box, diff_run
from deltastore.chain.diff_many import SHORT_RUN_ELEMENTS, ShortRuns
from deltastore.errors import InvalidInputError, Kind
from deltastore.format.box import MAX_BOX_ELEMENTS
from deltastore.format.segment_table import layout_columns
from deltastore.pipeline.protocols import DiffingSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from deltastore.format.block import Block
    from deltastore.format.fingerprint import Fingerprint
    from deltastore.format.layout import BitState, Layout
    from deltastore.pipeline.protocols import SourceBox, WeightSource


TOGETHER_CHANGES = 1 << 15
"""Enough that one call more costs nothing, and no segment waits for them."""


class Differ:
    """Finds the blocks in which a source differs from a state. Used by one thread at a time."""

    def __init__(self, layout: Layout, *, threads: int) -> None:
        self._layout = layout
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="diff")

    def blocks(
        self, source: WeightSource, base: BitState, fingerprint: Fingerprint
    ) -> Iterator[Block]:
        """What `batches` gives, one by one."""
        for batch in self.batches(source, base, fingerprint):
            yield from batch

    def batches(
        self, source: WeightSource, base: BitState, fingerprint: Fingerprint
    ) -> Iterator[Sequence[Block]]:
        """Blocks of all that differs, by tensor and start if the source's boxes come so: those of
        many small tensors together, larger ones by themselves.

        A DiffingSource compares by itself; `fingerprint` is the base's.

        Raises InvalidInputError at the end unless the boxes cover every element exactly once.
        """
        if isinstance(source, DiffingSource):
            yield from _together(source.changes(base, fingerprint))
            return
        covered = [0] * len(self._layout)
        runs = ShortRuns(self._layout)
        for offered in source.boxes(self._layout):
            tensor, box = offered.tensor, offered.box
            elements = box.shape[0] if box.flat else box.elements
            covered[tensor] += elements
            if box.flat and 0 < elements <= SHORT_RUN_ELEMENTS:
                start = box.start[0]
                old = base.arrays[tensor][start : start + elements]
                ready = runs.add(tensor, box, old, offered.bits)
                if ready:
                    yield ready
                continue
            yield runs.take()
            for block in self._diff_box(offered, base):
                yield (block,)
        yield runs.take()
        wrong = np.flatnonzero(covered != layout_columns(self._layout).elements)
        if wrong.size:
            short = [self._layout.tensors[tensor].name for tensor in wrong.tolist()]
            raise InvalidInputError(
                f"the source does not cover {len(short)} tensors exactly once: {short[:5]}",
                kind=Kind.TENSOR_SHAPE,
                hint="its boxes must partition every tensor of the layout",
            )

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=True)

    def _diff_box(self, source: SourceBox, state: BitState) -> Iterator[Block]:
        layout, tensor, box = self._layout, source.tensor, source.box
        base = state.arrays[tensor]
        if not box.flat:
            offsets = box.offsets_of(None, layout.tensors[tensor].element_shape)
            block = diff_box(layout, tensor, box, base[offsets], source.bits)
            if block is not None:
                yield block
            return
        start, count = box.start[0], box.shape[0]
        if count <= MAX_BOX_ELEMENTS:  # no thread is faster than this one
            old = base[start : start + count]
            block = diff_run(layout, tensor, start, old, source.bits) if count else None
            if block is not None:
                yield block
            return

        def diff(low: int) -> Block | None:
            high = min(low + MAX_BOX_ELEMENTS, count)
            old = base[start + low : start + high]
            return diff_run(layout, tensor, start + low, old, source.bits[low:high])

        lows = iter(range(0, count, MAX_BOX_ELEMENTS))
        ahead: deque[Future[Block | None]] = deque()
        try:
            ahead.extend(self._pool.submit(diff, low) for low in islice(lows, 2 * self._threads))
            while ahead:
                block = ahead.popleft().result()
                ahead.extend(self._pool.submit(diff, low) for low in islice(lows, 1))
                if block is not None:
                    yield block
        finally:
            for future in ahead:
                future.cancel()
            for future in ahead:  # nobody may still read the source when this has ended
                if not future.cancelled():
                    future.exception()


def _together(blocks: Iterable[Block]) -> Iterator[Sequence[Block]]:
    """Blocks in lists: a small one by itself costs whoever takes it a call."""
    waiting: list[Block] = []
    changes = 0
    for block in blocks:
        waiting.append(block)
        changes += block.nnz
        if changes >= TOGETHER_CHANGES:
            yield waiting
            waiting, changes = [], 0
    if waiting:
        yield waiting
