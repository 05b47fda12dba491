"""A server does not see the store that its stager reads: counts go from process to process.

`UseCounter` is a StoreObserver that only counts; its `row` is JSON for another process, which reads
it with `StoreUse.parse` and takes what is new by `since`. Seconds stay where they are measured.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from deltastore.errors import FormatError, Kind
from deltastore.ids import check_name, new_token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltastore.errors import DeltastoreError

OPS = frozenset({"put", "get", "head", "list", "delete"})
OUTCOMES = frozenset({"ok", *(kind.value for kind in Kind)})
_MAX_COUNT = 1 << 62


@dataclass(frozen=True, slots=True)
class StoreUse:
    """What one process has done with one region's store, since it began.

    Args:
        counter: names the process's counts; another one begins at nothing.
        requests: calls by operation and outcome.
        retries: requests made again, by the kind of error before.
    """

    counter: str
    region: str
    requests: Mapping[tuple[str, str], int] = field(default_factory=dict)
    retries: Mapping[str, int] = field(default_factory=dict)
    sent_bytes: int = 0
    received_bytes: int = 0

    @classmethod
    def parse(cls, row: object) -> StoreUse:
        """Read what `UseCounter.row` made; FormatError(field) when it is not that."""
        try:
            match row:
                case {
                    "counter": str(counter),
                    "region": str(region),
                    "requests": [*requests],
                    "retries": [*retries],
                    "sent_bytes": sent_bytes,
                    "received_bytes": received_bytes,
                }:
                    return cls(
                        check_name(counter, "counter"),
                        check_name(region, "region"),
                        {
                            (_known(op, OPS), _known(outcome, OUTCOMES)): _count(calls)
                            for op, outcome, calls in requests
                        },
                        {_known(cause, OUTCOMES): _count(times) for cause, times in retries},
                        _count(sent_bytes),
                        _count(received_bytes),
                    )
        except (TypeError, ValueError) as err:
            raise _not_counts(row) from err
        raise _not_counts(row)

    def row(self) -> dict[str, Any]:
        """The counts as JSON; see `parse`."""
        return {
            "counter": self.counter,
            "region": self.region,
            "requests": [[*what, calls] for what, calls in sorted(self.requests.items())],
            "retries": [[cause, times] for cause, times in sorted(self.retries.items())],
            "sent_bytes": self.sent_bytes,
            "received_bytes": self.received_bytes,
        }

    def since(self, before: StoreUse | None) -> StoreUse:
        """What was done after `before`; all of it, if those are another process's counts."""
        if before is None or before.counter != self.counter:
            return self
        return replace(
            self,
            requests=_more(self.requests, before.requests),
            retries=_more(self.retries, before.retries),
            sent_bytes=max(0, self.sent_bytes - before.sent_bytes),
            received_bytes=max(0, self.received_bytes - before.received_bytes),
        )


class UseCounter:
    """Counts what passes the store of one region, whatever that is called. Thread-safe."""

    def __init__(self) -> None:
        self._counter = new_token()
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str]] = Counter()
        self._retries: Counter[str] = Counter()
        self._sent_bytes = self._received_bytes = 0

    def called(self, region: str, op: str, outcome: str, seconds: float) -> None:
        """A call has ended; see StoreObserver."""
        with self._lock:
            self._requests[op, outcome] += 1

    def moved(self, region: str, *, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        """A body has passed."""
        with self._lock:
            self._sent_bytes += sent_bytes
            self._received_bytes += received_bytes

    def retried(self, region: str, err: DeltastoreError) -> None:
        """A request is made again because of `err`."""
        with self._lock:
            self._retries[err.kind.value] += 1

    def row(self, region: str) -> dict[str, Any]:
        """The counts as JSON, and what the region is called; see `StoreUse.parse`."""
        with self._lock:
            return StoreUse(
                self._counter,
                region,
                self._requests,
                self._retries,
                self._sent_bytes,
                self._received_bytes,
            ).row()


def _more(now: Mapping[Any, int], before: Mapping[Any, int]) -> dict[Any, int]:
    found = {what: count - before.get(what, 0) for what, count in now.items()}
    return {what: count for what, count in found.items() if count > 0}


def _known(part: object, known: frozenset[str]) -> str:
    """A label's value: one that anybody may make up would make metrics without end."""
    if not isinstance(part, str) or part not in known:
        raise ValueError("not a label")
    return part


def _count(part: object) -> int:
    if isinstance(part, bool) or not isinstance(part, int) or not 0 <= part <= _MAX_COUNT:
        raise ValueError("not a count")
    return part


def _not_counts(row: object) -> FormatError:
    return FormatError(
        f"{str(row)[:200]!r} does not say how a store was used",
        kind=Kind.FIELD,
        hint="the process that wrote it must run the same release of deltastore as this one",
    )
