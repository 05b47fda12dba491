"""An engine that is asked for version 5 must not be given 7: feeds stop where they are told."""

from __future__ import annotations

import pytest

from deltastore.errors import Kind
from deltastore.format.signing import SigningKey, TrustedKeys
from deltastore.pipeline.follower import Follower
from deltastore.pipeline.stager_rank import StagedFeed
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion
from deltastore.storage.memory import MemoryStore
from deltastore.testing.faults import CountingStore
from tests.unit.pipeline.harness import World
from tests.unit.pipeline.test_stager import _stager, _turns

VERSIONS = 14


@pytest.fixture
def world(tmp_path):
    """A run with fourteen versions after the first."""
    made = World(tmp_path / "w", home_store=CountingStore(MemoryStore()))
    publisher = made.publisher()
    for step in range(1, VERSIONS):
        made.step(publisher, step)
    publisher.close()
    return made


@pytest.fixture
def stager(world, tmp_path):
    """The stager of the host."""
    made = _stager(world, tmp_path / "spool")
    yield made
    made.close()


def _at(world, version):
    return ActiveVersion.of(load_manifest(world.run, version))


def _feed(world, stager, rank="r0", version=0):
    return StagedFeed(
        stager.folder.path, world.layout, _at(world, version), rank=rank, clock=world.clock
    )


@pytest.mark.parametrize("until", [0, 1, 5, 13, 14, 99])
def test_a_follower_stops_at_the_version_it_is_given(world, until):
    """However far behind, and whatever way is planned, nothing beyond `until` is staged."""
    follower = Follower(world.run, _at(world, 0), name="a", clock=world.clock, until=until)
    follower.catch_up()
    staged = follower.staged()
    last = min(until, VERSIONS)
    assert (0 if staged is None else staged.target.version) == last
    assert follower.tip.version == last


def test_a_follower_at_its_last_version_asks_for_nothing(world):
    """A follower that is where it shall stop makes no request at all."""
    follower = Follower(world.run, _at(world, 3), name="a", clock=world.clock, until=3)
    before = world.home_store.traffic
    assert follower.poll() is False
    assert world.home_store.traffic == before


def test_a_rank_asks_for_a_version_and_gets_it(world, stager):
    """A feed that asks for 5 is given exactly 5, and the newest once it asks for that again."""
    feed = _feed(world, stager)
    feed.ask(5)
    _turns(world, stager, 20)
    while feed.poll():
        pass
    assert feed.staged().target.version == 5
    assert feed.take().target.version == 5
    feed.ask(None)
    _turns(world, stager, 20)
    while feed.poll():
        pass
    staged = feed.staged()
    assert (staged.base.version, staged.target.version) == (5, VERSIONS)
    feed.stop()


def test_asking_for_less_drops_what_leads_further(world, stager):
    """What was staged beyond the version that is asked for now is not handed out any more."""
    feed = _feed(world, stager)
    _turns(world, stager, 20)
    while feed.poll():
        pass
    assert feed.staged().target.version == VERSIONS
    feed.ask(3)
    assert feed.staged() is None
    assert feed.spooled is None
    _turns(world, stager, 20)
    feed.poll()
    assert feed.staged().target.version == 3
    feed.ask(9)
    assert feed.staged().target.version == 3, "what leads less far stays"
    feed.stop()


def test_only_what_the_ranks_agreed_on_is_taken(world, stager):
    """`take` gives the update that another rank named, or nothing, and then changes nothing."""
    one, other = _feed(world, stager, "r0"), _feed(world, stager, "r1")
    other.ask(4)
    _turns(world, stager, 20)
    for feed in (one, other):
        while feed.poll():
            pass
    assert one.spooled.target.version == VERSIONS
    assert one.take(other.spooled) is None
    assert one.staged().target.version == VERSIONS
    chosen = one.spooled
    assert one.take(chosen).target == chosen.target
    assert one.spooled is None
    one.stop()
    other.stop()


def test_ranks_that_came_by_different_ways_share_one_lane_again(world, stager):
    """A rank that was reset, and one moved by hand, are staged for together at the next version."""
    one, other = _feed(world, stager, "r0"), _feed(world, stager, "r1")
    one.reset(_at(world, 0))
    one.ask(2)
    _turns(world, stager, 10)
    one.poll()
    assert one.take().target.version == 2
    one.ask(None)
    other.moved(_at(world, 2))
    _turns(world, stager, 20)
    for feed in (one, other):
        while feed.poll():
            pass
    assert one.spooled == other.spooled
    one.stop()
    other.stop()


def test_a_stager_with_trusted_keys_stages_nothing_unsigned(world, tmp_path):
    """Where keys are trusted, a version that none of them signed is trouble, not an offer."""
    public = SigningKey.generate().public
    stager = _stager(world, tmp_path / "strict", trusted=TrustedKeys.of([public]))
    feed = _feed(world, stager)
    _turns(world, stager)
    feed.poll()
    assert feed.staged() is None
    assert feed.error.kind is Kind.SIGNATURE
    feed.stop()
    stager.close()
