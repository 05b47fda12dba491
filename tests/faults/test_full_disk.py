"""A disk that is really full: old version or new version, and it goes on when there is room."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import numpy as np
import pytest

from deltastore.clock import SystemClock
from deltastore.config import PublisherSettings
from deltastore.errors import Kind, StorageError
from deltastore.events import RegionFailed
from deltastore.format.dtypes import DType
from deltastore.format.layout import TensorEntry
from deltastore.maintenance.repair_copy import copy_body
from deltastore.pipeline.applier import Applier
from deltastore.pipeline.host import HostTarget
from deltastore.pipeline.replicator import Region
from deltastore.pipeline.stager import Stager
from deltastore.pipeline.stager_rank import StagedFeed
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion
from deltastore.repository.run import open_run
from deltastore.storage.fs import FileStore
from deltastore.storage.memory import MemoryStore
from deltastore.storage.store import PutMode
from tests.faults.test_replication import SwitchedStore
from tests.unit.pipeline import harness
from tests.unit.pipeline.harness import RUN, World

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.conftest import SmallDisk


@pytest.fixture(autouse=True)
def larger_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of 400 KB: a version in which all changes does not fit on the disk."""
    monkeypatch.setattr(harness, "ENTRIES", (TensorEntry("w", DType.BF16, (200_000,)),))


def _rewrite(world: World) -> None:
    """Change every element: the update is the whole state."""
    world.state.arrays[0] += world.rng.integers(1, 1 << 15, 200_000).astype(np.uint16)


def test_stager_without_room_keeps_the_old_version_and_goes_on(
    small_disk: SmallDisk, tmp_path: Path
) -> None:
    """The ranks stay where they are, are told `disk_full`, and get the version once it fits."""
    world = World(tmp_path / "w")
    zero = ActiveVersion.of(load_manifest(world.run, 0))
    stager = Stager(open_run(world.home_store, RUN), small_disk.folder, name="h", clock=world.clock)
    target = HostTarget(world.zero.copy())
    feed = StagedFeed(small_disk.folder, world.layout, zero, rank="r", clock=world.clock)
    applier = Applier(target, zero, name="r", clock=world.clock)
    publisher = world.publisher()

    def turns() -> int:
        for _ in range(8):
            world.clock.advance_s(20.0)
            stager.turn()
        feed.poll()
        update = feed.take()
        if update is not None:
            applier.activate(update)
        return applier.active.version

    small_disk.limit()
    world.step(publisher, 1)
    assert turns() == 2
    held = target.state.copy()
    _rewrite(world)
    world.step(publisher, 2)
    assert turns() == 2
    assert target.state.equals(held)
    offer = stager.folder.read_offer("r")
    assert offer is not None
    assert offer.trouble is not None
    assert Kind.DISK_FULL.value in offer.trouble
    assert not list(stager.folder.updates.glob("*.part"))
    small_disk.grow()
    assert turns() == 3
    assert target.state.equals(world.state)
    publisher.close()
    stager.close()


def test_backlog_without_room_loses_no_version_of_its_region(
    small_disk: SmallDisk, tmp_path: Path
) -> None:
    """A region that is down while its backlog's disk fills up gets every version in the end."""
    far = SwitchedStore(MemoryStore())
    world = World(tmp_path / "w", region_stores={"far": far})
    world.clock = SystemClock()
    publisher = world.publisher(
        regions=[Region("far", open_run(far, RUN), 1)],
        settings=PublisherSettings(
            spool_folder=str(small_disk.folder), region_memory_bytes=1 << 20
        ),
    )
    assert publisher.wait_regions(30) == []
    far.off = True
    small_disk.limit()
    for step in range(1, 5):
        _rewrite(world)
        world.step(publisher, step)
    assert far.tried.wait(30)
    region = publisher._fanout._regions[0]
    assert region.backlog_bytes <= (1 << 20) + small_disk.room_bytes
    region._backoff.succeeded()  # the wait of its next attempt is not what is tested
    far.off = False
    assert publisher.wait_regions(60) == []
    publisher.close()
    assert world.digests(far) == world.digests(world.home_store)
    kinds = {e.kind for e in world.events if isinstance(e, RegionFailed)}
    assert Kind.DISK_FULL.value in kinds
    assert not list(small_disk.folder.iterdir())


@pytest.mark.parametrize("full", ["temporary", "bucket"])
def test_a_repair_without_room_says_so_and_harms_nothing(
    small_disk: SmallDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """A body that does not fit in the temporary folder, or in the bucket that is repaired, is
    disk_full by name; with room the same repair works."""
    world = World(tmp_path / "w")
    store = MemoryStore()
    if full == "bucket":
        store = FileStore(small_disk.folder)
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(small_disk.folder))
    for info in world.home_store.list(RUN):
        if not info.key.endswith(".safetensors"):
            store.put(info.key, world.home_store.get(info.key), mode=PutMode.CREATE)
    [shard] = [f for f in load_manifest(world.run, 0).core.files if f.name.endswith("tensors")]
    assert shard.key is not None
    body = (shard.key, shard.size_bytes, shard.sha256)
    damaged = open_run(store, RUN)
    small_disk.limit()
    with pytest.raises(StorageError) as refused:
        copy_body(damaged, world.run, body, streams=2)
    assert refused.value.kind is Kind.DISK_FULL
    small_disk.grow()
    assert copy_body(damaged, world.run, body, streams=2)
    assert store.get(shard.key) == world.home_store.get(shard.key)
