"""The system against a dict: in whatever order things happen, actors hold what was published."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deltastore.errors import DeltastoreError, LeaseError, StorageError
from deltastore.pipeline.replicator import Region
from deltastore.repository.resolve import find_head
from deltastore.repository.run import open_run
from deltastore.storage.memory import MemoryStore
from deltastore.testing.faults import Corrupt, FaultyStore, LoseResponse, Op, fail_at
from tests.unit.pipeline.harness import RUN, World, change_some

FAULTS = st.sampled_from(
    [
        fail_at(Op.PUT, 1, key_contains="/deltas/"),
        fail_at(Op.PUT, 1, key_contains="/versions/"),
        fail_at(Op.PUT, 1, LoseResponse(), key_contains="/deltas/"),
        fail_at(Op.PUT, 1, LoseResponse(), key_contains="/versions/"),
        fail_at(Op.PUT, 1, key_contains="/hints/"),
        fail_at(Op.GET, 1),
        fail_at(Op.GET, 1, Corrupt(), key_contains="/deltas/"),
        fail_at(Op.HEAD, 1),
    ]
)


class PipelineModel(RuleBasedStateMachine):
    """A trainer that restarts, two actors, a second region, and faults at the home bucket."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.home = FaultyStore(MemoryStore())
        self.far = MemoryStore()
        self.world = World(
            Path(self.folder.name), home_store=self.home, region_stores={"far": self.far}
        )
        self.model = {0: self.world.zero.copy()}  # version -> the trainer's bits when it was made
        self.maybe = {}  # version -> bits it may have, of attempts without an answer
        self.step = 0
        self.publisher = None
        self.actors = []

    @initialize()
    def begin(self):
        """A trainer takes over, two actors hold version 0."""
        self.restart()
        self.actors = [self.world.actor(), self.world.actor(self.far)]

    @rule(many=st.booleans())
    def train(self, many):
        """An optimizer step changes some weights, or most."""
        change_some(self.world.state, self.world.rng, 0.6 if many else 0.01)
        self.step += 1

    @rule()
    def publish(self):
        """Publish the present state; a fault may keep it from existing, or only its answer."""
        self.attempt()
        try:
            manifest = self.publisher.publish(self.step).result(60)
        except StorageError:
            return
        self.model[manifest.core.version] = self.world.state.copy()

    @rule()
    def restart(self):
        """The trainer is killed and starts again: its fence continues the chain."""
        if self.publisher is not None:
            self.publisher.close()
        while True:
            self.attempt()
            regions = [Region("far", open_run(self.far, RUN))]
            try:
                self.publisher = self.world.publisher(step=self.step, regions=regions)
            except LeaseError:
                raise
            except DeltastoreError:
                continue
            break
        self.model[self.publisher.head.core.version] = self.world.state.copy()

    def attempt(self):
        """Remember the present bits for the numbers that they may get."""
        head = find_head(open_run(self.home.inner, RUN))
        for version in (head + 1, head + 2):
            self.maybe.setdefault(version, []).append(self.world.state.copy())

    @precondition(lambda self: self.actors)
    @rule(which=st.integers(0, 1))
    def follow(self, which):
        """An actor stages and activates what there is; a fault leaves it where it was."""
        actor = self.actors[which]
        before = actor.applier.active.version
        try:
            active = actor.advance()
        except DeltastoreError:
            actor.follower.reset(actor.applier.active)
            active = actor.applier.active
            assert active.version == before
        assert active.version >= before

    @rule(fault=FAULTS)
    def break_something(self, fault):
        """The next matching request to the home bucket goes wrong."""
        self.home.add(fault)

    @invariant()
    def actors_are_at_one_version(self):
        """LAW 1 and 3: an actor's bits are those the trainer had at its version, wholly."""
        for actor in self.actors:
            assert actor.target.fingerprint() == actor.applier.active.fingerprint
            version = actor.applier.active.version
            exact = self.model.get(version)
            possible = self.maybe[version] if exact is None else [exact]
            assert any(actor.target.state.equals(state) for state in possible)

    def teardown(self):
        """In the end a last version reaches everybody, and both buckets replay to it."""
        self.home.clear()
        manifest = self.publisher.publish(self.step).result(60)
        assert self.publisher.wait_regions(60) == []
        self.publisher.close()
        for actor in self.actors:
            actor.follower.reset(actor.applier.active)
            assert actor.advance().version == manifest.core.version
            assert actor.target.state.equals(self.world.state)
        for store in (self.home, self.far):
            assert self.world.replayed(store=store).equals(self.world.state)
        for version, state in self.model.items():
            assert self.world.replayed(version).equals(state)
        self.folder.cleanup()


TestPipelineModel = PipelineModel.TestCase
