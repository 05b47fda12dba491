"""An engine that reads its bucket unseen hides what is slow: a rank says how it used its store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deltastore.pipeline.spool_use import read_use
from deltastore.storage.store_use import UseCounter

if TYPE_CHECKING:
    from pathlib import Path


class StoreCounts:
    """What one rank has done with its store, and on rank 0 what the host's stager has.

    `counter` is the StoreObserver of the rank's store.
    """

    def __init__(self) -> None:
        self.counter = UseCounter()
        self._region: str | None = None
        self._folder: Path | None = None

    def follows(self, region: str, folder: Path | None) -> None:
        """What the region is called; where the host's stager is, if this rank speaks for it."""
        self._region, self._folder = region, folder

    def rows(self) -> list[dict[str, Any]]:
        """The counts, as a rank's status carries them; see `RankStatus.store`."""
        if self._region is None:
            return []
        found = [self.counter.row(self._region)]
        stager = None if self._folder is None else read_use(self._folder)
        return found if stager is None else [*found, stager.row()]
