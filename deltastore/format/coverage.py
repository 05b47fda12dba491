"""A name that matches nothing must stop the work: skipped with a warning, a weight stays old.

Says which of a source's entries serves each tensor of a layout. Every tensor must be offered, in
its own shape and dtype, and everything offered must have a place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.errors import InvalidInputError, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltastore.format.layout import Layout, TensorEntry, TensorSpec

MAX_NAMES_SHOWN = 8


def match_entries(layout: Layout, entries: Sequence[TensorEntry]) -> list[tuple[int, ...]]:
    """For each tensor of the layout, the positions of the entries that offer it: at least one.

    More than one when a source exposes both names of a tied tensor: it must check that their bits
    are equal. One entry may serve several tensors, when a source ties what the layout keeps apart.
    A further alias that the layout does not know adds nothing and is fine.

    Raises InvalidInputError: `tensor_names` (missing, unknown or offered twice), `tensor_shape`,
    `tensor_dtype`, naming the tensors.
    """
    offers: list[list[int]] = [[] for _ in layout.tensors]
    unknown: list[str] = []
    twice: list[str] = []
    seen: set[str] = set()
    for position, entry in enumerate(entries):
        names = (entry.name, *entry.aliases)
        twice.extend(name for name in names if name in seen)
        seen.update(names)
        places = {place for name in names if (place := layout.position(name)) is not None}
        if not places:
            unknown.append(entry.name)
        for place in places:
            offers[place].append(position)
    missing = [s.name for s, found in zip(layout.tensors, offers, strict=True) if not found]
    _refuse_names(missing, unknown, twice)
    pairs = [
        (spec, entries[position])
        for spec, found in zip(layout.tensors, offers, strict=True)
        for position in found
    ]
    _refuse_shapes(pairs)
    _refuse_dtypes(pairs)
    return [tuple(found) for found in offers]


def list_names(names: Sequence[str]) -> str:
    """The first few names and how many more there are."""
    shown = ", ".join(repr(name[:120]) for name in names[:MAX_NAMES_SHOWN])
    more = len(names) - MAX_NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _refuse_names(missing: list[str], unknown: list[str], twice: list[str]) -> None:
    parts = [
        f"{len(names)} {what}: {list_names(names)}"
        for what, names in (
            ("missing", missing),
            ("not in the layout", unknown),
            ("offered twice", twice),
        )
        if names
    ]
    if parts:
        raise InvalidInputError(
            f"tensor names do not match the layout: {'; '.join(parts)}",
            kind=Kind.TENSOR_NAMES,
            hint="the layout is fixed when a run is made: use the same architecture and names",
        )


def _refuse_shapes(pairs: list[tuple[TensorSpec, TensorEntry]]) -> None:
    wrong = [
        f"{entry.name} {list(entry.shape)} instead of {list(spec.shape)}"
        for spec, entry in pairs
        if tuple(entry.shape) != spec.shape
    ]
    if wrong:
        raise InvalidInputError(
            f"{len(wrong)} tensors have another shape than the layout: {list_names(wrong)}",
            kind=Kind.TENSOR_SHAPE,
            hint="the layout is fixed when a run is made: use the same architecture",
        )


def _refuse_dtypes(pairs: list[tuple[TensorSpec, TensorEntry]]) -> None:
    wrong = [
        f"{entry.name} {entry.dtype.value} instead of {spec.dtype.value}"
        for spec, entry in pairs
        if entry.dtype is not spec.dtype
    ]
    if wrong:
        raise InvalidInputError(
            f"{len(wrong)} tensors have another dtype than the layout: {list_names(wrong)}",
            kind=Kind.TENSOR_DTYPE,
            hint="nothing is cast on the way: save the checkpoint in the run's dtypes",
        )
