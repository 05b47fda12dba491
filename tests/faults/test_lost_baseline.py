"""A trainer whose base cannot be proved publishes the whole state, and all go on from it."""

from __future__ import annotations

import pytest

from deltastore.config import PublisherSettings
from deltastore.errors import NotFoundError, StorageError
from deltastore.events import BaselineLost
from deltastore.format.box import Box
from deltastore.format.layout import Layout
from deltastore.format.manifest import VersionKind
from deltastore.pipeline.host import HostSource
from deltastore.pipeline.protocols import SourceBox
from deltastore.pipeline.replicator import Region
from deltastore.pipeline.whole import read_source
from deltastore.repository.fetch import load_manifest
from deltastore.repository.run import open_run
from deltastore.storage.memory import MemoryStore
from deltastore.testing.faults import FaultyStore, LoseResponse, Op, fail_at
from tests.unit.pipeline.harness import ENTRIES, RUN, World, change_some, random_state


@pytest.fixture
def store():
    """The home bucket, on which faults can happen."""
    return FaultyStore(MemoryStore())


@pytest.fixture
def world(tmp_path, store):
    """A run with four versions, of which the third has lost its body."""
    made = World(tmp_path, home_store=store)
    publisher = made.publisher()
    for step in range(1, 4):
        made.step(publisher, step)
    publisher.close()
    store.delete([next(i.key for i in store.list(f"{RUN}/deltas/0000000003/"))])
    return made


def test_a_trainer_that_cannot_rebuild_its_base_publishes_it_whole(world):
    """LAW 4: after bodies are lost a restarted trainer commits a full version and goes on."""
    actor = world.actor()
    with pytest.raises(NotFoundError):
        actor.advance()
    change_some(world.state, world.rng)
    told = []
    publisher = world.publisher(step=4, on_bytes=lambda *moved: told.append(moved))
    core = publisher.head.core
    assert (core.version, core.kind) == (5, VersionKind.FULL)
    assert tuple(map(sum, zip(*told, strict=True))) == (core.delta_bytes, core.delta_bytes)
    assert [e.version for e in world.events if isinstance(e, BaselineLost)] == [4]
    delta = world.step(publisher, 5)
    publisher.close()
    assert delta.core.kind is VersionKind.DELTA
    assert world.replayed().equals(world.state)
    actor.follower.reset(actor.applier.active)
    assert actor.advance().version == 6
    assert actor.target.state.equals(world.state)


def test_a_full_version_reaches_the_regions(tmp_path):
    """Other regions get the full version's files, and rebuild the newest version alone."""
    far, home = MemoryStore(), MemoryStore()
    world = World(tmp_path, home_store=home, region_stores={"far": far})
    publisher = world.publisher()
    world.step(publisher, 1)
    publisher.close()
    open_run(far, RUN)
    regions = [Region("far", open_run(far, RUN))]
    catching_up = world.publisher(step=1, regions=regions)
    assert catching_up.wait_regions(30) == []
    catching_up.close()
    home.delete([next(i.key for i in home.list(f"{RUN}/deltas/0000000002/"))])
    publisher = world.publisher(step=2, regions=regions)
    world.step(publisher, 3)
    assert publisher.wait_regions(30) == []
    publisher.close()
    assert load_manifest(regions[0].run, 4).core.kind is VersionKind.FULL
    assert world.replayed(store=far).equals(world.state)


def test_a_baseline_lost_in_the_middle_of_a_run(tmp_path, store):
    """A baseline found damaged while the bucket is damaged too: the next version is full."""
    world = World(tmp_path, home_store=store)
    settings = PublisherSettings(baseline_check_every_versions=1)
    publisher = world.publisher(settings=settings)
    world.step(publisher, 1)
    publisher._worker.submit(int).result(60)  # behind the promotion
    store.delete([next(i.key for i in store.list(f"{RUN}/deltas/0000000002/"))])
    publisher._baseline._state.arrays[0][:1] ^= 1
    manifest = world.step(publisher, 2)
    assert manifest.core.kind is VersionKind.FULL
    assert world.step(publisher, 3).core.kind is VersionKind.DELTA
    publisher.close()
    assert world.replayed().equals(world.state)


@pytest.mark.parametrize("lost", [False, True])
def test_a_full_version_without_an_answer(world, store, lost):
    """CASE S1: a full manifest whose put was lost, or failed, is sent again byte for byte."""
    action = LoseResponse() if lost else None
    store.add(fail_at(Op.PUT, 1, action, key_contains="/versions/"))
    with pytest.raises(StorageError):
        world.publisher(step=3)
    publisher = world.publisher(step=3)
    assert publisher.head.core.version == (6 if lost else 5)
    world.step(publisher, 4)
    publisher.close()
    assert world.replayed().equals(world.state)


def test_a_store_that_does_not_answer_is_no_lost_baseline(world, store):
    """An outage at the start is raised: nobody sends 16 GB because of a timeout."""
    store.add(fail_at(Op.GET, 1, key_contains="/deltas/", times=100))
    with pytest.raises(StorageError):
        world.publisher(step=4)
    assert not [e for e in world.events if isinstance(e, BaselineLost)]


def test_whole_reading_of_a_source():
    """Flat and other boxes are put where they belong; what is left out is named."""
    state = random_state(Layout.build(ENTRIES), 3)

    class Boxed(HostSource):
        def boxes(self, layout):
            for part in super().boxes(layout):
                if part.tensor != 1:
                    yield part
                    continue
                for first in (0, 20):
                    box = Box((first, 0), (20 if first == 0 else 28, 32), flat=False)
                    offsets = box.offsets_of(None, (48, 32))
                    yield SourceBox(1, box, state.arrays[1][offsets])

    assert read_source(Boxed(state), state.layout).equals(state)

    class Short(HostSource):
        def boxes(self, layout):
            return (part for part in super().boxes(layout) if part.tensor != 2)

    with pytest.raises(Exception, match="bias"):
        read_source(Short(state), state.layout)
