"""`python -m workers.stager FILE`: stage the run of a JSON file for the ranks of this host.

SIGTERM ends it after the request in flight; its updates are removed, what ranks have mapped stays
readable to them. Exit codes are those of the command line (deltastore/cli/exits.py).
"""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from deltastore.cli.keys import read_trusted
from deltastore.cli.signals import ring_on_sigterm
from deltastore.cli.staging import require_spool
from deltastore.config import FollowerSettings
from deltastore.errors import InvalidInputError, Kind
from deltastore.pipeline.stager import Stager
from deltastore.storage.store_use import UseCounter
from workers.early_segments import SegmentListener
from workers.head_hints import HeadHints
from workers.wiring import open_coordination, open_premises, run_worker

if TYPE_CHECKING:
    from workers.config import WorkerConfig

NAME = "stager"


def _work(config: WorkerConfig) -> None:
    settings = config.stager
    if settings is None:
        raise InvalidInputError(
            "the file has no `stager` part", kind=Kind.SETTING, hint="see docs/workers.md"
        )
    trusted = settings.trusted_keys
    require_spool(Path(settings.folder))
    stopping = threading.Event()
    ring_on_sigterm(stopping.set)
    with ExitStack() as stack:
        counter = UseCounter()
        at = stack.enter_context(
            open_premises(config, f"{NAME}-{settings.region}", {settings.region: counter})
        )
        early = None
        if config.redis_url:
            coordination = stack.enter_context(open_coordination(config, at.clock))
            hints = HeadHints(coordination, at.clock)
            stack.callback(hints.stop)
            keys = at.regions[settings.region].keys
            early = SegmentListener(coordination, keys, hints.wait)
        stager = Stager(
            at.regions[settings.region],
            Path(settings.folder),
            name=NAME,
            clock=at.clock,
            settings=FollowerSettings(stage_max_bytes=settings.stage_max_bytes),
            sink=at.sink,
            hint_source=None if early is None else early.wait,
            cache_max_bytes=settings.cache_max_bytes,
            trusted=read_trusted(None if trusted is None else Path(trusted)),
            use=counter,
        )
        if early is not None:
            early.announce = stager.announce
        stager.run(stopping)


if __name__ == "__main__":
    sys.exit(run_worker(_work, sys.argv[1:]))
