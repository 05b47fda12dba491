"""Composing eight deltas in memory takes eight deltas of memory: here they flow through.

A k-way merge of deltas and composites that follow each other. First the tables of all segments are
read (by range, without their streams): they say which blocks overlap. Blocks that overlap,
directly or by way of others, form a *cell*; cells are composed one after the other, in the order of
the layout. A segment is read when the first cell needs it and forgotten, block by block, as its
cells are done.

Where all versions have the same boxes (as publishers make them) a cell is one box. Boxes that do
not agree are joined on the grid of 2^22 elements, whole tensors where they are not flat runs.

Memory, beside the outlines (about 300 bytes per block of every input):
    streams + 1 encoded segments
  + of every input the decoded segments that overlap the current cell: one, or one per rank
  + the blocks of one cell of every input, and its result.
It does not grow with the number of versions merged or with the size of the model.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

from deltastore.chain.compose import compose
from deltastore.errors import FormatError, IntegrityError, Kind
from deltastore.format.box import MAX_BOX_ELEMENTS
from deltastore.format.disjoint import check_disjoint
from deltastore.format.outline import SegmentOutline, read_outline
from deltastore.format.segment import SegmentIdentity, decode_segment
from deltastore.format.shortcut import CompositeManifest
from deltastore.storage.store import ByteRange
from deltastore.storage.transfer import FetchItem, fetch_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deltastore.format.block import Block
    from deltastore.format.box import Box
    from deltastore.format.fields import SegmentRef
    from deltastore.format.layout import Layout
    from deltastore.repository.run import Run
    from deltastore.repository.way import Step

_Place: TypeAlias = tuple[int, int, int]
"""Input, segment of it, block of that."""


@dataclass(frozen=True, slots=True)
class _Source:
    """One segment of one input."""

    ref: SegmentRef
    identity: SegmentIdentity


@dataclass(frozen=True, slots=True)
class _Cell:
    """Blocks of one tensor that must be composed together."""

    tensor: int
    places: tuple[_Place, ...]


def merged_blocks(run: Run, steps: Sequence[Step], *, streams: int) -> Iterator[list[Block]]:
    """The blocks of one delta that does what the steps do one after the other, cell by cell.

    Args:
        steps: deltas and composites, each starting where the one before it ends.

    Every segment is verified by its SHA-256 before a block of it is used. Raises IntegrityError,
    FormatError, NotFoundError(object_missing), StorageError.
    """
    sources = [_sources(run, step) for step in steps]
    outlines = _read_outlines(run, sources, streams)
    cells = _cells(run.layout, outlines)
    yield from _compose_cells(run, sources, outlines, cells, streams)


def _sources(run: Run, step: Step) -> list[_Source]:
    if step.base is None:
        raise IntegrityError(
            f"version {step.version} is a whole state: it cannot be part of a composite",
            kind=Kind.BROKEN_CHAIN,
            run=run.name,
            version=step.version,
        )
    identity = SegmentIdentity(run.layout.digest, step.base, step.version)
    shortcut = step.shortcut
    refs = (
        shortcut.core.segments
        if isinstance(shortcut, CompositeManifest)
        else step.target.core.segments
    )
    return [_Source(ref, identity) for ref in refs]


def _read_outlines(
    run: Run, sources: list[list[_Source]], streams: int
) -> dict[tuple[int, int], SegmentOutline]:
    places = [(i, s) for i, segments in enumerate(sources) for s in range(len(segments))]

    def read(place: tuple[int, int]) -> SegmentOutline:
        ref = sources[place[0]][place[1]].ref
        return read_outline(
            run.layout,
            lambda begin, end: run.store.get(ref.key, ByteRange(begin, end)),
            ref.size_bytes,
        )

    with ThreadPoolExecutor(streams, thread_name_prefix="outline") as pool:
        return dict(zip(places, pool.map(read, places), strict=True))


def _cells(layout: Layout, outlines: dict[tuple[int, int], SegmentOutline]) -> list[_Cell]:
    """All blocks of all inputs in cells, by tensor and start."""
    entries: list[tuple[int, Box, _Place]] = []
    for (number, segment), outline in outlines.items():
        for block, (tensor, box) in enumerate(zip(outline.tensors, outline.boxes, strict=True)):
            entries.append((tensor, box, (number, segment, block)))
    entries.sort(key=lambda entry: (entry[0], entry[1].start, entry[2]))
    cells: list[_Cell] = []
    for tensor, group in groupby(entries, key=lambda entry: entry[0]):
        blocks = [(box, place) for _tensor, box, place in group]
        cells += [_Cell(tensor, places) for places in _split(layout, tensor, blocks)]
    return cells


def _split(
    layout: Layout, tensor: int, blocks: list[tuple[Box, _Place]]
) -> Iterator[tuple[_Place, ...]]:
    """The blocks of one tensor, sorted by start, in parts that touch none of the others."""
    by_box: dict[Box, list[_Place]] = {}
    for box, place in blocks:
        by_box.setdefault(box, []).append(place)
    if _agree(layout, tensor, list(by_box)):
        for places in by_box.values():
            yield tuple(sorted(places))
        return
    if not all(box.flat for box in by_box):
        yield tuple(sorted(place for _box, place in blocks))
        return
    part: list[_Place] = []
    end = 0
    for box, place in blocks:
        # Composing boxes that differ may widen a block to its grid cell: cells are never split.
        begin = box.start[0] - box.start[0] % MAX_BOX_ELEMENTS
        if part and begin >= end:
            yield tuple(sorted(part))
            part = []
        part.append(place)
        last = box.start[0] + box.shape[0]
        end = max(end, -(-last // MAX_BOX_ELEMENTS) * MAX_BOX_ELEMENTS)
    yield tuple(sorted(part))


def _agree(layout: Layout, tensor: int, boxes: list[Box]) -> bool:
    """Whether every two of these different boxes are of one kind and touch no common element."""
    if len({box.flat for box in boxes}) > 1:
        return False
    try:
        check_disjoint(layout, ((tensor, box) for box in boxes))
    except FormatError:
        return False
    return True


def _compose_cells(
    run: Run,
    sources: list[list[_Source]],
    outlines: dict[tuple[int, int], SegmentOutline],
    cells: list[_Cell],
    streams: int,
) -> Iterator[list[Block]]:
    order = list(dict.fromkeys(place[:2] for cell in cells for place in cell.places))
    refs = [sources[i][s].ref for i, s in order]
    bodies = fetch_all(
        run.store, [FetchItem(r.key, r.size_bytes, r.sha256) for r in refs], streams=streams
    )
    live: dict[tuple[int, int], dict[int, Block]] = {}
    arriving = iter(order)
    for cell in cells:
        taken: dict[int, list[Block]] = {}
        for number, segment, block in cell.places:
            while (number, segment) not in live:
                at = next(arriving)
                live[at] = _decode(run, sources[at[0]][at[1]], outlines[at], next(bodies).body)
            held = live[(number, segment)]
            taken.setdefault(number, []).append(held.pop(block))
            if not held:
                del live[(number, segment)]
        merged: list[Block] = []
        for _number, blocks in sorted(taken.items()):
            merged = compose(run.layout, merged, blocks)
        if merged:
            check_disjoint(run.layout, ((b.tensor, b.box) for b in merged))
            yield merged


def _decode(run: Run, source: _Source, outline: SegmentOutline, body: bytes) -> dict[int, Block]:
    blocks = decode_segment(run.layout, body, expect=source.identity).blocks
    if [b.tensor for b in blocks] != outline.tensors or [b.box for b in blocks] != outline.boxes:
        raise IntegrityError(
            "the object changed while it was read",
            kind=Kind.DIGEST,
            run=run.name,
            version=source.identity.version,
            key=source.ref.key,
        )
    return dict(enumerate(blocks))
