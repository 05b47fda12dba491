"""A deletion that nobody can read beforehand is trusted once: plans are values, with reasons."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING

from deltastore.events import ObjectsDeleted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deltastore.events import EventSink
    from deltastore.repository.run import Run

BATCH_KEYS = 1000


class Verdict(StrEnum):
    """What happens to an object."""

    KEEP = "keep"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Decision:
    """One object of a run and what happens to it.

    Args:
        first: whether it goes before all others: a manifest that names some of them.
    """

    key: str
    size_bytes: int
    verdict: Verdict
    reason: str
    first: bool = False


def keep(key: str, size_bytes: int, reason: str) -> Decision:
    """The object stays."""
    return Decision(key, size_bytes, Verdict.KEEP, reason)


def delete(key: str, size_bytes: int, reason: str, *, first: bool = False) -> Decision:
    """The object goes."""
    return Decision(key, size_bytes, Verdict.DELETE, reason, first)


def deletions(decisions: Iterable[Decision]) -> list[Decision]:
    """What goes, manifests before the bodies that they name."""
    doomed = [one for one in decisions if one.verdict is Verdict.DELETE]
    return sorted(doomed, key=lambda one: not one.first)


def carry_out(run: Run, decisions: Iterable[Decision], *, by: str, sink: EventSink) -> int:
    """Delete what is to be deleted, in order; return how many objects.

    A crash in between leaves bodies without a manifest, never a manifest without its bodies.
    Repeating it is harmless.
    """
    doomed = deletions(decisions)
    for first in (True, False):
        waiting = iter([one for one in doomed if one.first is first])
        while batch := list(islice(waiting, BATCH_KEYS)):
            run.store.delete([one.key for one in batch])
            sink(ObjectsDeleted(by, len(batch), sum(one.size_bytes for one in batch)))
    return len(doomed)
