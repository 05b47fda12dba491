"""The chain's life against a dict: whatever happens, in whatever order, nothing kept is lost."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from deltastore.errors import DeltastoreError, Kind, NotFoundError, StorageError
from deltastore.format.canonical import canonical_json
from deltastore.format.shortcut import AnchorCore, AnchorManifest, CompositeManifest
from deltastore.maintenance.anchors import AnchorPolicy, run_anchors, write_anchor
from deltastore.maintenance.composites import run_composites
from deltastore.maintenance.janitor import JanitorPolicy, run_janitor
from deltastore.maintenance.retention import run_retention
from deltastore.maintenance.retention_plan import RetentionPolicy
from deltastore.maintenance.settings import MaintenanceSettings
from deltastore.pipeline.applier import Applier
from deltastore.pipeline.follower import Follower
from deltastore.pipeline.host import HostSource, HostTarget
from deltastore.pipeline.publisher import Publisher
from deltastore.repository.rebuild import replay
from deltastore.repository.resolve import find_head
from deltastore.storage.store import PutMode
from deltastore.testing.faults import Corrupt, FaultyStore, LoseResponse, Op, fail_at
from tests.unit.chain_life.kit import NAME, Chain

KEEP = 6
GRACE_S = 100.0
RETENTION = RetentionPolicy(keep_versions=KEEP, grace_s=GRACE_S, keep_version_zero=False)
JANITOR = JanitorPolicy(commit_deadline_s=40.0, grace_s=80.0, abandoned_s=400.0)
SETTINGS = MaintenanceSettings(
    streams=2, segment_bytes=64, shard_max_bytes=200, commit_deadline_s=40.0
)
ANCHORS = AnchorPolicy(join_seconds_max=0.0, share_of_anchor_bytes_max=0.0, multiple=4)
FAULTS = st.sampled_from(
    [
        (op, part, action)
        for op in (Op.PUT, Op.GET, Op.DELETE)
        for part in ("/composites/", "/anchors/", "/deltas/", "/versions/", "/hints/", ".json")
        for action in (None, LoseResponse())
    ]
    + [(Op.GET, "/deltas/", Corrupt()), (Op.GET, "/composites/", Corrupt()), (Op.LIST, "", None)]
)


class ChainLife(RuleBasedStateMachine):
    """A trainer that restarts, two actors, maintenance workers that crash, and a clock."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.memory = None
        self.step = 0
        self.seen = {}  # version manifests: a number is never used twice
        self.named = {}  # what shortcut manifests name

    @initialize()
    def begin(self):
        """A run, its trainer, two actors at version 0."""
        self.chain = Chain(Path(self.folder.name))
        self.clock = self.chain.clock
        self.memory = self.chain.store
        self.store = FaultyStore(self.memory)
        self.run = self.chain.open(self.store)
        self.state = self.chain.state
        self.model = {0: self.state.copy()}
        self.maybe = {}  # version -> bits it may have, of attempts without an answer
        self.publisher = None
        self.restart(False)
        self.actors = [self.actor() for _ in range(2)]

    def actor(self):
        """A follower and an applier at version 0, whatever that costs them later."""
        held = self.chain.held(0)
        names = {"name": "a", "clock": self.clock}
        target = HostTarget(held.state)
        return Follower(self.run, held.point, **names), Applier(target, held.point, **names), target

    def expect(self):
        """Remember the present bits for the numbers that they may get."""
        head = find_head(self.chain.open(self.memory))
        for version in (head + 1, head + 2):
            self.maybe.setdefault(version, []).append(self.state.copy())

    @rule(stale=st.booleans())
    def restart(self, stale):
        """The trainer is killed and starts again, perhaps with a stale or garbage head hint."""
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None
        if stale:
            hint = canonical_json({"version": 0, "policy_hash": "0" * 64})
            self.memory.put(f"{NAME}/hints/head", hint, mode=PutMode.OVERWRITE)
        while self.publisher is None:
            self.expect()
            try:
                source = HostSource(self.state)
                self.publisher = Publisher.open(self.run, source, clock=self.clock, step=self.step)
            except DeltastoreError:
                continue  # each fault strikes once
        self.model[self.publisher.head.core.version] = self.state.copy()

    @rule(versions=st.integers(1, 6))
    def train(self, versions):
        """Optimizer steps, each published; a fault keeps one from existing, or its answer."""
        for _ in range(versions):
            self.chain.change()
            self.step += 1
            self.expect()
            try:
                manifest = self.publisher.publish(self.step).result(60)
            except (StorageError, NotFoundError):
                continue
            self.model[manifest.core.version] = self.state.copy()

    @rule(which=st.integers(0, 1))
    def follow(self, which):
        """An actor stages and activates what there is; a fault leaves it where it was."""
        follower, applier, target = self.actors[which]
        try:
            follower.catch_up()
            update = follower.take()
            if update is not None:
                applier.activate(update)
        except DeltastoreError:
            follower.reset(applier.active)
        self.check(target.state, applier.active.version)

    @rule()
    def join(self):
        """A fresh actor replays HEAD: success, or an error of the store that passes."""
        try:
            replayed = replay(self.run, clock=self.clock, streams=2)
        except StorageError:
            return
        self.check(replayed.state, replayed.manifest.core.version)

    @rule(what=st.sampled_from(["composites", "anchors", "retention", "janitor"]))
    def maintain(self, what):
        """A maintenance worker does one round; a fault is a crash at that step."""
        try:
            self.round(what)
        except DeltastoreError as err:
            self.blame_the_fault(err)

    @rule(crash_op=st.sampled_from([None, Op.PUT, Op.DELETE]), nth=st.integers(1, 2))
    def tend(self, crash_op, nth):
        """A worker does all it can, waits for the grace time, and deletes, or dies at a step."""
        self.train(4)
        for what in ("anchors", "composites", "retention"):
            self.maintain(what)
        self.clock.advance_s(GRACE_S)
        if crash_op is not None:
            self.store.add(fail_at(crash_op, nth))
        for what in ("retention", "janitor"):
            self.maintain(what)
        self.kept_versions_are_replayable()

    def kept_versions_are_replayable(self):
        """LAW 2: read past the faults, every version that retention keeps is there, bit for bit."""
        run = self.chain.open(self.memory)
        head = find_head(run)
        for version in range(max(0, head - KEEP + 1), head + 1):
            self.check(replay(run, version, clock=self.clock, streams=1).state, version)

    def round(self, what):
        """One round of one task."""
        if what == "composites":
            run_composites(self.run, clock=self.clock, settings=SETTINGS)
        elif what == "anchors":
            run_anchors(self.run, ANCHORS, clock=self.clock, settings=SETTINGS)
        elif what == "retention":
            run_retention(self.run, RETENTION, dry_run=False, streams=2)
        else:
            run_janitor(self.run, JANITOR, dry_run=False, streams=2)

    def blame_the_fault(self, err):
        """Maintenance fails only where something was broken on purpose."""
        assert self.store.fired, err

    @rule(fault=FAULTS, nth=st.integers(1, 4))
    def break_something(self, fault, nth):
        """A matching request to come goes wrong."""
        op, part, action = fault
        self.store.add(fail_at(op, nth, action, key_contains=part))

    @rule(seconds=st.sampled_from([1.0, 45.0, 90.0, 110.0, 500.0]))
    def wait(self, seconds):
        """Time passes."""
        self.clock.advance_s(seconds)

    def replay_or_gone(self, version):
        """A version below what is kept ends in its own bits, or in a typed `gone`."""
        try:
            state = replay(self.run, version, clock=self.clock, streams=2).state
        except NotFoundError as err:
            if err.kind is not Kind.GONE:
                raise
            return
        self.check(state, version)

    def check(self, state, version):
        """A state is the trainer's at that version, wholly."""
        exact = self.model.get(version)
        possible = self.maybe[version] if exact is None else [exact]
        assert any(state.equals(one) for one in possible), version

    @invariant()
    def numbers_are_used_once(self):
        """LAW 2: a version manifest, once seen, is there with the same bytes for ever."""
        if self.memory is None:
            return
        there = {}
        for info in self.memory.list(f"{NAME}/versions/"):
            there[info.key] = self.memory.get(info.key)
        assert {key: there.get(key) for key in self.seen} == self.seen
        self.seen = there

    @invariant()
    def shortcuts_name_what_is_there(self):
        """No anchor and no composite names an absent object, whatever has crashed."""
        if self.memory is None:
            return
        sizes = {info.key: info.size_bytes for info in self.memory.list(f"{NAME}/")}
        for key in sizes:
            if not key.endswith(".json") or key.split("/")[1] not in {"anchors", "composites"}:
                continue
            if key.count("/") > 2:
                continue
            text = self.memory.get(key)
            if text not in self.named:
                kind = AnchorManifest if "/anchors/" in key else CompositeManifest
                core = kind.from_bytes(text).core
                refs = core.files if isinstance(core, AnchorCore) else core.segments
                self.named[text] = {ref.key: ref.size_bytes for ref in refs}
            names = self.named[text]
            assert {key: sizes.get(key) for key in names} == names

    def teardown(self):
        """In the end everybody gets to HEAD, and all versions to keep can be replayed."""
        if self.memory is None:
            return
        self.store.clear()
        self.chain.change()
        self.expect()
        try:
            manifest = self.publisher.publish(self.step).result(60)
        except NotFoundError:  # an unanswered version whose bodies were abandoned for good
            self.restart(False)
            manifest = self.publisher.head
        self.publisher.close()
        head = manifest.core.version
        for follower, applier, target in self.actors:
            follower.reset(applier.active)
            follower.catch_up()
            update = follower.take()
            assert (applier.activate(update) if update else applier.active).version == head
            assert target.state.equals(self.state)
        self.kept_versions_are_replayable()
        for version in range(head - KEEP + 1):
            self.replay_or_gone(version)
        for what in ("anchors", "composites", "retention", "janitor"):
            self.round(what)
        write_anchor(self.run, head, clock=self.clock)
        assert replay(self.run, clock=self.clock, streams=2).state.equals(self.state)
        self.folder.cleanup()


TestChainLife = ChainLife.TestCase


@pytest.mark.slow
def test_chain_life_for_long():
    """Thousands of steps: no number is used twice, every plan ends in success or a typed `gone`."""
    run_state_machine_as_test(
        ChainLife,
        settings=settings(settings(), max_examples=20, stateful_step_count=100),
    )
