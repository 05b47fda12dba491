"""A vote that one rank reads otherwise splits the engine: in doubt every rank is poisoned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.errors import ApplyError, Kind
from deltastore.pipeline.ballot import Ballot, out_of_step
from deltastore.pipeline.rank_whole import REANCHOR

if TYPE_CHECKING:
    from deltastore.pipeline.group import Group


class Voter:
    """One rank's voice in its group, and whether it is poisoned.

    Args:
        name: of the rank, for errors.
    """

    def __init__(self, group: Group, *, name: str) -> None:
        self._group = group
        self._name = name
        self.poison = ""

    def vote(self, ballot: Ballot, version: int, *, poisons: bool = True) -> list[Ballot]:
        """What every rank says, in rank order.

        Args:
            version: the active one, for errors.
            poisons: whether a poisoned rank poisons the others.

        Raises ApplyError(poisoned), and poisons this rank, when a rank did not come, is poisoned,
        or votes on something else.
        """
        try:
            ballots = [Ballot.from_bytes(text) for text in self._group.exchange(ballot.to_bytes())]
        except BaseException as err:
            raise self.in_doubt(f"a vote failed ({ballot.round.value}): {err}", version) from err
        if poisons:
            if self.poison:
                raise self.in_doubt(self.poison, version)
            ill = [rank for rank, one in enumerate(ballots) if one.poisoned]
            if ill:
                said = ballots[ill[0]].trouble
                raise self.in_doubt(f"rank {ill[0]} is poisoned: {said}", version)
        if len({one.round for one in ballots}) > 1:
            raise self.in_doubt(f"the ranks are out of step: {out_of_step(ballots)}", version)
        return ballots

    def renew(self, version: int) -> None:
        """Forget votes that failed; raises as `vote` does."""
        try:
            self._group.renew()
        except Exception as err:
            raise self.in_doubt(f"the ranks do not meet: {err}", version) from err

    def in_doubt(self, why: str, version: int) -> ApplyError:
        """Poison this rank; the error that says so."""
        self.poison = self.poison or why
        return ApplyError(
            f"{self._name} is poisoned: {self.poison}",
            kind=Kind.POISONED,
            version=version,
            hint=REANCHOR,
        )
