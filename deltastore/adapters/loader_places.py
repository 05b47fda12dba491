"""Recorded writes are claims: only those that agree with one another become placements.

Two writes into one place, two cuts of one tensor that overlap, memory that is no parameter, and
every opaque lineage make the tensors in question dense-only, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deltastore.adapters.pieces import Piece, size_of
from deltastore.adapters.placements import Placement, Reach, Region
from deltastore.adapters.region_overlap import Strided, overlapping_pairs
from deltastore.adapters.torch_tensors import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deltastore.adapters.lineage import Lineage
    from deltastore.adapters.loader_memory import ModuleMemory, Owner
    from deltastore.adapters.loader_recorder import Recorder, Write
    from deltastore.format.layout import Layout

MAX_REPEATS = 64
"""Places that one element may be broadcast to; a tensor with more is dense-only."""


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """What the writes of a loader come to."""

    placements: tuple[Placement, ...]
    dense_only: Mapping[int, str]
    reaches: tuple[Reach, ...]


def place_writes(
    recorder: Recorder, memory: ModuleMemory, layout: Layout, derived: Mapping[str, str]
) -> Placed:
    """Placements out of all recorded writes into the module's memory.

    Args:
        derived: modules whose tensors are dense-only in any case -> why.
    """
    dense = _Reasons(recorder.distrusted)
    reaches: list[Reach] = []
    candidates: list[Placement] = []
    for storage, writes in recorder.writes.items():
        if recorder.is_scratch(storage):
            continue
        writes = _without_repeats(writes)
        _refuse_overlaps(writes, dense)
        for write in writes:
            owners = memory.owners_of(storage, write.place)
            if write.lineage.opaque and not write.lineage.sources:
                continue  # the loader's own doing, which fills nothing
            if not owners:
                dense.add(write.lineage, "goes into memory that is no parameter")
                continue
            reaches.append(_reach(write, owners))
            if write.lineage.opaque:
                dense.add(write.lineage, write.lineage.opaque)
                continue
            for owner in owners:
                reason = owner.form or derived.get(owner.module, "")
                if reason:
                    dense.add(write.lineage, reason)
            if owners[0].form:
                continue
            name, module = owners[0].parameter, owners[0].module
            for piece in write.lineage.pieces:
                found = _place(piece, write, layout)
                if isinstance(found, str):
                    dense.add(write.lineage, found)
                    continue
                candidates += [
                    Placement(region, live, name, module, write.lineage.widened is not None)
                    for region, live in found
                ]
    _refuse_cuts(candidates, dense)
    kept = sorted(
        (p for p in candidates if p.region.tensor not in dense.why), key=lambda p: p.region
    )
    return Placed(tuple(kept), dict(sorted(dense.why.items())), tuple(reaches))


class _Reasons:
    """Why tensors are dense-only; the first reason stays."""

    def __init__(self, why: Mapping[int, str]) -> None:
        self.why = dict(why)

    def add(self, lineage: Lineage, reason: str) -> None:
        for source in lineage.sources:
            self.why.setdefault(source, reason)


def _reach(write: Write, owners: Sequence[Owner]) -> Reach:
    return Reach(
        tuple(sorted(write.lineage.sources)),
        write.place,
        tuple(dict.fromkeys(owner.parameter for owner in owners)),
        tuple(dict.fromkeys(owner.module for owner in owners)),
        padding=write.constant,
    )


def _without_repeats(writes: Sequence[Write]) -> list[Write]:
    """The writes without those that say again what one before them said."""
    kept: list[Write] = []
    said: dict[object, Write] = {}
    for write in writes:
        key = (write.place, tuple(write.view.shape), write.lineage.pieces, write.lineage.widened)
        if write.constant or write.lineage.opaque or write.place is None or key not in said:
            said[key] = write
            kept.append(write)
    return kept


def _refuse_overlaps(writes: Sequence[Write], dense: _Reasons) -> None:
    for write in writes:
        if write.lineage.opaque:
            dense.add(write.lineage, write.lineage.opaque)
        elif write.place is None:
            dense.add(write.lineage, "written to places that overlap")
    placed = [write for write in writes if write.place is not None]
    places = [write.place for write in placed if write.place is not None]
    for i, j in overlapping_pairs(places):
        first, second = placed[i], placed[j]
        if second.constant and not first.constant:
            dense.add(first.lineage, "cleared after it was written")
        elif not first.constant:
            # The later one says what is there in the end, and why that is no copy.
            reason = second.lineage.opaque or "written over by another write"
            dense.add(second.lineage, reason)
            dense.add(first.lineage, reason)


def _place(piece: Piece, write: Write, layout: Layout) -> list[tuple[Region, torch.Tensor]] | str:
    """The regions that a piece brings to its box of the view; or why it is none."""
    spec = layout.tensors[piece.source]
    dtype = torch_dtype(spec.dtype)
    widened = write.lineage.widened
    if widened not in (None, dtype):
        return "widened from another dtype"
    wanted = torch.float32 if widened is not None else dtype
    view = write.view
    if view.element_size() != wanted.itemsize:
        return "copied into elements of another width"
    if view.dtype != wanted:
        view = view.view(wanted)
    moves, place = _moves(piece, view)
    if wanted.is_complex:
        view = torch.view_as_real(view)
        moves = [(size, 2 * source, 2 * live) for size, source, live in moves] + [(2, 1, 1)]
        place, first = 2 * place, 2 * piece.offset
    else:
        first = piece.offset
    repeats = [(size, live) for size, source, live in moves if source == 0]
    canonical = _canonical([move for move in moves if move[1]])
    if canonical is None:
        return "one element is several elements of the copy"
    places = [place]
    for size, live in repeats:
        places = [at + k * live for at in places for k in range(size)]
        if len(places) > MAX_REPEATS:
            return "one element is broadcast to many places"
    sizes = tuple(size for size, _, _ in canonical)
    region = Region(piece.source, first, sizes, tuple(source for _, source, _ in canonical))
    steps = tuple(live for _, _, live in canonical)
    return [(region, view.as_strided(sizes, steps, at)) for at in places]


def _moves(piece: Piece, view: torch.Tensor) -> tuple[list[tuple[int, int, int]], int]:
    """Per factor of a piece: size, stride in the source, stride in memory; and the first place."""
    moves: list[tuple[int, int, int]] = []
    place = int(view.storage_offset())
    for begin, dim, step in zip(piece.start, piece.dims, view.stride(), strict=True):
        place += begin * step
        inner = size_of(dim)
        for size, stride in dim:
            inner //= size
            moves.append((size, stride, step * inner))
    return moves, place


def _canonical(moves: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]] | None:
    """By falling stride in the source, neighbours joined; None if they overlap there."""
    joined: list[tuple[int, int, int]] = []
    for size, source, live in sorted(moves, key=lambda move: move[1], reverse=True):
        if joined and joined[-1][1] == size * source and joined[-1][2] == size * live:
            joined[-1] = (joined[-1][0] * size, source, live)
        else:
            joined.append((size, source, live))
    reach = 1
    for size, source, _ in reversed(joined):
        if source < reach:
            return None
        reach += (size - 1) * source
    return joined


def _refuse_cuts(candidates: Sequence[Placement], dense: _Reasons) -> None:
    """Regions of one tensor are equal (copies) or disjoint; others cannot be summed up."""
    by_tensor: dict[int, set[Region]] = {}
    for placement in candidates:
        by_tensor.setdefault(placement.region.tensor, set()).add(placement.region)
    for tensor, regions in by_tensor.items():
        if any(True for _ in overlapping_pairs([strided_of(region) for region in regions])):
            dense.why.setdefault(tensor, "placed in cuts that overlap")


def strided_of(region: Region) -> Strided:
    """The elements of a region, without its tensor."""
    return Strided(region.offset, region.sizes, region.strides)
