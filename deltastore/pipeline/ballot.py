"""A vote that is read in two ways splits an engine: every rank judges the same bytes the same way.

What a rank says in a vote, as bytes: a line of canonical JSON, and the rows of its tally.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from deltastore.errors import DeltastoreError, FormatError, Kind
from deltastore.format.canonical import canonical_json, parse_canonical_json
from deltastore.pipeline.tally import empty_tally, tally_bytes, tally_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltastore.pipeline.tally import Tally
    from deltastore.repository.points import ActiveVersion

MAX_LINE_BYTES = 1 << 16
MAX_TROUBLE_CHARS = 2000


class Round(StrEnum):
    """What is voted on. All ranks are in the same round, or they are poisoned."""

    VERIFY = "verify"
    """Vote 1: what the update would do to the live weights. Nothing has been written."""
    WRITTEN = "written"
    """Vote 2: whether all of it has been written."""
    UNDONE = "undone"
    """After a failure: whether it was undone, and what the weights are."""
    STATE = "state"
    """Whether every rank is about to write the same whole state."""
    WHOLE = "whole"
    """What the weights are."""


@dataclass(frozen=True, slots=True, eq=False)
class Ballot:
    """What one rank says.

    Args:
        round: what it thinks is voted on.
        base, target: digests of the versions that it speaks of.
        trouble: why it cannot go on; empty when it can.
        poisoned: whether its weights are in doubt.
        tally: its numbers.
    """

    round: Round
    base: str
    target: str
    trouble: str = ""
    poisoned: bool = False
    tally: Tally = field(default_factory=empty_tally)

    def to_bytes(self) -> bytes:
        """As it travels."""
        line = canonical_json(
            {
                "round": self.round.value,
                "base": self.base,
                "target": self.target,
                "trouble": self.trouble[:MAX_TROUBLE_CHARS],
                "poisoned": self.poisoned,
            }
        )
        return line + b"\n" + tally_bytes(self.tally)

    @classmethod
    def from_bytes(cls, text: bytes) -> Ballot:
        """Read what travelled; FormatError when it is no ballot."""
        end = text.find(b"\n", 0, MAX_LINE_BYTES)
        if end < 0:
            raise FormatError("a ballot has no first line", kind=Kind.TRUNCATED)
        row: Any = parse_canonical_json(text[:end], what="a ballot", max_bytes=MAX_LINE_BYTES)
        match row:
            case {
                "round": str(number),
                "base": str(base),
                "target": str(target),
                "trouble": str(trouble),
                "poisoned": bool(poisoned),
            } if number in list(Round):
                rows = tally_of(memoryview(text)[end + 1 :])
                return cls(Round(number), base, target, trouble, poisoned, rows)
        raise FormatError("a ballot has other fields", kind=Kind.FIELD)


def point_digest(point: ActiveVersion | None) -> str:
    """What names a version in a ballot; of none, nothing."""
    return "" if point is None else f"{point.version}:{point.policy_hash}:{point.fingerprint}"


def troubles(ballots: Sequence[Ballot]) -> str:
    """Why some ranks cannot go on, in words; empty when all can."""
    said = [f"rank {rank}: {one.trouble}" for rank, one in enumerate(ballots) if one.trouble]
    return "; ".join(said[:4]) + (f"; and {len(said) - 4} more" if len(said) > 4 else "")


def out_of_step(ballots: Sequence[Ballot]) -> str:
    """How the ranks differ in what they vote on, in words; empty when they do not."""
    seen = {(one.round, one.base, one.target) for one in ballots}
    if len(seen) == 1:
        return ""
    rows = [
        f"rank {rank} votes on {one.round.value} {one.base[:24]} -> {one.target[:24]}"
        for rank, one in enumerate(ballots)
    ]
    return "; ".join(rows[:8])


def words(err: BaseException | None) -> str:
    """An error in a ballot: never empty; of none, nothing."""
    if err is None:
        return ""
    return err.message if isinstance(err, DeltastoreError) else f"{type(err).__name__}: {err}"
