"""A region that was away for a month would copy every delta of it: it begins again at an anchor.

A region's chain is what can be rebuilt from an anchor it holds. When home no longer has the bodies
between, or when they weigh more than home's newest anchor, the anchor is copied instead of them.

Write order, and what a crash leaves after each step (all but the hints create-only):
  1. files of the anchor        orphans
  2. the anchor's manifest      an anchor above the region's newest version: an unfinished restart,
                                which the next attempt goes on with
  3. the floor hint             readers are told that bodies up to there may be missing
  4. manifests up to the anchor's version, ascending
                                versions without bodies: readers wait below them; as in 2
  5. the head hint              stale: readers probe
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from deltastore.errors import FormatError, IntegrityError, NotFoundError
from deltastore.pipeline.copying import copy_objects
from deltastore.repository.commit import advertise, commit_version
from deltastore.repository.fetch import load_manifest
from deltastore.repository.floor import Floor, Raise, read_floor, store_now_ms, write_floor
from deltastore.repository.shortcuts import list_anchors, load_anchor
from deltastore.storage.store import PutMode
from deltastore.storage.transfer import FetchItem

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.format.manifest import VersionManifest
    from deltastore.repository.run import Run

WORTH_VERSIONS = 16
"""Fewer versions behind than this are always copied: an anchor weighs more."""


def unfinished_restart(region: Run, held: int) -> int | None:
    """The version of an anchor that a region has above its newest version, if it has one."""
    above = list_anchors(region, first=held + 1)
    return above[-1].version if above else None


def restart_version(home: Run, held: int, target: int, *, streams: int, lost: bool) -> int | None:
    """The version of home's newest anchor, if a region at `held` should begin again there.

    Args:
        target: what home holds.
        lost: whether home lacks bodies that the region needs; else the bytes decide.
    """
    if not lost and target - held < WORTH_VERSIONS:
        return None
    anchors = [one for one in list_anchors(home, first=held + 1) if one.version <= target]
    if not anchors:
        return None
    newest = anchors[-1]
    if lost:
        return newest.version
    skipped = _manifests(home, held + 1, newest.version, streams=streams)
    delta_bytes = sum(manifest.core.delta_bytes for manifest in skipped)
    return newest.version if delta_bytes > newest.size_bytes else None


def restart_at_anchor(
    home: Run,
    region: Run,
    version: int,
    *,
    held: int,
    streams: int,
    folder: Path | None = None,
) -> int:
    """Bring a region that holds `held` to the anchored `version`; returns the bytes copied.

    Raises NotFoundError (gone, version_missing), IntegrityError, StorageError; trying again goes on
    where it stopped.
    """
    target = load_manifest(home, version)
    copied_bytes = 0
    if not _has_anchor(region, target):
        anchor = load_anchor(home, target)
        items = [
            FetchItem(file.key, file.size_bytes, file.sha256)
            for file in anchor.core.files
            if file.key is not None
        ]
        copied_bytes = copy_objects(home.store, region.store, items, streams=streams, folder=folder)
        region.store.put(region.keys.anchor(version), anchor.to_bytes(), mode=PutMode.CREATE)
    _raise_floor(region, version)
    for manifest in _manifests(home, held + 1, version, streams=streams):
        commit_version(region, manifest)
    advertise(region, target)
    return copied_bytes


def _has_anchor(region: Run, target: VersionManifest) -> bool:
    """Whether the region has an anchor of its own at that version, made by its maintenance."""
    try:
        load_anchor(region, target)
    except (NotFoundError, FormatError, IntegrityError):
        return False
    return True


def _manifests(run: Run, first: int, last: int, *, streams: int) -> list[VersionManifest]:
    with ThreadPoolExecutor(streams, thread_name_prefix="restart") as pool:
        return list(pool.map(lambda v: load_manifest(run, v), range(first, last + 1)))


def _raise_floor(region: Run, version: int) -> None:
    floor = read_floor(region) or Floor((Raise(0, 0),))
    if floor.version < version:
        now_ms = store_now_ms(region, floor)
        if now_ms is not None:  # a store without dates keeps no floor
            write_floor(region, floor.raised_to(version, max(now_ms, floor.raises[-1].at_ms)))
