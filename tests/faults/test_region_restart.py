"""A region that is too far behind begins again at an anchor, and is whole from there on."""

from __future__ import annotations

import pytest

from deltastore.errors import StorageError
from deltastore.events import StageFinished
from deltastore.maintenance.anchors import write_anchor
from deltastore.maintenance.fsck import check_run
from deltastore.pipeline.region_restart import restart_at_anchor
from deltastore.pipeline.replicator import Region, RegionLimits, RegionReplicator
from deltastore.repository.floor import read_floor
from deltastore.repository.resolve import find_head
from deltastore.repository.run import open_run
from deltastore.storage.memory import MemoryStore
from deltastore.testing.faults import FaultyStore, Op, fail_at
from tests.unit.pipeline.harness import RUN, World


@pytest.fixture
def far():
    """The region that was away, on which faults can happen."""
    return FaultyStore(MemoryStore())


@pytest.fixture
def world(tmp_path, far):
    """Home with 80 versions and an anchor at 64; the region holds version 0."""
    made = World(tmp_path, region_stores={"far": far})
    publisher = made.publisher(step=1)
    for step in range(2, 81):
        made.step(publisher, step)
    publisher.close()
    write_anchor(made.run, 64, clock=made.clock)
    return made


def _replicator(world, far):
    return RegionReplicator(
        Region("far", open_run(far, RUN), streams=4),
        world.run,
        target=find_head(world.run),
        limits=RegionLimits(),
        clock=world.clock,
        sink=world.events.append,
    )


def _forget_bodies(world, below):
    keys = [info.key for info in world.home_store.list(f"{RUN}/deltas/")]
    world.home_store.delete([key for key in keys if int(key.split("/")[2]) <= below])


def _whole(world, far):
    region = open_run(far, RUN)
    assert find_head(region) == find_head(world.run)
    assert world.replayed(store=far).equals(world.state)
    assert read_floor(region).version == 64


def _restarts(world):
    return [e for e in world.events if isinstance(e, StageFinished) and e.stage == "catch_up"]


def test_an_anchor_is_copied_instead_of_heavier_deltas(world, far):
    """80 versions behind, with deltas heavier than the anchor: it and its tail are copied."""
    replicator = _replicator(world, far)
    assert replicator.wait_until(80, 60)
    replicator.close()
    _whole(world, far)
    assert [e.version for e in _restarts(world)] == [64]
    bodies = {int(info.key.split("/")[2]) for info in far.list(f"{RUN}/deltas/")}
    assert bodies == set(range(65, 81))


def test_bodies_that_home_no_longer_has(world, far):
    """When home's retention has taken the bodies between, the region begins again by itself."""
    replicator = _replicator(world, far)
    replicator.close()
    _forget_bodies(world, 64)
    replicator = _replicator(world, far)
    assert replicator.wait_until(80, 60)
    replicator.close()
    _whole(world, far)


def test_actors_and_trainer_go_on_after_it(world, far):
    """After a restart an actor of the region follows, and new versions arrive by deltas."""
    actor = world.actor(far)
    publisher = world.publisher(step=80, regions=[Region("far", open_run(far, RUN))])
    world.step(publisher, 81)
    assert publisher.wait_regions(60) == []
    publisher.close()
    assert actor.advance().version == 82
    assert actor.target.state.equals(world.state)
    report = check_run(open_run(far, RUN), deep=True, streams=2, clock=world.clock)
    assert report.ok, report.findings


@pytest.mark.parametrize("nth", [1, 2, 3, 4, 30, 67, 68, 69, 70])
def test_cut_at_any_put(world, far, nth):
    """A restart that is cut at any put goes on with the next attempt, and ends whole."""
    region = open_run(far, RUN)
    far.add(fail_at(Op.PUT, nth))
    try:
        restart_at_anchor(world.run, region, 64, held=0, streams=2)
    except StorageError:
        assert far.fired
    far.clear()
    replicator = _replicator(world, far)
    assert replicator.wait_until(80, 60)
    replicator.close()
    _whole(world, far)


def test_a_region_with_an_anchor_of_its_own(world, far):
    """An anchor that the region's own maintenance made at that version is used as it is."""
    first = _replicator(world, far)
    assert first.wait_until(80, 60)
    first.close()
    before = {i.key for i in far.list(f"{RUN}/anchors/")}
    assert restart_at_anchor(world.run, open_run(far, RUN), 64, held=0, streams=2) == 0
    assert {i.key for i in far.list(f"{RUN}/anchors/")} == before
