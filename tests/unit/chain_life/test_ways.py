"""Whatever is missing or damaged on a way is planned around, or named."""

from __future__ import annotations

import pytest

from deltastore.chain.plan import BY_BYTES, TransferCost
from deltastore.errors import IntegrityError, InvalidInputError, Kind, NotFoundError
from deltastore.events import VersionStaged
from deltastore.maintenance.anchors import write_anchor
from deltastore.maintenance.composites import run_composites
from deltastore.pipeline.applier import Applier
from deltastore.pipeline.follower import Follower
from deltastore.pipeline.host import HostTarget
from deltastore.repository.floor import Floor, Raise, read_floor, write_floor
from deltastore.repository.history import locate
from deltastore.repository.resolve import find_head
from deltastore.storage.store import PutMode
from deltastore.testing.faults import Corrupt, FaultyStore, Op, fail_at
from tests.unit.chain_life.kit import Chain


def actor_at(chain, version, **options):
    """A follower and an applier that hold a version."""
    held = chain.held(version)
    names = {"name": "a", "clock": chain.clock, "sink": chain.events.append}
    follower = Follower(chain.run, held.point, **names, **options)
    target = HostTarget(held.state)
    return follower, Applier(target, held.point, **names), target


def advance(follower, applier):
    """Stage everything and activate it."""
    follower.catch_up()
    update = follower.take()
    return applier.activate(update) if update else applier.active


def test_transfer_cost_is_seconds_or_bytes():
    """A cost is a round trip plus bytes over the line; nonsense is refused."""
    assert TransferCost(0.5, 100.0).of(50) == 1.0
    assert BY_BYTES.of(50) == 50
    with pytest.raises(InvalidInputError):
        TransferCost(-1.0, 1.0)
    with pytest.raises(InvalidInputError):
        TransferCost(1.0, 0.0)


def test_laggard_follower_stages_composites(chain):
    """A follower that is far behind stages tiles, and then follows by deltas as ever."""
    chain.extend(40)
    run_composites(chain.run, clock=chain.clock)
    follower, applier, target = actor_at(chain, 0)
    assert advance(follower, applier).version == 40
    assert target.state.equals(chain.state)
    staged = [e.version for e in chain.events if isinstance(e, VersionStaged)]
    assert len(staged) <= 2
    chain.extend(2)
    assert advance(follower, applier).version == 42
    assert target.state.equals(chain.state)


def test_follower_takes_the_anchor_when_deltas_are_gone(chain):
    """CASE R23, C1: a follower whose next deltas were deleted re-anchors by itself."""
    chain.extend(12)
    write_anchor(chain.run, 10, clock=chain.clock)
    follower, applier, target = actor_at(chain, 3)
    for version in range(1, 11):
        chain.store.delete(chain.list_keys(f"/deltas/{version:010d}/"))
    assert advance(follower, applier).version == 12
    assert target.state.equals(chain.state)


def test_follower_goes_around_a_damaged_delta_by_a_composite(chain):
    """A follower stuck at an unreadable delta passes it by the tile that spans it."""
    chain.extend(8)
    run_composites(chain.run, clock=chain.clock)
    (key,) = chain.list_keys("/deltas/0000000001/")
    chain.store.put(key, b"rubbish", mode=PutMode.OVERWRITE)
    follower, applier, target = actor_at(chain, 0)
    assert advance(follower, applier).version == 8
    assert target.state.equals(chain.state)


def test_follower_without_any_way_waits(chain):
    """With neither composite nor anchor the follower stays, and names what is missing."""
    chain.extend(12)
    chain.store.delete(chain.list_keys("/deltas/0000000005/"))
    follower, applier, _target = actor_at(chain, 0)
    with pytest.raises(NotFoundError) as err:
        follower.catch_up()
    assert err.value.kind is Kind.OBJECT_MISSING
    assert follower.error is err.value
    update = follower.take()
    assert update.target.version == 4
    applier.activate(update)


def test_damaged_composite_is_planned_around(chain):
    """A composite whose bytes are wrong costs one more plan and nothing else."""
    chain.extend(9)
    run_composites(chain.run, clock=chain.clock)
    body = next(k for k in chain.list_keys("/composites/") if k.endswith(".seg"))
    chain.store.put(body, chain.store.get(body)[:-1], mode=PutMode.OVERWRITE)
    report = chain.replay().report
    assert (report.composites, report.links, report.plans) == (0, 9, 2)


@pytest.mark.parametrize("text", [b"", b"{}", b"garbage\n[]", None])
def test_garbage_shortcut_manifest_is_ignored(chain, text):
    """A shortcut manifest that is empty, garbage or of other ends is not used."""
    chain.extend(8)
    run_composites(chain.run, clock=chain.clock)
    (key,) = chain.list_keys("composites/0000000000-0000000008.json")
    if text is None:
        chain.extend(8)
        run_composites(chain.run, clock=chain.clock)
        text = chain.store.get(chain.run.keys.composite(8, 16))
    chain.store.put(key, text, mode=PutMode.OVERWRITE)
    chain.replay(8)


def test_replay_from_a_local_checkpoint_of_version_zero(chain):
    """A joiner that has version 0's checkpoint is recognised and never downloads a whole state."""
    chain.extend(20)
    write_anchor(chain.run, 16, clock=chain.clock)
    run_composites(chain.run, clock=chain.clock)
    held = chain.held(0)
    found = locate(chain.run, held.point.fingerprint, newest=20, streams=2)
    assert found == held.point
    assert chain.replay(held=held, cost=BY_BYTES).report.via.startswith("held v0 + ")


def test_held_state_of_another_history_is_not_built_on(chain, tmp_path):
    """CASE R3: a state of another history at the same number is replaced, not continued."""
    other = Chain(tmp_path / "other")
    other.change(20)
    other.publish()
    chain.extend(5)
    report = chain.replay(held=other.held(1)).report
    assert report.plans == 1
    assert report.size_bytes > chain.run.dense_bytes


def test_held_state_that_lies_is_found_out(chain):
    """A held state that is not its version is found before its first write, and re-anchored."""
    chain.extend(6)
    held = chain.held(2)
    for bits in held.state.arrays:
        bits ^= 1
    report = chain.replay(held=held).report
    assert report.plans > 1
    assert report.via.startswith("full v0")


def test_version_below_the_floor_is_gone(chain):
    """CASE C9: a version whose deltas retention deleted is a typed `gone` that names the floor."""
    chain.extend(12)
    write_anchor(chain.run, 8, clock=chain.clock)
    write_floor(chain.run, Floor((Raise(8, 1),)))
    for version in range(1, 9):
        chain.store.delete(chain.list_keys(f"/deltas/{version:010d}/"))
    with pytest.raises(NotFoundError) as err:
        chain.replay(5)
    assert err.value.kind is Kind.GONE
    assert "8" in err.value.hint
    chain.replay(8)
    chain.replay(12)


def test_reader_under_way_replans_when_bodies_go(chain):
    """CASE C1: bodies deleted under a reader in the middle of its plan: it plans again and ends."""
    chain.extend(12)
    write_anchor(chain.run, 8, clock=chain.clock)
    run_composites(chain.run, clock=chain.clock)
    gone = chain.list_keys("/deltas/000000000") + chain.list_keys("anchors/0000000000/")
    gone += chain.list_keys("/composites/")

    class Vanishing(FaultyStore):
        """Deletes everything below the anchor at the first read of a body."""

        def get(self, key, byte_range=None):
            if ("/deltas/" in key or "/composites/" in key) and not key.endswith(".json"):
                self.inner.delete([k for k in gone if "0000000009" not in k])
            return super().get(key, byte_range)

    run = chain.open(Vanishing(chain.store))
    report = chain.replay(run=run, held=chain.held(0), cost=BY_BYTES).report
    assert report.plans >= 2
    assert report.via.startswith("anchor v8")


@pytest.mark.parametrize(
    "text",
    [b"", b"x", b"[]", b"{}", b'{"raises":[]}', b'{"raises":[[1]]}', b'{"raises":[[-1,5]]}',
     b'{"raises":[[9,1],[8,2]]}', b'{"raises":[[999999,1]]}', b'{"raises":[[3,1]],"x":1}'],
)  # fmt: skip
def test_floor_hint_decides_nothing(chain, text):
    """A floor hint that is garbage or ahead changes nothing that a reader can rebuild."""
    chain.extend(4)
    chain.store.put(f"{chain.run.name}/hints/floor", text, mode=PutMode.OVERWRITE)
    for version in range(5):
        chain.replay(version)
    assert run_composites(chain.run, clock=chain.clock).missing == ()


def test_floor_hint_round_trip(chain):
    """What is written as a floor is read back, and only raises older than the grace time count."""
    floor = Floor((Raise(8, 1000),)).raised_to(16, 5000)
    write_floor(chain.run, floor)
    assert read_floor(chain.run) == floor
    assert floor.version == 16
    assert floor.settled(5999, 5.0) is None
    assert floor.settled(6000, 5.0) == 8
    assert floor.settled(10_000, 5.0) == 16


def test_corrupt_start_is_planned_around(chain):
    """A damaged anchor is left for the whole state below it."""
    chain.extend(5)
    write_anchor(chain.run, 4, clock=chain.clock)
    (shard,) = [k for k in chain.list_keys("anchors/0000000004/") if "model" in k]
    last = chain.store.head(shard).size_bytes - 1
    store = FaultyStore(chain.store)
    store.add(fail_at(Op.GET, 1, Corrupt(last), key_contains="anchors/0000000004/", times=99))
    report = chain.replay(run=chain.open(store)).report
    assert report.via == "full v0 + 5 deltas"


def test_hole_in_the_manifests_is_passed_by_an_anchor(chain):
    """CASE C3: with version 3's manifest lost, an anchor above it still serves; a replay below
    it is a typed gap."""
    chain.extend(6)
    write_anchor(chain.run, 5, clock=chain.clock)
    chain.store.delete([chain.run.keys.version(3)])
    assert chain.replay(6).report.via == "anchor v5 + 1 deltas"
    with pytest.raises(IntegrityError):
        find_head(chain.run)
    with pytest.raises(NotFoundError):
        chain.replay(4)
