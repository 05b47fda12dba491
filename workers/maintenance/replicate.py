"""A region that missed versions while the trainer died never gets them: this worker sees to it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from deltastore.errors import InvalidInputError, Kind
from deltastore.pipeline.replication import Replication
from deltastore.pipeline.replicator import Region, RegionLimits

if TYPE_CHECKING:
    import threading

    from workers.wiring import Premises

_LOG = logging.getLogger(__name__)
LOOK_S = 1.0


def replicate(at: Premises, stopping: threading.Event) -> None:
    """Bring every region but home up to home, and keep them there until told to stop."""
    config, settings = at.config, at.config.replicate
    if settings is None:
        raise InvalidInputError(
            "the file has no `replicate` part", kind=Kind.SETTING, hint="see docs/workers.md"
        )
    streams = {region.name: region.streams for region in config.regions}
    others = [
        Region(name, run, streams[name]) for name, run in at.regions.items() if name != config.home
    ]
    if not others:
        raise InvalidInputError("the file names no region but home", kind=Kind.SETTING)
    replication = Replication(
        at.regions[config.home],
        others,
        limits=RegionLimits(
            memory_max_bytes=0,  # nobody offers bodies here
            disk_max_bytes=0,
            folder=None if settings.folder is None else Path(settings.folder),
            patience_s=settings.patience_s,
        ),
        poll_s=settings.poll_s,
        clock=at.clock,
        sink=at.sink,
    )
    try:
        if settings.until_current:
            while not stopping.is_set() and replication.behind(LOOK_S):
                _LOG.info("not yet at version %d: %s", replication.head, replication.behind(0))
            return
        replication.run(stopping)
    finally:
        replication.close()
