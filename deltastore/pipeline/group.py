"""Ranks that decide one by one end up on two versions: they decide together, over this.

A *group* is all ranks of one engine. `exchange` is the only thing they do together: every rank
gives a message and gets everyone's. Every rank must make the same calls in the same order. A rank
that does not come in time leaves the others with ApplyError(vote_timeout), and then nobody knows
what the others know: they are poisoned until they have re-anchored, which begins with `renew`.
"""

from __future__ import annotations

import threading
from typing import Protocol

from deltastore.errors import ApplyError, Kind

MAX_RANKS = 4096
MAX_MESSAGE_BYTES = 256 << 20


class Group(Protocol):
    """All ranks of one engine, on one host. One thread of each rank uses it."""

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def exchange(self, message: bytes) -> list[bytes]:
        """Everyone's message, in rank order; ApplyError(vote_timeout) when one does not come."""
        ...

    def renew(self) -> None:
        """Forget exchanges that failed; every rank calls it. Raises what `exchange` raises."""
        ...


class SoloGroup:
    """An engine of one rank."""

    rank = 0
    size = 1

    def exchange(self, message: bytes) -> list[bytes]:
        """The message itself."""
        return [message]

    def renew(self) -> None:
        """Nothing can have failed."""


class ThreadGroup:
    """Ranks that are threads of one process: the second implementation, for tests.

    A rank that `leave`s is one that died: whoever waits for it times out at once.
    """

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self._round = 0
        self.rank = rank

    @classmethod
    def of(cls, size: int, *, timeout_s: float = 30.0) -> list[ThreadGroup]:
        """One group of `size` ranks, one object for each."""
        meeting = _Meeting(size, timeout_s)
        return [cls(meeting, rank) for rank in range(size)]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._meeting.size

    def exchange(self, message: bytes) -> list[bytes]:
        """Everyone's message; ApplyError(vote_timeout) when one left, or does not come in time."""
        self._round += 1
        return self._meeting.exchange(self._round, self.rank, message)

    def leave(self) -> None:
        """Die: no exchange that this rank has not come to will be completed."""
        self._meeting.leave(self.rank)

    def renew(self) -> None:
        """Go on at a round that none has been at; ranks that had left are back."""
        self._round = self._meeting.renew(self.rank)


class _Meeting:
    """Where the threads meet."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, bytes]] = {}
        self._gone: set[int] = set()
        self._renewing: set[int] = set()
        self._first_round = 0

    def exchange(self, number: int, rank: int, message: bytes) -> list[bytes]:
        with self._changed:
            self._gone.discard(rank)
            given = self._rounds.setdefault(number, {})
            given[rank] = message
            self._rounds.pop(number - 2, None)  # everyone has come to the one after it
            self._changed.notify_all()

            def over() -> bool:
                return len(given) == self.size or bool(self._gone - given.keys())

            self._changed.wait_for(over, self._timeout_s)
            missing = [one for one in range(self.size) if one not in given]
            if missing:
                raise vote_timeout(missing, self._timeout_s)
            return [given[one] for one in range(self.size)]

    def leave(self, rank: int) -> None:
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def renew(self, rank: int) -> int:
        with self._changed:
            self._renewing.add(rank)
            first = self._first_round
            if len(self._renewing) == self.size:
                self._first_round = max([0, *self._rounds]) + 1
                self._rounds.clear()
                self._gone.clear()
                self._renewing.clear()
                self._changed.notify_all()
            elif not self._changed.wait_for(lambda: self._first_round != first, self._timeout_s):
                self._renewing.discard(rank)
                missing = [one for one in range(self.size) if one not in self._renewing]
                raise vote_timeout(missing, self._timeout_s)
            return self._first_round


def vote_timeout(missing: list[int], timeout_s: float) -> ApplyError:
    """The error of an exchange to which some ranks did not come."""
    names = ", ".join(str(rank) for rank in missing[:8]) or "unknown"
    return ApplyError(
        f"ranks did not come to a vote within {timeout_s} s: {names}",
        kind=Kind.VOTE_TIMEOUT,
        hint="see their logs; all ranks re-anchor together, or the engine is started again",
    )
