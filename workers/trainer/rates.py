"""A fleet whose speeds die with Redis is split evenly again: the bucket keeps a snapshot of them.

`hints/throughput` in the home region: written by the trainer, read by the trainer (a restarted one,
or one whose Redis came back empty). It is a hint: stale, missing or garbage it decides nothing, and
a speed taken from it gives way to the first lease that is measured.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from deltastore.coordination.backend import MAX_ACTORS
from deltastore.errors import DeltastoreError, NotFoundError, StorageError
from deltastore.format.canonical import canonical_json, parse_canonical_json
from deltastore.format.keys import Hint
from deltastore.ids import check_name
from deltastore.scheduling.ema import usable
from deltastore.storage.store import PutMode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltastore.clock import Clock
    from deltastore.repository.run import Run

_LOG = logging.getLogger(__name__)
FORMAT = "deltastore-throughput-1"
MAX_BYTES = 1 << 20
MAX_AGE_S = 3600.0  # an older speed says nothing of today's machine
KEEP_EVERY_S = 30.0  # a snapshot costs one small put
_MILLI = 1000  # canonical documents hold no floats


class RateSnapshot:
    """The speeds of a run's actors, in its home bucket. Used from the trainer's loop only."""

    def __init__(self, home: Run, clock: Clock) -> None:
        self._home = home
        self._key = home.keys.hint(Hint.THROUGHPUT)
        self._clock = clock
        self._kept_s = -math.inf
        self._known: dict[str, float] | None = None

    def recall(self, actor_id: str) -> float | None:
        """What the snapshot that this trainer found says of an actor, in tokens per second."""
        if self._known is None:
            self._known = self._load()
        return self._known.get(actor_id)

    def keep(self, tokens_per_s: Mapping[str, float]) -> None:
        """Write a snapshot, unless the last one is fresh; a store that is away is asked later."""
        now_s = self._clock.monotonic_s()
        if now_s - self._kept_s < KEEP_EVERY_S:
            return
        self._kept_s = now_s
        rates = {actor_id: round(rate * _MILLI) for actor_id, rate in tokens_per_s.items()}
        written_ms = round(self._clock.utc_s() * 1000)
        body = canonical_json({"format": FORMAT, "written_ms": written_ms, "rates_milli": rates})
        try:
            self._home.store.put(self._key, body, mode=PutMode.OVERWRITE)
        except StorageError as err:
            _LOG.warning("speeds are not kept: %s", err)

    def _load(self) -> dict[str, float]:
        try:
            body = self._home.store.get(self._key)
            written_ms, rates = _parse(body)
        except NotFoundError:
            return {}
        except DeltastoreError as err:
            _LOG.warning("the snapshot of speeds is not used: %s", err)
            return {}
        age_s = self._clock.utc_s() - written_ms / 1000
        if abs(age_s) > MAX_AGE_S:
            return {}
        return rates


def _parse(body: bytes) -> tuple[int, dict[str, float]]:
    """When, and the usable speeds; anything odd is left out or refused."""
    document = parse_canonical_json(body, what="hints/throughput", max_bytes=MAX_BYTES)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return 0, {}
    written_ms, rates = document.get("written_ms"), document.get("rates_milli")
    if type(written_ms) is not int or not isinstance(rates, dict) or len(rates) > MAX_ACTORS:
        return 0, {}
    known = {
        check_name(actor_id, "actor id"): usable(value / _MILLI)
        for actor_id, value in rates.items()
        if type(value) is int
    }
    return written_ms, {actor_id: rate for actor_id, rate in known.items() if rate is not None}
