"""Whatever fails between a trainer's weights and an actor's, the actor is right, or where it was"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from deltastore.config import FollowerSettings
from deltastore.errors import (
    ApplyError,
    DeltastoreError,
    IntegrityError,
    InvalidInputError,
    Kind,
    LeaseError,
    NotFoundError,
    StorageError,
)
from deltastore.events import PublishFailed, RegionCommitted, RegionFailed
from deltastore.format.canonical import canonical_json
from deltastore.format.manifest import FileRef, VersionKind, VersionManifest
from deltastore.format.mixing import fingerprint_state
from deltastore.pipeline.applier import Applier
from deltastore.pipeline.host import HostSource, HostTarget
from deltastore.pipeline.publisher import Publisher
from deltastore.pipeline.replicator import Region
from deltastore.repository.commit import commit_version
from deltastore.repository.fetch import load_manifest
from deltastore.repository.resolve import find_head
from deltastore.repository.run import open_run
from deltastore.storage.memory import MemoryStore
from deltastore.storage.store import PutMode
from deltastore.testing.faults import (
    Corrupt,
    Fail,
    FaultyStore,
    LoseResponse,
    Op,
    Truncate,
    fail_at,
    unavailable,
)
from tests.unit.pipeline.harness import RUN, World, change_some, random_state, write_files


@pytest.fixture
def store():
    """The home bucket, on which faults can happen."""
    return FaultyStore(MemoryStore())


@pytest.fixture
def world(tmp_path, store):
    """A run at version 0."""
    return World(tmp_path, home_store=store)


def _fails(publisher, world, step):
    change_some(world.state, world.rng)
    with pytest.raises(StorageError):
        publisher.publish(step).result(60)


@pytest.mark.parametrize("part", ["/deltas/", "/versions/"])
def test_failed_upload_travels_with_the_next_version(world, store, part):
    """CASE R1: after a failed body or manifest upload of v5 the actor still equals the trainer."""
    publisher, actor = world.publisher(), world.actor()
    for step in range(1, 4):
        world.step(publisher, step)
    store.add(fail_at(Op.PUT, 1, key_contains=part))
    _fails(publisher, world, 4)
    assert actor.advance().version == 4
    world.step(publisher, 5)
    actor.advance()
    publisher.close()
    assert actor.target.state.equals(world.state)
    assert any(isinstance(e, PublishFailed) for e in world.events)


def test_manifest_with_a_lost_answer_is_sent_again(world, store):
    """CASE R1, S1: a manifest that landed unanswered is the same bytes when it is sent again."""
    publisher = world.publisher()
    store.add(fail_at(Op.PUT, 1, LoseResponse(), key_contains="/versions/"))
    _fails(publisher, world, 1)
    landed = store.get(world.run.keys.version(2))
    actor = world.actor()
    assert actor.advance().version == 2
    world.step(publisher, 2)
    publisher.close()
    assert store.get(world.run.keys.version(2)) == landed
    assert actor.advance().version == 3
    assert actor.target.state.equals(world.state)
    steps = [load_manifest(world.run, version).core for version in (2, 3)]
    assert [(core.step_first, core.step_last) for core in steps] == [(1, 1), (2, 2)]


def test_failure_that_cannot_be_told_is_still_the_result(world, store):
    """With the event log's disk full, whoever waits for a failed version is not left waiting."""
    full = StorageError("no space", kind=Kind.DISK_FULL)

    def sink(event):
        if isinstance(event, PublishFailed):
            raise full

    publisher = Publisher.open(world.run, HostSource(world.state), clock=world.clock, sink=sink)
    store.add(fail_at(Op.PUT, 1, key_contains="/versions/"))
    change_some(world.state, world.rng)
    with pytest.raises(StorageError) as err:
        publisher.publish(1).result(60)
    assert err.value.kind is Kind.UNAVAILABLE
    world.step(publisher, 2)
    publisher.close()
    assert world.replayed().equals(world.state)


def test_manifest_that_never_landed_is_sent_again_byte_for_byte(world, store):
    """CASE R1: an unanswered manifest that did not land becomes that very version later."""
    publisher = world.publisher()
    store.add(fail_at(Op.PUT, 1, key_contains="/versions/"))
    change_some(world.state, world.rng)
    middle = world.state.copy()
    with pytest.raises(StorageError):
        publisher.publish(1).result(60)
    world.step(publisher, 2)
    publisher.close()
    assert world.replayed(2).equals(middle)
    assert world.replayed(3).equals(world.state)


def test_rival_version_while_unanswered(world, store):
    """CASE C7: a rival that took the number meanwhile stops the trainer and is not overwritten."""
    publisher = world.publisher()
    store.add(fail_at(Op.PUT, 1, key_contains="/versions/"))
    _fails(publisher, world, 1)
    rival = world.publisher(step=1)
    with pytest.raises(LeaseError):
        publisher.publish(2).result(60)
    publisher.close()
    rival.close()
    assert world.replayed().equals(world.state)


@pytest.mark.parametrize("nth", range(1, 7))
def test_every_put_of_a_creation_may_fail(tmp_path, nth):
    """A creation cut at any put is finished by running it again, and nothing is half-written."""
    store = FaultyStore(MemoryStore(), [fail_at(Op.PUT, nth)])
    try:
        World(tmp_path / "a", home_store=store)
    except StorageError:
        world = World(tmp_path / "b", home_store=store)
        assert world.replayed(0).equals(world.state)
    else:
        assert not store.fired


@pytest.mark.parametrize("times", [1, 2, 3])
def test_every_put_of_a_version_may_fail(tmp_path, times):
    """Faults at every put of a version in turn: the next success carries everything."""
    for nth in range(1, 4):
        store = FaultyStore(MemoryStore())
        world = World(tmp_path / f"{nth}", home_store=store)
        publisher, actor = world.publisher(), world.actor()
        store.add(fail_at(Op.PUT, nth, times=times))
        for step in range(1, 6):
            change_some(world.state, world.rng)
            publication = publisher.publish(step)
            try:
                publication.result(60)
            except StorageError:
                continue
        world.step(publisher, 6)
        publisher.close()
        actor.advance()
        assert actor.target.state.equals(world.state)


# --- the bucket is damaged


def _segment_key(world, version):
    return next(i.key for i in world.home_store.list(f"{RUN}/deltas/{version:010d}/"))


def _published(world, versions=3):
    publisher = world.publisher()
    for step in range(1, versions + 1):
        world.step(publisher, step)
    publisher.close()


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "swap"])
def test_damaged_segment_changes_nothing(world, store, damage):
    """A truncated, corrupt, absent or exchanged segment is a typed error; zero bytes applied."""
    _published(world)
    key = _segment_key(world, 2)
    body = store.get(key)
    if damage == "delete":
        store.delete([key])
    else:
        bad = {
            "truncate": body[:-1],
            "flip": bytes([body[0] ^ 1]) + body[1:],
            "swap": store.get(_segment_key(world, 3)),
        }[damage]
        store.put(key, bad, mode=PutMode.OVERWRITE)
    actor = world.actor()
    with pytest.raises((IntegrityError, NotFoundError)):
        actor.advance()
    update = actor.follower.take()
    assert update is not None
    assert update.target.version == 1
    assert actor.target.state.equals(world.zero)
    with pytest.raises((IntegrityError, NotFoundError)):
        world.replayed()
    store.put(key, body, mode=PutMode.OVERWRITE)
    actor.follower.reset(actor.applier.active)
    actor.advance()
    assert actor.target.state.equals(world.state)


def test_bad_bytes_once_are_fetched_again(world, store):
    """A read that lied once is repeated: the second reading is right and staging goes on."""
    _published(world)
    store.add(fail_at(Op.GET, 1, Corrupt(5), key_contains="/deltas/"))
    store.add(fail_at(Op.GET, 3, Truncate(3), key_contains="/deltas/"))
    actor = world.actor()
    actor.advance()
    assert actor.target.state.equals(world.state)


def test_missing_link_is_a_typed_gap(world, store):
    """CASE R3: v1..v9 deleted: a cold actor gets a typed chain gap and applies nothing."""
    _published(world, 10)
    store.delete([world.run.keys.version(v) for v in range(1, 10)])
    with pytest.raises(NotFoundError) as err:
        world.replayed(11)
    assert (err.value.kind, err.value.version) == (Kind.VERSION_MISSING, 9)
    assert "version 9 is missing below 10" in err.value.message
    with pytest.raises(IntegrityError) as hole:
        world.replayed()
    assert hole.value.kind is Kind.BROKEN_CHAIN


def test_hole_is_noticed_by_a_follower_that_has_seen_beyond(world, store):
    """A version that vanishes below one already seen is an error, not the end of the chain."""
    _published(world, 3)
    actor = world.actor()
    actor.advance()
    actor.follower.reset(type(actor.applier.active)(0, *_zero_point(world)))
    store.delete([world.run.keys.version(1)])
    with pytest.raises(IntegrityError) as err:
        actor.follower.poll()
    assert err.value.kind is Kind.BROKEN_CHAIN


def _zero_point(world):
    manifest = VersionManifest.from_bytes(world.home_store.get(world.run.keys.version(0)))
    core = manifest.core
    return manifest.policy_hash, core.fingerprint_after, core.generation


def test_trainer_refuses_a_chain_with_a_hole(world, store):
    """CASE C3: a trainer that resumes above an interior hole is told which version is missing."""
    _published(world, 4)
    store.delete([world.run.keys.version(3)])
    with pytest.raises(IntegrityError) as err:
        world.publisher()
    assert (err.value.kind, err.value.version) == (Kind.BROKEN_CHAIN, 3)


@pytest.mark.parametrize("refused", [unavailable, lambda: InvalidInputError("a", kind=Kind.NAME)])
def test_a_hint_that_cannot_be_written_fails_no_version(tmp_path, refused):
    """A version that is committed was published, and copied, whatever becomes of its hint."""
    far = MemoryStore()
    broken = [FaultyStore(MemoryStore()), FaultyStore(far)]
    made = World(tmp_path, home_store=broken[0], region_stores={"far": broken[1]})
    regions = [Region("far", open_run(broken[1], RUN))]
    publisher = made.publisher(regions=regions)
    for store in broken:
        hints = f"{RUN}/hints/head"
        store.add(fail_at(Op.PUT, 1, Fail(refused), key_contains=hints, times=1000))
    assert made.step(publisher, 1).core.version == 2
    assert publisher.wait_regions(60) == []
    publisher.close()
    assert find_head(open_run(far, RUN)) == 2
    assert [e.region for e in made.events if isinstance(e, RegionFailed)] == ["home"]


def test_stale_and_garbage_hints_decide_nothing(world, store):
    """A head hint that is ahead, behind or garbage changes neither HEAD nor what is applied."""
    _published(world)
    key = f"{RUN}/hints/head"
    for text in (b"", b"\xff\x00", b'{"version":99}', b'{"version":0}', b'{"version":"x"}'):
        store.put(key, text, mode=PutMode.OVERWRITE)
        assert world.replayed().equals(world.state)
    publisher = world.publisher(step=4)
    assert publisher.head.core.version == 5
    publisher.close()


# --- activation


class Breaks(HostTarget):
    """A target whose nth scatter writes half of its elements and raises, `times` times."""

    def __init__(self, state, nth, times=1):
        super().__init__(state)
        self.calls, self.nth, self.times = 0, nth, times

    def scatter(self, tensor, box, indices, bits):
        """Write, or write half and raise."""
        self.calls += 1
        if self.nth <= self.calls < self.nth + self.times:
            half = bits.size // 2
            if indices is not None:
                super().scatter(tensor, box, indices[:half], bits[:half])
            raise RuntimeError("the device fell over")
        super().scatter(tensor, box, indices, bits)


def _staged(world, versions=3):
    _published(world, versions)
    actor = world.actor()
    actor.follower.catch_up()
    return actor, actor.follower.take()


def test_failure_at_every_tensor_rolls_back(world):
    """CASE R2: raising in the middle of tensor k of n, for every k: the state is base or target."""
    _actor, update = _staged(world)
    blocks = len(update.blocks)
    assert blocks >= 3
    for nth in range(1, blocks + 1):
        target = Breaks(world.zero.copy(), nth)
        applier = Applier(target, update.base, name="a", clock=world.clock)
        with pytest.raises(ApplyError) as err:
            applier.activate(update)
        assert err.value.kind is Kind.ROLLED_BACK
        assert target.state.equals(world.zero)
        assert applier.active == update.base
        assert not applier.poisoned
        applier.activate(update)
        assert target.state.equals(world.state)


def test_failed_rollback_poisons(world):
    """CASE R2, LAW 3: an actor that cannot undo is poisoned and refuses further activations."""
    _, update = _staged(world)
    target = Breaks(world.zero.copy(), 2, times=1000)
    applier = Applier(target, update.base, name="a", clock=world.clock)
    with pytest.raises(ApplyError) as err:
        applier.activate(update)
    assert err.value.kind is Kind.POISONED
    assert applier.poisoned
    assert applier.active == update.base
    with pytest.raises(ApplyError) as again:
        applier.activate(update)
    assert again.value.kind is Kind.POISONED


def test_drifted_weights_are_found_before_anything_is_written(world):
    """Live weights that are not the base's are found in pass 1: nothing is written."""
    _, update = _staged(world)
    block = update.blocks[0]
    drifted = world.zero.copy()
    drifted.arrays[block.tensor][block.box.start[0] + int(block.indices[0])] ^= 1
    before = drifted.copy()
    applier = Applier(HostTarget(drifted), update.base, name="a", clock=world.clock)
    with pytest.raises(ApplyError, match="nothing was written"):
        applier.activate(update)
    assert drifted.equals(before)
    with pytest.raises(IntegrityError):
        applier.check_whole()
    assert applier.poisoned


def test_update_of_another_base_is_refused(world):
    """An update that does not start at the active version is refused; the engine serves on."""
    _, update = _staged(world)
    state = random_state(world.layout, 9)
    applier = Applier(HostTarget(state), update.target, name="a", clock=world.clock)
    with pytest.raises(ApplyError) as err:
        applier.activate(update)
    assert err.value.kind is Kind.ROLLED_BACK
    assert not applier.poisoned


def test_whole_check_every_so_often(world):
    """Every `full_check_every_versions` activations the whole state is proved."""
    _, update = _staged(world)
    state = world.zero.copy()
    applier = Applier(
        HostTarget(state),
        update.base,
        name="a",
        clock=world.clock,
        settings=FollowerSettings(full_check_every_versions=1),
    )
    untouched = world.layout.position("scale")
    state.arrays[untouched] = state.arrays[untouched] ^ 1
    if any(block.tensor == untouched for block in update.blocks):
        pytest.fail("the case needs a tensor that no version changes")
    with pytest.raises(IntegrityError):
        applier.activate(update)
    assert applier.poisoned


# --- regions


def _two_regions(tmp_path, relay):
    world = World(tmp_path, region_stores={"far": relay})
    return world, [Region("far", open_run(relay, RUN))]


def test_region_receives_every_version(tmp_path):
    """Another region ends with the same manifests and bodies as home, and replays alone."""
    relay = MemoryStore()
    world, regions = _two_regions(tmp_path, relay)
    publisher = world.publisher(regions=regions)
    for step in range(1, 5):
        world.step(publisher, step)
    assert publisher.wait_regions(30) == []
    publisher.close()
    assert world.digests(relay) == world.digests(world.home_store)
    assert world.replayed(store=relay).equals(world.state)


def test_dead_region_delays_nobody_and_catches_up(tmp_path):
    """LAW 5: a region that fails for a while delays no version and later holds the same chain."""
    relay = FaultyStore(MemoryStore())
    world, regions = _two_regions(tmp_path, relay)
    publisher = world.publisher(regions=regions)
    relay.add(fail_at(Op.PUT, 1, times=7))
    for step in range(1, 5):
        world.step(publisher, step)
    assert publisher.wait_regions(30) == []
    publisher.close()
    assert world.replayed(store=relay).equals(world.state)
    assert any(isinstance(e, RegionFailed) for e in world.events)
    committed = [e.version for e in world.events if isinstance(e, RegionCommitted)]
    assert committed == sorted(committed)


def test_region_never_names_an_absent_object(tmp_path):
    """Whichever put fails in a region, each manifest there names only objects that are there."""
    for nth in range(1, 8):
        relay = FaultyStore(MemoryStore())
        world, regions = _two_regions(tmp_path / str(nth), relay)
        publisher = world.publisher(regions=regions)
        relay.add(fail_at(Op.PUT, nth))
        world.step(publisher, 1)
        world.step(publisher, 2)
        publisher.wait_regions(30)
        publisher.close()
        for info in relay.list(f"{RUN}/versions/"):
            manifest = VersionManifest.from_bytes(relay.get(info.key))
            for ref in manifest.core.segments:
                assert relay.head(ref.key).size_bytes == ref.size_bytes


def test_every_error_names_its_way_out(world, store):
    """Errors met by a user of a damaged run carry a kind, and say where."""
    _published(world)
    store.delete([_segment_key(world, 2)])
    with pytest.raises(DeltastoreError) as err:
        world.replayed()
    assert err.value.kind
    assert err.value.key


def _full_version(world, version):
    """Commit the trainer's present state as a full version, as a repair would."""
    run = world.run
    head = VersionManifest.from_bytes(world.home_store.get(run.keys.version(version - 1)))
    refs = []
    for file in write_files(world.state, world.folder / f"full{version}"):
        body = file.path.read_bytes()
        key = run.keys.anchor_file(version, "attempt", file.name)
        world.home_store.put(key, body, mode=PutMode.CREATE)
        refs.append(FileRef(file.name, key, len(body), hashlib.sha256(body).hexdigest()))
    core = replace(
        head.core,
        version=version,
        kind=VersionKind.FULL,
        base_version=head.core.version,
        base_policy_hash=head.policy_hash,
        segments=(),
        files=tuple(refs),
        nnz=0,
        fingerprint_before=head.core.fingerprint_after,
        fingerprint_after=fingerprint_state(world.state),
    )
    commit_version(run, VersionManifest(core))


def test_full_version_leads_around_a_damaged_one(world, store):
    """A follower stuck below an unreadable delta re-anchors at the next full version by itself."""
    _published(world, 3)
    actor = world.actor()
    store.delete([_segment_key(world, 3)])
    with pytest.raises(NotFoundError):
        actor.advance()
    change_some(world.state, world.rng)
    _full_version(world, 5)
    publisher = world.publisher(step=6)
    world.step(publisher, 7)
    publisher.close()
    assert actor.advance().version == 7
    assert actor.target.state.equals(world.state)
    assert world.replayed().equals(world.state)


def test_lower_generation_is_refused(world):
    """A version written by a trainer of an earlier generation than its base is not followed."""
    _published(world, 1)
    head = VersionManifest.from_bytes(world.home_store.get(world.run.keys.version(2)))
    core = replace(
        head.core,
        version=3,
        base_version=2,
        base_policy_hash=head.policy_hash,
        segments=(),
        nnz=0,
        fingerprint_before=head.core.fingerprint_after,
        generation=1,
    )
    commit_version(world.run, VersionManifest(core))
    with pytest.raises(IntegrityError) as err:
        world.actor().advance()
    assert err.value.kind is Kind.GENERATION


def test_hints_and_strays_beyond_all_numbers(world, store):
    """A hint or a stray object of an impossible or far number neither crashes nor hangs anybody."""
    _published(world, 2)
    for version in (10**12, 9_999_999_999, -1):
        text = canonical_json({"version": version, "policy_hash": "0" * 64})
        store.put(f"{RUN}/hints/head", text, mode=PutMode.OVERWRITE)
        assert world.replayed().equals(world.state)
    store.put(world.run.keys.version(9_999_999_999), b"stray", mode=PutMode.CREATE)
    with pytest.raises(IntegrityError) as err:
        world.replayed()
    assert (err.value.kind, err.value.version) == (Kind.BROKEN_CHAIN, 4)


def test_shortened_checkpoint_file_is_a_digest_error(tmp_path):
    """A file of version 0 that lost its end is an IntegrityError, whatever its size."""
    for chunk_bytes in (1 << 20, 1024):
        world = World(tmp_path / str(chunk_bytes))
        key = next(i.key for i in world.home_store.list(f"{RUN}/anchors/") if "model" in i.key)
        body = world.home_store.get(key)
        world.home_store.put(key, body[:-1], mode=PutMode.OVERWRITE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("deltastore.repository.full.CHUNK_BYTES", chunk_bytes)
            with pytest.raises(IntegrityError) as err:
                world.replayed(0)
        assert err.value.kind is Kind.DIGEST
