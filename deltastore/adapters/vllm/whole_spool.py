"""Eight ranks that each rebuild a whole state read it eight times: one rebuilds, all map it.

Rank 0 writes the state beside the spool and tells the others its name and digest. The file is gone
once all have mapped it; what a killed engine left is removed by the next engine that starts here.
"""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING

from deltastore.errors import InvalidInputError, Kind
from deltastore.pipeline.held_lock import HeldLock, remove_if_dead
from deltastore.pipeline.spool import SpooledUpdate, SpoolFolder, map_update
from deltastore.pipeline.staged import StagedUpdate

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.format.layout import BitState, Layout
    from deltastore.repository.points import ActiveVersion


class WholeSpool:
    """Where one engine's rank 0 lays whole states for the others.

    Args:
        folder: of the host's spool.
        engine: its name on this host.

    Raises InvalidInputError(lease_held) when another engine has the name.
    """

    def __init__(self, folder: Path, engine: str) -> None:
        parent = folder / "whole"
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = HeldLock(parent / f"{engine}.lock", what=f"the engine name {engine!r}")
        self._path = parent / engine
        # Of engines named after their process nobody has the name again: locks go, too.
        left = {path.name for path in parent.iterdir() if path.is_dir()}
        for name in left | {lock.stem for lock in parent.glob("*.lock")}:
            remove_if_dead(parent / f"{name}.lock", partial(_remove_folder, parent / name))
        shutil.rmtree(self._path, ignore_errors=True)

    def lay(self, layout: Layout, state: BitState, point: ActiveVersion) -> SpooledUpdate:
        """Write a state; StorageError(disk_full) when the folder has no room for it."""
        update = StagedUpdate(point, point, [], layout.size_bytes, 1, state)
        return SpoolFolder(self._path).spool(layout, update)

    def clear(self) -> None:
        """Remove what was laid; what is mapped stays readable."""
        shutil.rmtree(self._path, ignore_errors=True)

    def close(self) -> None:
        """Remove what was laid, and let go of the name."""
        self.clear()
        self._lock.close()


def _remove_folder(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


def map_whole(spooled: SpooledUpdate, layout: Layout) -> BitState:
    """The state that rank 0 has laid, mapped read-only and checked; raises as `map_update` does."""
    state = map_update(spooled, layout, spooled.target).state
    if state is None:
        raise InvalidInputError("what was laid is no whole state", kind=Kind.PAYLOAD)
    return state
