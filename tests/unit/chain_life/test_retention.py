"""What retention keeps is replayable, what it deletes was announced, and nobody is cut off."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltastore.errors import IntegrityError, InvalidInputError, Kind, NotFoundError
from deltastore.events import FloorRaised, ObjectsDeleted
from deltastore.format.shortcut import CompositeManifest
from deltastore.maintenance.anchors import write_anchor
from deltastore.maintenance.composites import run_composites
from deltastore.maintenance.decisions import Verdict, deletions
from deltastore.maintenance.retention import execute_retention, run_retention
from deltastore.maintenance.retention_plan import RetentionPolicy, plan_retention
from deltastore.repository.floor import read_floor
from deltastore.repository.rebuild import replay
from deltastore.repository.run import open_run
from deltastore.storage.memory import MemoryStore
from deltastore.storage.store import PutMode
from deltastore.storage.wrapper import StoreWrapper
from deltastore.testing.faults import FaultyStore, LoseResponse, Op, fail_at
from tests.unit.chain_life.kit import NAME, Chain

GRACE_S = 3600.0
POLICY = RetentionPolicy(keep_versions=10, grace_s=GRACE_S, rollout_keep_versions=2)


def retain(chain, policy=POLICY, **options):
    """One real round."""
    options.setdefault("run", chain.run)
    return run_retention(
        options.pop("run"), policy, dry_run=False, sink=chain.events.append, streams=2, **options
    )


def grown(chain, versions=30, anchor=16):
    """A chain with composites and an anchor."""
    chain.extend(versions)
    write_anchor(chain.run, anchor, clock=chain.clock)
    run_composites(chain.run, clock=chain.clock)
    return chain


def doomed(plan):
    """Keys that would go."""
    return {d.key for d in plan.decisions if d.verdict is Verdict.DELETE}


def test_first_round_announces_and_deletes_nothing(chain):
    """CASE C1: the floor is raised first; within the grace time nothing below it is deleted."""
    grown(chain)
    before = set(chain.list_keys())
    assert retain(chain).deleted == 0
    assert read_floor(chain.run).version == 16
    assert [(e.previous, e.floor) for e in chain.events if isinstance(e, FloorRaised)] == [(0, 16)]
    chain.clock.advance_s(GRACE_S - 1)
    assert retain(chain).deleted == 0
    assert set(chain.list_keys()) == before | {f"{NAME}/hints/floor"}


def test_after_the_grace_time_what_is_below_goes(chain):
    """After the grace time deltas, anchors and composites below the floor go; manifests stay."""
    grown(chain)
    write_anchor(chain.run, 8, clock=chain.clock)
    retain(chain)
    chain.clock.advance_s(GRACE_S)
    assert retain(chain).deleted > 0
    assert [k for v in range(1, 17) for k in chain.list_keys(f"/deltas/{v:010d}/")] == []
    assert chain.list_keys("anchors/0000000008") == []
    assert chain.list_keys("composites/00000000") == chain.list_keys("composites/0000000016-")
    assert len(chain.list_keys("/versions/")) == 31
    for version in range(16, 31):
        chain.replay(version)
    chain.replay(0)
    with pytest.raises(NotFoundError) as err:
        chain.replay(5)
    assert err.value.kind is Kind.GONE
    assert sum(e.objects for e in chain.events if isinstance(e, ObjectsDeleted)) > 16


def test_anchor_lives_while_any_link_above_it_does(chain):
    """CASE C1: the anchor at the floor stays though it is older than everything that is kept."""
    grown(chain, 30, 4)
    for _ in range(3):
        retain(chain)
        chain.clock.advance_s(10 * GRACE_S)
    assert chain.list_keys("anchors/0000000004.json") != []
    for version in range(21, 31):
        chain.replay(version)


def test_without_an_anchor_nothing_goes(chain):
    """CASE C9: with version 0 as the only whole state the floor stays at 0."""
    chain.extend(40)
    chain.clock.advance_s(10 * GRACE_S)
    done = retain(chain)
    assert (done.floor, done.deleted) == (0, 0)


def test_full_version_is_a_floor_too(chain):
    """A full version carries everything above it like an anchor; an older one goes whole."""
    for _ in range(2):
        chain.extend(5)
        chain.change()
        chain.publish_full()
    chain.extend(12)
    retain(chain)
    chain.clock.advance_s(GRACE_S)
    retain(chain)
    assert read_floor(chain.run).version == 12
    assert chain.list_keys("anchors/0000000006/") == []
    for version in range(12, 25):
        chain.replay(version)


def test_floor_raised_every_round_still_settles(chain):
    """A floor that rises in every round does not put the deletions off for ever."""
    deleted = 0
    for _ in range(12):
        chain.extend(4)
        write_anchor(chain.run, chain.head.core.version, clock=chain.clock)
        deleted += retain(chain).deleted
        chain.clock.advance_s(GRACE_S / 4)
    assert deleted > 20
    for version in range(39, 49):
        chain.replay(version)


def test_version_zero_stays_unless_told(chain):
    """Version 0 stays whole by default; told otherwise only its small files stay."""
    grown(chain)
    policy = RetentionPolicy(keep_versions=10, grace_s=GRACE_S, keep_version_zero=False)
    for _ in range(2):
        retain(chain)
        chain.clock.advance_s(GRACE_S)
    assert len(chain.list_keys("anchors/0000000000/")) == 2
    retain(chain, policy)
    (kept,) = chain.list_keys("anchors/0000000000/")
    assert kept.endswith("config.json")
    chain.extend(1)
    chain.replay()
    write_anchor(chain.run, 31, clock=chain.clock)
    assert chain.replay().report.via == "anchor v31"


def test_superseded_composites_go_after_the_grace_time(chain):
    """A cumulative composite goes once a longer one has been there for the grace time."""
    chain.extend(16)
    run_composites(chain.run, clock=chain.clock)
    chain.extend(8)
    chain.clock.advance_s(GRACE_S)
    run_composites(chain.run, clock=chain.clock)
    assert retain(chain).deleted == 0
    chain.clock.advance_s(GRACE_S)
    retain(chain)
    spans = [k.rpartition("/")[2] for k in chain.list_keys("/composites/") if k.endswith(".json")]
    assert "0000000000-0000000016.json" not in spans
    assert "0000000000-0000000024.json" in spans
    assert "0000000000-0000000008.json" in spans
    assert chain.list_keys("0000000000-0000000016/") == []


def test_results_of_old_steps_go(chain):
    """Rollouts of versions long past go by age, those that may still be read stay."""
    chain.extend(10)
    old = chain.run.keys.rollout(3, "job", "token", "a" * 64)
    new = chain.run.keys.rollout(9, "job", "token", "a" * 64)
    for key in (old, new):
        chain.store.put(key, b"x", mode=PutMode.CREATE)
    retain(chain)
    assert len(chain.list_keys("/rollouts/")) == 2
    chain.clock.advance_s(GRACE_S)
    retain(chain)
    assert chain.list_keys("/rollouts/") == [new]


def test_dry_run_changes_nothing(chain):
    """A dry run writes no object, not even a hint, and gives every object a reason."""
    grown(chain)
    before = {k: chain.store.head(k) for k in chain.list_keys()}
    done = run_retention(chain.run, POLICY)
    assert {k: chain.store.head(k) for k in chain.list_keys()} == before
    assert {d.key for d in done.plan.decisions} == set(before)
    assert all(d.reason for d in done.plan.decisions)
    assert done.plan.raises_floor


def _region(chain, upto, tmp_path):
    """Another region that holds the chain up to a version."""
    relay = MemoryStore(clock=chain.clock)
    for key in chain.list_keys():
        parts = key.split("/")
        number = parts[2][:10] if len(parts) > 2 else "0"
        if parts[1] in {"deltas", "versions"} and int(number) > upto:
            continue
        if parts[1] in {"composites", "hints"}:
            continue
        relay.put(key, chain.store.get(key), mode=PutMode.CREATE)
    return open_run(relay, NAME)


def test_home_keeps_what_a_region_still_lacks(chain, tmp_path):
    """Home keeps every body above a region's newest version, unless it is marked as behind."""
    grown(chain, 40, 16)
    write_anchor(chain.run, 24, clock=chain.clock)
    regions = {"far": _region(chain, 20, tmp_path)}
    plan = plan_retention(chain.run, POLICY, regions=regions)
    assert plan.floor == 16
    plan = plan_retention(chain.run, POLICY, regions=regions, behind=frozenset({"far"}))
    assert plan.floor == 24


def test_announced_readers_lengthen_the_wait(chain):
    """A reader announced at version 5 keeps its deltas; one hopelessly far behind does not."""
    grown(chain)
    retain(chain)
    chain.clock.advance_s(GRACE_S)
    retain(chain, readers=[5])
    chain.replay(30, held=chain.held(5))
    assert chain.list_keys("/deltas/0000000006/") != []
    assert chain.list_keys("/deltas/0000000005/") == []
    policy = RetentionPolicy(keep_versions=10, grace_s=GRACE_S, readers_max_versions=20)
    retain(chain, policy, readers=[5])
    assert chain.list_keys("/deltas/0000000006/") == []


@pytest.mark.parametrize("text", [b"", b"junk", b'{"raises":[[999,1]]}', b'{"raises":[[20,1]]}'])
def test_garbage_floor_never_costs_a_kept_version(chain, text):
    """LAW 2: whatever the floor hint says, the versions to keep stay replayable."""
    grown(chain)
    chain.clock.advance_s(10 * GRACE_S)
    chain.store.put(f"{NAME}/hints/floor", text, mode=PutMode.OVERWRITE)
    retain(chain)
    for version in range(21, 31):
        chain.replay(version)


def test_damaged_start_stops_retention(chain):
    """An anchor that rotted is noticed before the floor rises onto it; nothing is deleted."""
    grown(chain)
    (shard,) = [k for k in chain.list_keys("anchors/0000000016/") if "model" in k]
    body = bytearray(chain.store.get(shard))
    body[-1] ^= 1
    chain.store.put(shard, bytes(body), mode=PutMode.OVERWRITE)
    with pytest.raises(IntegrityError) as err:
        retain(chain)
    assert err.value.kind is Kind.DIGEST
    assert read_floor(chain.run).version == 0
    chain.clock.advance_s(10 * GRACE_S)
    with pytest.raises(IntegrityError):
        retain(chain)
    chain.replay(3)


def test_incomplete_anchor_is_no_floor(chain):
    """CASE C9: an anchor with a file missing or short is not built upon."""
    grown(chain, 30, 16)
    write_anchor(chain.run, 8, clock=chain.clock)
    (shard,) = [k for k in chain.list_keys("anchors/0000000016/") if "model" in k]
    chain.store.delete([shard])
    assert plan_retention(chain.run, POLICY).floor == 8


def test_unreadable_chain_stops_retention(chain):
    """Nothing is deleted from a chain whose manifests cannot be read."""
    grown(chain)
    retain(chain)
    chain.clock.advance_s(GRACE_S)
    chain.store.put(chain.run.keys.version(25), b"junk", mode=PutMode.OVERWRITE)
    before = set(chain.list_keys())
    with pytest.raises(ValueError, match="manifest"):
        retain(chain)
    assert set(chain.list_keys()) == before


def test_manifests_go_before_their_bodies(chain):
    """Deletions are ordered: shortcut manifests, then bodies."""
    grown(chain)
    write_anchor(chain.run, 8, clock=chain.clock)
    retain(chain)
    chain.clock.advance_s(GRACE_S)
    plan = plan_retention(chain.run, POLICY, now_ms=int(chain.clock.utc_s() * 1000))
    kinds = [one.key.endswith(".json") for one in deletions(plan.decisions) if one.first]
    assert kinds
    order = [one.first for one in deletions(plan.decisions)]
    assert order == sorted(order, reverse=True)


@pytest.mark.parametrize("nth", range(1, 4))
@pytest.mark.parametrize("lost", [False, True])
def test_crash_at_every_delete_leaves_no_dangling_shortcut(tmp_path, nth, lost, monkeypatch):
    """Cut at any deletion, no shortcut names an absent object, and the next round finishes."""
    monkeypatch.setattr("deltastore.maintenance.decisions.BATCH_KEYS", 3)
    chain = Chain(tmp_path)
    grown(chain)
    write_anchor(chain.run, 8, clock=chain.clock)
    retain(chain)
    chain.clock.advance_s(GRACE_S)
    store = FaultyStore(chain.store)
    store.add(fail_at(Op.DELETE, nth, LoseResponse() if lost else None))
    with pytest.raises(Exception, match="injected"):
        retain(chain, run=chain.open(store))
    for key in chain.list_keys("/composites/"):
        if key.endswith(".json"):
            for ref in CompositeManifest.from_bytes(chain.store.get(key)).core.segments:
                chain.store.head(ref.key)
    retain(chain)
    assert deletions(plan_retention(chain.run, POLICY).decisions) == []
    for version in range(16, 31):
        chain.replay(version)


class Undated(StoreWrapper):
    """A store that does not say when an object was written."""

    def head(self, key):
        """Without a date."""
        info = self.inner.head(key)
        return type(info)(info.key, info.size_bytes, 0.0, info.etag)

    def list(self, prefix, *, start_after=None):
        """Without dates."""
        for info in self.inner.list(prefix, start_after=start_after):
            yield type(info)(info.key, info.size_bytes, 0.0, info.etag)


def test_store_without_dates_is_left_alone(chain):
    """On a store without dates nothing is old: no floor is raised and nothing goes."""
    grown(chain)
    run = chain.open(Undated(chain.store))
    for _ in range(2):
        chain.clock.advance_s(10 * GRACE_S)
        assert retain(chain, run=run).deleted == 0
    assert read_floor(chain.run).version == 0


def test_unnamed_attempts_are_left_to_the_janitor(chain):
    """Bodies that no manifest names may be a live upload: retention never deletes them."""
    grown(chain)
    live = chain.run.keys.anchor_file(8, "live", "model.safetensors")
    part = chain.run.keys.composite_segment(0, 8, "live", 0, "b" * 64)
    ahead = chain.run.keys.segment(31, 0, "c" * 64)
    for key in (live, part, ahead):
        chain.store.put(key, b"x", mode=PutMode.CREATE)
    for _ in range(2):
        retain(chain)
        chain.clock.advance_s(GRACE_S)
    assert {live, part, ahead} <= set(chain.list_keys())


def test_four_readers_while_retention_runs(chain):
    """CASE C1, R23: four actors replay while retention and composites run: all of them succeed."""
    grown(chain, 40, 16)
    stop = threading.Event()
    run = chain.open()

    def read(seed):
        done = 0
        while not stop.is_set() or done < 3:
            version = 31 + (done * 7 + seed) % 10
            replayed = replay(run, version, clock=chain.clock, streams=2)
            assert replayed.state.equals(chain.states[version])
            done += 1
        return done

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read, seed) for seed in range(4)]
        write_anchor(chain.run, 24, clock=chain.clock)
        for _ in range(4):
            retain(chain)
            run_composites(chain.run, clock=chain.clock)
            chain.clock.advance_s(GRACE_S)
        stop.set()
        assert all(reader.result(60) >= 3 for reader in readers)
    assert read_floor(chain.run).version == 24


def test_execute_without_a_start_is_refused(chain):
    """A plan whose floor has no whole state is never carried out."""
    grown(chain)
    plan = plan_retention(chain.run, POLICY)
    hollow = type(plan)(plan.head, plan.floor, (), plan.advertised, plan.settled, plan.decisions)
    with pytest.raises(IntegrityError) as err:
        execute_retention(chain.run, hollow, now_ms=1)
    assert err.value.kind is Kind.BROKEN_CHAIN


@pytest.mark.parametrize(
    "bad",
    [
        {"keep_versions": 0},
        {"grace_s": 0.0},
        {"rollout_keep_versions": 1},
        {"readers_max_versions": -1},
    ],
)
def test_senseless_policy_is_refused(bad):
    """A policy that would delete what is in use is refused by the setting's name."""
    with pytest.raises(InvalidInputError, match=next(iter(bad))):
        RetentionPolicy(**bad)
