"""What the trainer has at a version is what every actor has at it, bit for bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from deltastore.config import FollowerSettings, OnBacklog, PublisherSettings
from deltastore.errors import InvalidInputError, Kind, LeaseError, NotFoundError
from deltastore.events import VersionActivated, VersionPublished, VersionStaged
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.mixing import fingerprint_state
from deltastore.pipeline.applier import Applier
from deltastore.pipeline.compare import differing_tensors
from deltastore.pipeline.follower import Follower
from deltastore.pipeline.history import locate
from deltastore.pipeline.host import HostSource, HostTarget
from deltastore.pipeline.protocols import SourceBox
from deltastore.pipeline.publisher import Publisher
from deltastore.pipeline.staged import join_updates
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion
from deltastore.repository.resolve import find_head
from deltastore.storage.memory import MemoryStore
from deltastore.testing.faults import CountingStore, Op
from tests.unit.pipeline.harness import World, change_some


@pytest.fixture
def world(tmp_path):
    """A run at version 0 on stores in memory."""
    return World(tmp_path)


def test_actor_follows_bit_for_bit(world):
    """After each of several versions the actor equals the trainer in every bit of every dtype."""
    publisher, actor = world.publisher(), world.actor()
    for step in range(1, 6):
        manifest = world.step(publisher, step)
        active = actor.advance()
        assert (active.version, active.policy_hash) == (step + 1, manifest.policy_hash)
        assert actor.target.state.equals(world.state)
        assert actor.target.fingerprint() == manifest.core.fingerprint_after
    publisher.close()


def test_many_versions_activate_as_one(world):
    """An actor that was away activates the composition of all it missed, in one pause."""
    publisher, actor = world.publisher(), world.actor()
    for step in range(1, 8):
        world.step(publisher, step)
    actor.advance()
    publisher.close()
    assert actor.target.state.equals(world.state)
    activations = [e for e in world.events if isinstance(e, VersionActivated)]
    assert [(e.base_version, e.version) for e in activations] == [(0, 8)]
    assert len([e for e in world.events if isinstance(e, VersionStaged)]) == 8


def test_a_follower_stages_no_more_than_it_may(tmp_path):
    """What is staged beyond `stage_max_bytes` ends the staging, without a request, until it is
    taken: an engine that does not activate for long fills no memory."""
    store = CountingStore(MemoryStore())
    world = World(tmp_path, home_store=store)
    publisher = world.publisher()
    for step in range(1, 12):
        world.step(publisher, step)
    publisher.close()
    settings = FollowerSettings(stage_max_bytes=1 << 10)
    active = ActiveVersion.of(load_manifest(world.run, 0))
    follower = Follower(world.run, active, name="a", clock=world.clock, settings=settings)
    applier = Applier(HostTarget(world.zero.copy()), active, name="a", clock=world.clock)
    taken = 0
    while applier.active.version < 12:
        follower.catch_up()
        before = store.traffic.total_requests
        assert not follower.poll()
        if follower.tip.version < 12:
            assert store.traffic.total_requests == before
        update = follower.take()
        assert update is not None
        assert update.versions <= 4  # each has some 500 bytes
        applier.activate(update)
        taken += 1
    assert taken >= 3
    assert applier._target.state.equals(world.state)


def test_a_safe_point_does_not_wait_for_composing(world, monkeypatch):
    """What is staged can be taken while the next version is composed with it; that version is then
    staged alone, and both together are the trainer's state."""
    publisher, actor = world.publisher(), world.actor()
    follower, taken = actor.follower, []

    def taken_meanwhile(*updates):
        with ThreadPoolExecutor(1) as pool:
            taken.append(pool.submit(follower.take).result(30))
        return join_updates(*updates)

    monkeypatch.setattr("deltastore.pipeline.follower.join_updates", taken_meanwhile)
    world.step(publisher, 1)
    publisher.close()
    while follower.poll():
        pass
    taken.append(follower.take())
    assert [update.target.version for update in taken] == [1, 2]
    for update in taken:
        actor.applier.activate(update)
    assert actor.target.state.equals(world.state)


def test_empty_version(world):
    """CASE R12: a step that changes nothing is a valid version without segments."""
    publisher = world.publisher()
    manifest = publisher.publish(1).result(60)
    publisher.close()
    assert (manifest.core.nnz, manifest.core.segments) == (0, ())
    assert world.actor().advance().version == manifest.core.version
    assert world.replayed().equals(world.state)


def test_publish_every_fourth_step(world):
    """CASE R11: publishing every 4 steps carries all that changed since the last publish."""
    publisher = world.publisher()
    for step in range(1, 9):
        change_some(world.state, world.rng)
        if step % 4 == 0:
            publisher.publish(step).result(60)
    publisher.close()
    core = publisher.head.core
    assert (core.step_first, core.step_last) == (5, 8)
    assert world.replayed().equals(world.state)


def test_replay_any_version(world):
    """The bucket alone rebuilds every version, not only the newest."""
    publisher = world.publisher()
    states = {0: world.zero, 1: world.zero}
    for step in range(1, 5):
        version = world.step(publisher, step).core.version
        states[version] = world.state.copy()
    publisher.close()
    for version, state in states.items():
        assert world.replayed(version).equals(state)


def test_replay_of_a_version_that_is_not_there(world):
    """Asking for a version above HEAD names it."""
    with pytest.raises(NotFoundError) as err:
        world.replayed(7)
    assert (err.value.kind, err.value.version) == (Kind.VERSION_MISSING, 7)


def test_restarted_trainer_continues_the_chain(world):
    """CASE R3, C4: a trainer with empty local state reads the remote HEAD and goes on above it."""
    first = world.publisher()
    for step in range(1, 4):
        world.step(first, step)
    first.close()
    generation = first.head.core.generation
    second = world.publisher(step=2)
    assert second.head.core.version == first.head.core.version + 1
    assert second.head.core.generation == generation + 1
    world.step(second, 3)
    second.close()
    assert world.replayed().equals(world.state)
    assert find_head(world.run) == second.head.core.version


def test_two_trainers_one_wins(world):
    """CASE C7: the trainer that was there first meets the newcomer's fence and stops for good."""
    first = world.publisher()
    world.step(first, 1)
    second = world.publisher(step=1)
    change_some(world.state, world.rng)
    publication = first.publish(2)
    with pytest.raises(LeaseError) as err:
        publication.result(60)
    assert err.value.kind is Kind.FOREIGN_WRITER
    with pytest.raises(LeaseError):
        first.publish(3)
    world.step(second, 2)
    first.close()
    second.close()
    assert world.replayed().equals(world.state)


def test_foreign_history_is_refused(world, tmp_path):
    """CASE R3: an actor of one history refuses the next version of another run of that name."""
    publisher, actor = world.publisher(), world.actor()
    world.step(publisher, 1)
    actor.advance()
    publisher.close()
    other = World(tmp_path / "other")
    rival = other.publisher()
    for step in range(1, 4):
        other.step(rival, step)
    rival.close()
    key = world.run.keys.version(3)
    world.home_store.put(key, other.home_store.get(key), mode=_create())
    before = actor.target.state.copy()
    with pytest.raises(Exception, match="run") as err:
        actor.advance()
    assert err.value.kind is Kind.BROKEN_CHAIN
    assert actor.target.state.equals(before)


def _create():
    from deltastore.storage.store import PutMode

    return PutMode.CREATE


def test_skip_while_pending(world):
    """While a version is on its way `publish` skips, and the next version covers both steps."""
    gate = _GatedSource(world.state)
    publisher = Publisher.open(world.run, gate, clock=world.clock)
    gate.closed.clear()
    gate.opened.clear()
    pending = publisher.publish(1)
    gate.closed.wait(60)
    assert publisher.publish(2) is None
    gate.opened.set()
    pending.result(60)
    assert publisher.publish(3).result(60).core.step_first == 2
    publisher.close()


def test_wait_for_pending(world):
    """With on_backlog = wait a second publish waits for the first instead of skipping."""
    publisher = world.publisher(settings=PublisherSettings(on_backlog=OnBacklog.WAIT))
    change_some(world.state, world.rng)
    first = publisher.publish(1)
    second = publisher.publish(2)
    assert second is not None
    assert second.result(60).core.version == first.result(60).core.version + 1
    publisher.close()


def test_captured_before_committed(world):
    """`wait_captured` returns once the source has been read, and reports a failed read."""
    publisher = world.publisher()
    publication = publisher.publish(1)
    publication.wait_captured(60)
    publication.result(60)
    assert publication.done()
    publisher.close()


def test_idle_poll_costs_one_request(world):
    """A poll with nothing new is a single request for a computed key."""
    store = CountingStore(world.home_store)
    actor = world.actor(store)
    actor.advance()
    before = store.traffic.total_requests
    assert actor.follower.poll() is False
    assert store.traffic.total_requests == before + 1
    assert Op.LIST not in store.traffic.requests


def test_new_version_of_another_process_is_seen_at_once(world):
    """CASE S8: another process's version is seen at the next poll; negatives are not kept."""
    actor = world.actor()
    assert actor.follower.poll() is False
    publisher = world.publisher()
    publisher.close()
    assert actor.follower.poll() is True


def test_source_of_other_names_is_refused(world):
    """CASE R9: a source with a missing and an unknown tensor is refused with both names."""
    layout = Layout.build(
        TensorEntry(s.name.replace("bias", "offset"), s.dtype, s.shape)
        for s in world.layout.tensors
    )
    with pytest.raises(InvalidInputError) as err:
        Publisher.open(world.run, HostSource(BitState.zeros(layout)), clock=world.clock)
    assert err.value.kind is Kind.TENSOR_NAMES
    assert "layers.0.bias" in str(err.value)
    assert "layers.0.offset" in str(err.value)
    assert find_head(world.run) == 0


def test_source_that_covers_half_is_refused(world):
    """A source that leaves out part of a tensor is refused by name and commits nothing."""

    class Half(HostSource):
        def boxes(self, layout):
            for box in super().boxes(layout):
                if layout.tensors[box.tensor].name != "layers.0.weight":
                    yield box

    with pytest.raises(InvalidInputError, match=r"layers\.0\.weight"):
        Publisher.open(world.run, Half(world.state), clock=world.clock)
    assert find_head(world.run) == 0


def test_differing_tensors_are_named(world):
    """A source that does not reproduce a state names exactly the tensors that differ."""
    world.state["layers.0.bias"][3] ^= 1
    assert differing_tensors(HostSource(world.state), world.zero) == ["layers.0.bias"]


def test_locate_finds_the_version_of_a_state(world):
    """A state is recognised by its fingerprint at any version, and not when it is at none."""
    publisher = world.publisher()
    world.step(publisher, 1)
    middle = fingerprint_state(world.state)
    world.step(publisher, 2)
    publisher.close()
    found = locate(world.run, middle, newest=3, streams=2)
    assert found is not None
    assert found.version == 2
    world.state.arrays[0][0] ^= 1
    assert locate(world.run, fingerprint_state(world.state), newest=3, streams=2) is None


def test_published_event_is_truthful(world):
    """The event of a version repeats its manifest and says what a dense broadcast would cost."""
    publisher = world.publisher()
    manifest = world.step(publisher, 1)
    publisher.close()
    event = [e for e in world.events if isinstance(e, VersionPublished)][-1]
    assert event.delta_bytes == manifest.core.delta_bytes < event.dense_bytes
    assert (event.nnz, event.elements) == (manifest.core.nnz, world.layout.elements)
    assert event.policy_hash == load_manifest(world.run, 2).policy_hash


def test_nothing_but_hints_is_overwritten(world):
    """LAW 2: objects outside hints/ keep their bytes for ever."""
    assert isinstance(world.home_store, MemoryStore)
    publisher = world.publisher()
    world.step(publisher, 1)
    before = world.digests(world.home_store)
    world.step(publisher, 2)
    publisher.close()
    after = world.digests(world.home_store)
    assert before.items() <= after.items()


class _GatedSource(HostSource):
    """A source that can be held in the middle of its reading."""

    def __init__(self, state):
        import threading

        super().__init__(state)
        self.closed, self.opened = threading.Event(), threading.Event()
        self.opened.set()

    def boxes(self, layout):
        for box in super().boxes(layout):
            self.closed.set()
            self.opened.wait(60)
            yield SourceBox(box.tensor, box.box, box.bits)


@pytest.mark.parametrize("step", [-1, 1 << 53, 1.5, "3", None])
def test_impossible_steps_are_refused_at_once(world, step):
    """A step that no manifest can hold is refused before anything is sent, and the run goes on."""
    publisher = world.publisher()
    with pytest.raises(InvalidInputError) as err:
        publisher.publish(step)
    assert err.value.kind is Kind.SETTING
    world.step(publisher, np.int64(7))
    assert publisher.head.core.step_last == 7
    publisher.close()


def test_closed_publisher_says_so(world):
    """Publishing after close is an error at the call, not a handle that never resolves."""
    publisher = world.publisher()
    publisher.close()
    with pytest.raises(InvalidInputError, match="closed"):
        publisher.publish(1)
