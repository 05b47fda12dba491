"""A vote over the group that forward passes use would end them when it fails: it has its own.

All ranks of an engine as a Group, over gloo on the loopback device: an engine's ranks are on one
host. Gloo gives a group up after one failed exchange, so `renew` makes another one; a new group has
not met yet, so that a first meeting that fails leaves a group which all can renew. Rank 0 numbers
the meetings and says in the store which are called and which are over, so that ranks that failed
differently often still find each other.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deltastore.errors import ApplyError, InvalidInputError, Kind
from deltastore.pipeline.group import MAX_MESSAGE_BYTES, MAX_RANKS, vote_timeout

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST_BYTES = 4096
"""Of a message in the first collective: most votes need no second one."""
LOOPBACK = "127.0.0.1"
_HEAD_BYTES = 8
_made: Counter[tuple[int, ...]] = Counter()


class TorchGroup:
    """Some processes of torch's default group; `renew` it before the first exchange.

    Args:
        store: that all ranks share.
        name: in the store; the same on every rank, and of this group alone.
        timeout_s: of every exchange, and of meeting the others.
    """

    def __init__(
        self, store: c10d.Store, *, name: str, rank: int, size: int, timeout_s: float
    ) -> None:
        if not (0 <= rank < size <= MAX_RANKS and timeout_s > 0):
            raise InvalidInputError(
                f"rank {rank} of {size} with a timeout of {timeout_s} s", kind=Kind.SETTING
            )
        self._store = store
        self._name = name
        self._timeout_s = timeout_s
        self._number = 0
        self._gloo: Any = None
        self.rank = rank
        self.size = size

    @classmethod
    def of(cls, ranks: Sequence[int], *, timeout_s: float) -> TorchGroup:
        """The processes of these global ranks. Each of them calls it, with the same ranks.

        Raises InvalidInputError(setting) when this process is not among them, or
        torch.distributed is not initialised.
        """
        if not dist.is_initialized() or dist.get_rank() not in ranks:
            raise InvalidInputError(
                f"this process is none of the ranks {list(ranks)[:16]}",
                kind=Kind.SETTING,
                hint="initialise torch.distributed first",
            )
        key = tuple(ranks)
        _made[key] += 1
        name = f"deltastore/{'-'.join(map(str, ranks))}/{_made[key]}"
        return cls(
            c10d._get_default_store(),
            name=name,
            rank=key.index(dist.get_rank()),
            size=len(key),
            timeout_s=timeout_s,
        )

    def exchange(self, message: bytes) -> list[bytes]:
        """Everyone's message, in rank order.

        Raises ApplyError(vote_timeout) when one does not come in time or has died, and from then on
        until the group is renewed.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise InvalidInputError(f"a message of {len(message)} bytes", kind=Kind.LIMIT)
        first = bytearray(FIRST_BYTES)
        first[:_HEAD_BYTES] = len(message).to_bytes(_HEAD_BYTES, "little")
        head = message[: FIRST_BYTES - _HEAD_BYTES]
        first[_HEAD_BYTES : _HEAD_BYTES + len(head)] = head
        heads = self._gather(first)
        sizes = [int.from_bytes(one[:_HEAD_BYTES], "little") for one in heads]
        most = max(sizes) - len(first) + _HEAD_BYTES
        if most <= 0:
            return [_body(one, size) for one, size in zip(heads, sizes, strict=True)]
        rest = message[len(head) :].ljust(most, b"\0")
        tails = self._gather(bytearray(rest))
        return [
            (one[_HEAD_BYTES:] + tail)[:size]
            for one, tail, size in zip(heads, tails, sizes, strict=True)
        ]

    def renew(self) -> None:
        """Meet the others anew; every rank calls it. ApplyError(vote_timeout) if they do not."""
        self._gloo = None
        try:
            self._number = self._called()
            self._gloo = self._meet()
        except RuntimeError as err:
            if self.rank == 0:
                self._store.set(self._key("over", self._number), "1")
            raise self._failed() from err

    def _called(self) -> int:
        """The number of the next meeting; waits until rank 0 has called it."""
        number = self._number + 1
        if self.rank == 0:
            self._store.set(self._key("called", number), "1")
            return number
        while True:
            self._store.wait([self._key("called", number)], timedelta(seconds=self._timeout_s))
            if not self._store.check([self._key("over", number)]):
                return number
            number += 1

    def _meet(self) -> Any:
        gloo: Any = dist.ProcessGroupGloo  # torch declares only a part of it
        options = gloo._Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        store = c10d.PrefixStore(self._key("meeting", self._number), self._store)
        return gloo(store, self.rank, self.size, options)

    def _key(self, what: str, number: int) -> str:
        return f"{self._name}/{what}/{number}"

    def _gather(self, message: bytearray) -> list[bytes]:
        """Everyone's bytes; all have one length."""
        if self._gloo is None:
            raise ApplyError(
                "the ranks have not met, or an exchange has failed since",
                kind=Kind.VOTE_TIMEOUT,
                hint="all ranks initialise or re-anchor together, or the engine is started again",
            )
        own = torch.frombuffer(message, dtype=torch.uint8)
        given = [torch.empty_like(own) for _ in range(self.size)]
        try:
            self._gloo.allgather(given, own).wait()
        except RuntimeError as err:
            self._gloo = None
            raise self._failed() from err
        return [one.numpy().tobytes() for one in given]

    def _failed(self) -> ApplyError:
        return vote_timeout([], self._timeout_s)


def _body(first: bytes, size: int) -> bytes:
    return first[_HEAD_BYTES : _HEAD_BYTES + size]
