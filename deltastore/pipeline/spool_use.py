"""A host's downloads are seen by its stager alone: what it counts lies in the spool, for metrics.

    use.json    what the host's stager has done with its store (storage/store_use.py); by the stager

Ranks pass it on with their status, and whoever drives the engine takes from it what is new. Nothing
depends on it: a file that cannot be written, or read, costs numbers.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

from deltastore.errors import FormatError
from deltastore.format.canonical import canonical_json, parse_canonical_json
from deltastore.storage.store_use import StoreUse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from deltastore.clock import Clock
    from deltastore.pipeline.engine_control import RankStatus
    from deltastore.storage.store_use import UseCounter

MAX_USE_BYTES = 1 << 16
EVERY_S = 1.0
"""Often enough for who scrapes; every poll of the store changes the counts."""
MAX_COUNTERS = 256
_NAME = "use.json"
_log = logging.getLogger(__name__)


class UseFile:
    """The stager's side: writes the counts down when they have changed, now and then."""

    def __init__(self, folder: Path, counter: UseCounter, region: str, clock: Clock) -> None:
        self._path = folder / _NAME
        self._counter = counter
        self._region = region
        self._clock = clock
        self._written: object = None
        self._next_s = float("-inf")
        self._failed = ""

    def write(self, *, now: bool = False) -> None:
        """Write the counts, unless that was done a moment ago; `now`: even then."""
        now_s = self._clock.monotonic_s()
        row = self._counter.row(self._region)
        if row == self._written or (now_s < self._next_s and not now):
            return
        self._next_s = now_s + EVERY_S
        part = self._path.with_name(f".{_NAME}.part")
        try:
            part.write_bytes(canonical_json(row))
            part.replace(self._path)
        except OSError as err:
            if str(err) != self._failed:
                _log.warning("how the store was used cannot be written down: %s", err)
            self._failed = str(err)
            return
        self._written, self._failed = row, ""


def read_use(folder: Path) -> StoreUse | None:
    """What the folder's stager wrote down last; None when it has not, or it cannot be read."""
    try:
        with (folder / _NAME).open("rb") as file:
            text = file.read(MAX_USE_BYTES + 1)
        row = parse_canonical_json(text, what=f"{folder}/{_NAME}", max_bytes=MAX_USE_BYTES)
        return StoreUse.parse(row)
    except (OSError, FormatError) as err:
        _log.debug("how the store was used cannot be read: %s", err)
        return None


class UseReader:
    """The side of who drives an engine: passes on what is new in its ranks' statuses.

    Args:
        take: what was done since the last status, of one process's store.
        already: whether what the first status says was passed on by somebody else.
    """

    def __init__(self, take: Callable[[StoreUse], None], *, already: bool = False) -> None:
        self._take = take
        self._already = already
        self._seen: OrderedDict[str, StoreUse] = OrderedDict()

    def see(self, ranks: Iterable[RankStatus]) -> None:
        """Take in what every rank says now; several may say the same of their stager."""
        uses = [use for rank in ranks for use in rank.store]
        for use in uses:
            new = use.since(self._seen.get(use.counter))
            if not self._already:
                self._take(new)
            self._seen[use.counter] = use
            self._seen.move_to_end(use.counter)
            if len(self._seen) > MAX_COUNTERS:
                self._seen.popitem(last=False)
        if uses:
            self._already = False
