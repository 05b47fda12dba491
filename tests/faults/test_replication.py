"""A region that is dead, slow or far behind delays nobody, and in the end holds the same chain."""

from __future__ import annotations

import hashlib
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltastore.clock import SystemClock
from deltastore.config import PublisherSettings
from deltastore.errors import Kind, StorageError
from deltastore.events import RegionCommitted, RegionFailed
from deltastore.pipeline.copying import copy_objects
from deltastore.pipeline.replicator import Region, RegionLimits, RegionReplicator
from deltastore.repository.fetch import load_manifest
from deltastore.repository.resolve import find_head
from deltastore.repository.run import open_run
from deltastore.storage.fs import FileStore
from deltastore.storage.memory import MemoryStore
from deltastore.storage.store import PutMode
from deltastore.storage.transfer import FetchItem
from deltastore.storage.wrapper import StoreWrapper
from deltastore.testing.faults import CountingStore, FaultyStore, Op, fail_at, unavailable
from tests.unit.pipeline.harness import RUN, World, change_some


class StalledStore(StoreWrapper):
    """A store whose puts hang until they are let go."""

    def __init__(self, inner):
        super().__init__(inner)
        self.go = threading.Event()
        self.hanging = threading.Event()

    def put(self, key, body, *, mode, sha256=None):
        """Hang, then put."""
        if not self.go.is_set():
            self.hanging.set()
            assert self.go.wait(60)
        return self.inner.put(key, body, mode=mode, sha256=sha256)


class SwitchedStore(StoreWrapper):
    """A store that can be switched off."""

    def __init__(self, inner):
        super().__init__(inner)
        self.off = False
        self.fault = unavailable
        self.tried = threading.Event()

    def put(self, key, body, *, mode, sha256=None):
        """A put, if it is on."""
        self._check()
        return self.inner.put(key, body, mode=mode, sha256=sha256)

    def get(self, key, byte_range=None):
        """A get, if it is on."""
        self._check()
        return self.inner.get(key, byte_range)

    def head(self, key):
        """A head, if it is on."""
        self._check()
        return self.inner.head(key)

    def _check(self):
        if self.off:
            self.tried.set()
            raise self.fault()


def _regions(**stores):
    return [Region(name, open_run(store, RUN)) for name, store in stores.items()]


def _world(tmp_path, **stores):
    return World(tmp_path, region_stores=stores)


def test_stalled_region_delays_neither_home_nor_the_others(tmp_path):
    """LAW 5: while every put to one region hangs, versions are committed and the others follow."""
    stalled, quick = StalledStore(MemoryStore()), MemoryStore()
    stalled.go.set()
    world = _world(tmp_path, stalled=stalled, quick=quick)
    stalled.go.clear()
    publisher = world.publisher(regions=_regions(stalled=stalled, quick=quick))
    for step in range(1, 6):
        world.step(publisher, step)
    assert stalled.hanging.wait(30)
    assert publisher._fanout._regions[1].wait_until(6, 30)
    assert publisher.wait_regions(0) == ["stalled"]
    assert world.digests(quick) == world.digests(world.home_store)
    stalled.go.set()
    assert publisher.wait_regions(30) == []
    publisher.close()
    assert world.digests(stalled) == world.digests(world.home_store)


@pytest.mark.parametrize("on_disk", [False, True])
def test_region_down_for_twenty_versions(tmp_path, on_disk):
    """A region that was down for 20 versions catches up by itself, in order, from its backlog."""
    far = SwitchedStore(MemoryStore())
    world = World(tmp_path / "w", region_stores={"far": far})
    folder = tmp_path / "spool"
    folder.mkdir()
    home = CountingStore(world.home_store)
    settings = PublisherSettings(
        spool_folder=str(folder) if on_disk else None,
        region_memory_bytes=8 << 10 if on_disk else 1 << 20,
    )
    world.clock = SystemClock()
    publisher = world.publisher(regions=_regions(far=far), settings=settings)
    assert publisher.wait_regions(30) == []
    far.off = True
    for step in range(1, 21):
        world.step(publisher, step)
    assert far.tried.wait(30)
    region = publisher._fanout._regions[0]
    assert region.backlog_bytes > 0
    region._backoff.succeeded()  # the wait of its next attempt is not what is tested
    far.off = False
    assert publisher.wait_regions(60) == []
    publisher.close()
    assert world.digests(far) == world.digests(world.home_store)
    committed = [e.version for e in world.events if isinstance(e, RegionCommitted)]
    assert committed == list(range(1, 22))
    assert home.traffic.received_bytes == 0
    assert any(isinstance(e, RegionFailed) for e in world.events)


@pytest.mark.parametrize(
    ("trouble", "deaf"),
    [
        (unavailable, lambda: StorageError("no space", kind=Kind.DISK_FULL)),
        (lambda: ZeroDivisionError("a fault of ours"), lambda: KeyError("a fault of the sink")),
    ],
)
def test_a_region_outlives_a_full_event_log_and_faults_of_ours(tmp_path, trouble, deaf):
    """A region whose trouble cannot be told, or is no error of ours, goes on when it can, and says
    so itself."""
    far = SwitchedStore(MemoryStore())
    far.fault = trouble
    world = World(tmp_path, region_stores={"far": far})
    untold = threading.Semaphore(0)

    def sink(event):
        if isinstance(event, RegionFailed):
            untold.release()
            raise deaf()

    limits = RegionLimits(streams=1)
    (region,) = _regions(far=far)
    copier = RegionReplicator(
        region, world.run, target=0, limits=limits, clock=SystemClock(), sink=sink
    )
    assert copier.wait_until(0, 30)
    far.off = True
    publisher = world.publisher()
    copier.committed(publisher.head)
    assert untold.acquire(timeout=30)
    far.off = False
    copier._backoff.succeeded()  # the wait of its next attempt is not what is tested
    assert copier.wait_until(1, 60)
    assert copier.error is None
    copier.close()
    publisher.close()


def test_each_byte_leaves_the_trainer_once_per_region(tmp_path):
    """A healthy region gets every body once, from the trainer, and home is not read for it."""
    home, far = CountingStore(MemoryStore()), CountingStore(MemoryStore())
    world = World(tmp_path, home_store=home, region_stores={"far": far})
    publisher = world.publisher(regions=_regions(far=far))
    assert publisher.wait_regions(30) == []
    before_home, before_far = home.traffic, far.traffic
    delta_bytes = 0
    for step in range(1, 5):
        delta_bytes += world.step(publisher, step).core.delta_bytes
        assert publisher.wait_regions(30) == []
    publisher.close()
    sent = far.traffic.sent_bytes - before_far.sent_bytes
    manifests = sum(
        info.size_bytes
        for info in far.list(f"{RUN}/")
        if "/versions/" in info.key or "/hints/" in info.key
    )
    assert delta_bytes <= sent <= delta_bytes + 2 * manifests
    bodies = {i.key for i in home.list(f"{RUN}/deltas/")}
    assert bodies == {i.key for i in far.list(f"{RUN}/deltas/")}
    assert home.traffic.received_bytes == before_home.received_bytes


def test_backlog_that_is_full_is_copied_from_home(tmp_path):
    """Bodies that a full backlog refused come from home: the region ends with the same chain."""
    far = SwitchedStore(MemoryStore())
    world = _world(tmp_path, far=far)
    settings = PublisherSettings(region_memory_bytes=2000)
    publisher = world.publisher(regions=_regions(far=far), settings=settings)
    far.off = True
    for step in range(1, 8):
        world.step(publisher, step)
    assert publisher._fanout._regions[0].backlog_bytes <= 2000
    far.off = False
    assert publisher.wait_regions(60) == []
    publisher.close()
    assert world.digests(far) == world.digests(world.home_store)


def test_region_catches_up_from_home_when_the_trainer_is_gone(tmp_path):
    """A replicator of another process, told only of HEAD, brings a region up from home alone."""
    far = MemoryStore()
    world = _world(tmp_path, far=far)
    publisher = world.publisher()
    for step in range(1, 21):
        world.step(publisher, step)
    publisher.close()
    replicator = _replicator(world, far, target=find_head(world.run))
    assert replicator.wait_until(21, 60)
    replicator.close()
    assert world.digests(far) == world.digests(world.home_store)
    assert world.replayed(store=far).equals(world.state)


def _replicator(world, store, *, target, **limits):
    return RegionReplicator(
        Region("far", open_run(store, RUN), streams=2),
        world.run,
        target=target,
        limits=RegionLimits(**limits),
        clock=world.clock,
        sink=world.events.append,
    )


def test_two_replicators_of_one_region(tmp_path):
    """The trainer and a worker that copy to one region at once do no harm and both end."""
    far = MemoryStore()
    world = _world(tmp_path, far=far)
    publisher = world.publisher(regions=_regions(far=far))
    for step in range(1, 11):
        world.step(publisher, step)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: _replicator(world, far, target=11), range(2)))
    for replicator in both:
        assert replicator.wait_until(11, 60)
        replicator.close()
    assert publisher.wait_regions(30) == []
    publisher.close()
    assert world.digests(far) == world.digests(world.home_store)


def test_patient_replicator_leaves_the_work_to_the_trainer(tmp_path):
    """A worker with patience finds that the trainer brought the version, and reads nothing."""
    far, home = MemoryStore(), CountingStore(MemoryStore())
    world = World(tmp_path, home_store=home, region_stores={"far": far})
    publisher = world.publisher(regions=_regions(far=far))
    world.step(publisher, 1)
    assert publisher.wait_regions(30) == []
    publisher.close()
    counted = CountingStore(far)
    replicator = _replicator(world, counted, target=2, patience_s=30.0)
    assert replicator.wait_until(2, 30)
    replicator.close()
    assert Op.PUT not in counted.traffic.requests


def test_trainer_dies_between_a_regions_bodies_and_homes_manifest(tmp_path):
    """Bodies that a region holds of a version that never came to be are orphans, and do no harm."""
    far, home = MemoryStore(), FaultyStore(MemoryStore())
    world = World(tmp_path, home_store=home, region_stores={"far": far})
    publisher = world.publisher(regions=_regions(far=far))
    assert publisher.wait_regions(30) == []
    home.add(fail_at(Op.PUT, 1, key_contains="/versions/", times=1000))
    change_some(world.state, world.rng)
    publication = publisher.publish(1)
    with pytest.raises(StorageError):
        publication.result(60)
    publisher.close()
    home.clear()
    assert find_head(open_run(far, RUN)) == 1
    successor = world.publisher(step=1, regions=_regions(far=far))
    world.step(successor, 2)
    assert successor.wait_regions(30) == []
    successor.close()
    assert world.replayed(store=far).equals(world.state)
    manifests = [load_manifest(open_run(far, RUN), v) for v in range(4)]
    named = {ref.key for m in manifests for ref in m.core.segments}
    assert named <= {info.key for info in far.list(f"{RUN}/deltas/")}


def test_large_file_streams_through(tmp_path, monkeypatch):
    """A file above the limit goes through a nameless file, in ranges: memory stays small."""
    monkeypatch.setattr("deltastore.pipeline.copying.IN_MEMORY_BYTES", 1 << 20)
    monkeypatch.setattr("deltastore.pipeline.copying.RANGE_BYTES", 1 << 18)
    source, target = FileStore(tmp_path / "a"), FileStore(tmp_path / "b")
    body = bytes(range(256)) * (16 << 12)  # 16 MiB
    source.put("k", body, mode=PutMode.CREATE)
    item = FetchItem("k", len(body), hashlib.sha256(body).hexdigest())
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        assert copy_objects(source, target, [item], streams=2, folder=tmp_path) == len(body)
        peak_bytes = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert target.get("k") == body
    assert peak_bytes < 4 << 20
    assert copy_objects(source, target, [item], streams=2) == 0


def test_large_file_that_is_not_what_it_should_be(tmp_path, monkeypatch):
    """A large file with another digest, or cut short, is not put into the other region."""
    monkeypatch.setattr("deltastore.pipeline.copying.IN_MEMORY_BYTES", 16)
    source, target = MemoryStore(), MemoryStore()
    source.put("k", bytes(100), mode=PutMode.CREATE)
    for item in (FetchItem("k", 100, "0" * 64), FetchItem("k", 101, "0" * 64)):
        with pytest.raises(Exception, match="manifest") as err:
            copy_objects(source, target, [item], streams=2)
        assert err.value.kind is Kind.DIGEST
    assert list(target.list("")) == []


def test_confirmed_bodies_are_looked_for_again_after_a_while(tmp_path):
    """Bodies that arrived long before the commit and were taken as orphans are brought again."""
    far = MemoryStore()
    world = _world(tmp_path, far=far)
    publisher = world.publisher()
    world.step(publisher, 1)
    publisher.close()
    manifest = load_manifest(world.run, 2)
    replicator = _replicator(world, far, target=1, confirmed_max_s=10.0)
    assert replicator.wait_until(1, 30)
    for ref in manifest.core.segments:
        replicator.offer(2, ref, world.home_store.get(ref.key))
    assert replicator._backlog.wait_sent(2, 30)
    far.delete([ref.key for ref in manifest.core.segments])
    world.clock.advance_s(11.0)
    replicator.committed(manifest)
    assert replicator.wait_until(2, 30)
    replicator.close()
    assert world.digests(far) == world.digests(world.home_store)


class NotingStore(StoreWrapper):
    """Notes the digests that come with bodies."""

    def __init__(self, inner):
        super().__init__(inner)
        self.digests = {}

    def put(self, key, body, *, mode, sha256=None):
        """A noted put."""
        self.digests[key] = sha256
        return super().put(key, body, mode=mode, sha256=sha256)


def test_digests_travel_with_segments(tmp_path):
    """Who hashed a segment for its key says so to home and to a region, even one that gets it much
    later: no store hashes it again to sign it."""
    line = SwitchedStore(MemoryStore())
    home, far = NotingStore(MemoryStore()), NotingStore(line)
    world = World(tmp_path, home, {"far": far}, SystemClock())
    publisher = world.publisher(regions=_regions(far=far))
    assert publisher.wait_regions(30) == []
    line.off = True
    for step in range(1, 6):
        world.step(publisher, step)
    assert line.tried.wait(30)
    publisher._fanout._regions[0]._backoff.succeeded()  # the wait itself is not what is tested
    line.off = False
    assert publisher.wait_regions(60) == []
    publisher.close()
    for store in (home, far):
        segments = {key: known for key, known in store.digests.items() if "/deltas/" in key}
        assert len(segments) >= 5
        for key, known in segments.items():
            assert known == hashlib.sha256(home.get(key)).hexdigest()
