"""A body deleted under a reader's plan fails it: the floor tells readers first, and they wait.

`hints/floor` names the version below which bodies may be gone, and since when, by the store's own
clock. Like every hint it may be missing, stale, ahead or garbage: readers use it to choose a way
that is likely to be whole, and a deletion never goes by it alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from deltastore.errors import FormatError, Kind, NotFoundError
from deltastore.format.canonical import canonical_json, parse_canonical_json
from deltastore.format.keys import Hint
from deltastore.repository.resolve import MAX_HINT_BYTES
from deltastore.storage.store import PutMode

if TYPE_CHECKING:
    from deltastore.repository.run import Run

MAX_RAISES = 16
"""Floors remembered: of the older ones only the newest matters, and it has waited long enough."""


@dataclass(frozen=True, slots=True)
class Raise:
    """The floor became `floor` at `at_ms`, by the store's clock."""

    floor: int
    at_ms: int


@dataclass(frozen=True, slots=True)
class Floor:
    """What `hints/floor` holds: raises in ascending order of floor and time; never empty."""

    raises: tuple[Raise, ...]

    @property
    def version(self) -> int:
        """Bodies that lead to this version or below, and older whole states, may be gone."""
        return self.raises[-1].floor

    def raised_to(self, floor: int, at_ms: int) -> Floor:
        """The floor after one more raise."""
        return Floor((*self.raises, Raise(floor, at_ms))[-MAX_RAISES:])

    def settled(self, now_ms: int, grace_s: float) -> int | None:
        """The highest floor that readers have known for `grace_s`; None when there is none."""
        old = [r.floor for r in self.raises if now_ms - r.at_ms >= grace_s * 1000]
        return max(old, default=None)

    def to_bytes(self) -> bytes:
        """The hint's bytes."""
        return canonical_json({"raises": [[r.floor, r.at_ms] for r in self.raises]})


def read_floor(run: Run) -> Floor | None:
    """The floor that this region advertises; None when it is missing or garbage."""
    try:
        text = run.store.get(run.keys.hint(Hint.FLOOR))
        document = parse_canonical_json(text, what="floor hint", max_bytes=MAX_HINT_BYTES)
        return _parse(document)
    except FormatError:
        return None
    except NotFoundError as err:
        if err.kind is not Kind.OBJECT_MISSING:
            raise
        return None


def write_floor(run: Run, floor: Floor) -> None:
    """Advertise a floor."""
    run.store.put(run.keys.hint(Hint.FLOOR), floor.to_bytes(), mode=PutMode.OVERWRITE)


def store_now_ms(run: Run, floor: Floor) -> int | None:
    """The store's own time: that of a write of the floor hint made just now.

    None when the store has no dates: then nothing can be called old.
    """
    write_floor(run, floor)
    modified_s = run.store.head(run.keys.hint(Hint.FLOOR)).last_modified_s
    return int(modified_s * 1000) if modified_s > 0 else None


def _parse(document: object) -> Floor | None:
    match document:
        case {"raises": [_, *_] as rows}:
            pass
        case _:
            return None
    raises: list[Raise] = []
    for row in rows[-MAX_RAISES:]:
        match row:
            case [int(floor), int(at_ms)] if floor >= 0 and at_ms >= 0:
                raises.append(Raise(floor, at_ms))
            case _:
                return None
    ordered = all(a.floor <= b.floor and a.at_ms <= b.at_ms for a, b in pairwise(raises))
    return Floor(tuple(raises)) if ordered else None
