"""The janitor takes what dead writers left, and never what a live one is writing."""

from __future__ import annotations

import contextlib

import pytest

from deltastore.errors import InvalidInputError, NotFoundError, StorageError
from deltastore.events import ObjectsDeleted
from deltastore.maintenance.anchors import write_anchor
from deltastore.maintenance.composites import run_composites
from deltastore.maintenance.janitor import JanitorPolicy, plan_janitor, run_janitor
from deltastore.storage.store import PutMode
from deltastore.testing.faults import Callback, FaultyStore, Op, fail_at
from tests.unit.chain_life.test_retention import Undated

POLICY = JanitorPolicy(commit_deadline_s=100.0, grace_s=200.0, abandoned_s=1000.0)


def sweep(chain, run=None):
    """One real round; how many objects went."""
    done = run_janitor(run or chain.run, POLICY, dry_run=False, sink=chain.events.append, streams=2)
    return done.deleted


def orphans(chain):
    """One orphan of every kind; their keys."""
    keys = chain.run.keys
    made = [
        keys.segment(3, 7, "a" * 64),
        keys.anchor_file(4, "dead", "model.safetensors"),
        keys.composite_segment(0, 8, "dead", 0, "b" * 64),
        keys.composite_segment(0, 24, "dead", 0, "b" * 64),
    ]
    for key in made:
        chain.store.put(key, b"x", mode=PutMode.CREATE)
    return set(made)


@pytest.fixture
def busy(chain):
    """A chain with an anchor, composites and a full version."""
    chain.extend(18)
    chain.change()
    chain.publish_full()
    write_anchor(chain.run, 8, clock=chain.clock)
    run_composites(chain.run, clock=chain.clock)
    return chain


def test_old_orphans_go_and_nothing_else(busy):
    """Orphans of every kind go once they are older than the grace time; nothing named goes."""
    chain = busy
    named = set(chain.list_keys())
    made = orphans(chain)
    chain.clock.advance_s(199.0)
    assert sweep(chain) == 0
    chain.clock.advance_s(1.0)
    assert sweep(chain) == len(made)
    assert set(chain.list_keys()) - {f"{chain.run.name}/hints/floor"} == named
    for version in range(20):
        chain.replay(version)
    assert sum(e.objects for e in chain.events if isinstance(e, ObjectsDeleted)) == len(made)


def test_dry_run_is_the_default(busy):
    """Without being told so the janitor deletes nothing and writes nothing."""
    orphans(busy)
    busy.clock.advance_s(500.0)
    busy.store.put("r1/hints/throughput", b"now", mode=PutMode.OVERWRITE)
    before = set(busy.list_keys())
    done = run_janitor(busy.run, POLICY)
    assert set(busy.list_keys()) == before
    assert (done.deleted, done.orphaned_bytes) == (0, 4)


def test_bodies_above_head_wait_for_the_trainer(chain):
    """CASE C1: bodies of a version being published stay until they are long abandoned."""
    chain.extend(2)
    ahead = chain.run.keys.segment(3, 0, "a" * 64)
    full = chain.run.keys.anchor_file(3, "attempt", "model.safetensors")
    for key in (ahead, full):
        chain.store.put(key, b"x", mode=PutMode.CREATE)
    chain.clock.advance_s(999.0)
    assert sweep(chain) == 0
    chain.clock.advance_s(1.0)
    assert sweep(chain) == 2


def test_upload_in_progress_is_not_touched(chain):
    """An attempt to which anything was added within the grace time stays whole."""
    chain.extend(2)
    first = chain.run.keys.anchor_file(2, "live", "a.safetensors")
    second = chain.run.keys.anchor_file(2, "live", "b.safetensors")
    chain.store.put(first, b"x", mode=PutMode.CREATE)
    chain.clock.advance_s(190.0)
    chain.store.put(second, b"x", mode=PutMode.CREATE)
    chain.clock.advance_s(190.0)
    assert sweep(chain) == 0


def test_worker_that_dies_leaves_what_the_janitor_takes(chain):
    """CASE C8: after any crash and a sweep the same composites can be made again, and hold."""
    chain.extend(8)
    store = FaultyStore(chain.store, [fail_at(Op.PUT, 1, key_contains="0000000008.json")])
    with contextlib.suppress(StorageError):
        run_composites(chain.open(store), clock=chain.clock)
    assert len([k for k in chain.list_keys("/composites/") if k.endswith(".seg")]) == 1
    chain.clock.advance_s(200.0)
    assert sweep(chain) == 1
    run_composites(chain.run, clock=chain.clock)
    assert chain.replay().report.composites == 1


def test_body_put_again_after_the_sweep_is_there(chain):
    """CASE C8: nobody remembers that a body was there: after a sweep it is put again."""
    chain.extend(1)
    key = chain.run.keys.segment(2, 0, "a" * 64)
    chain.store.put(key, b"x", mode=PutMode.CREATE)
    chain.clock.advance_s(1000.0)
    assert sweep(chain) == 1
    chain.extend(1)
    chain.replay()


def test_version_committed_between_listing_and_reading_keeps_its_bodies(chain):
    """A version that is committed while the janitor looks is read after the listing: it stays."""
    chain.extend(1)
    store = FaultyStore(chain.store)
    store.add(fail_at(Op.GET, 1, Callback(lambda: chain.extend(1)), key_contains="/versions/"))
    chain.clock.advance_s(5000.0)
    assert sweep(chain, chain.open(store)) == 0
    chain.replay(2)


def test_damaged_manifest_protects_its_bodies(busy):
    """Where a manifest cannot be read nothing is an orphan: repair comes first."""
    chain = busy
    for key in (chain.run.keys.version(3), chain.run.keys.composite(0, 8)):
        chain.store.put(key, b"junk", mode=PutMode.OVERWRITE)
    orphans(chain)
    chain.clock.advance_s(500.0)
    doomed = {d.key for d in plan_janitor(chain.run, POLICY) if d.verdict.value == "delete"}
    assert not any("/deltas/0000000003/" in k or "0000000000-0000000008" in k for k in doomed)


def test_run_without_a_version_is_refused(chain):
    """A run whose creation is under way has no version: its files are nobody's orphans."""
    chain.store.delete([chain.run.keys.version(0)])
    chain.clock.advance_s(5000.0)
    with pytest.raises(NotFoundError):
        sweep(chain)


def test_store_without_dates_is_left_alone(busy):
    """On a store without dates nothing is old."""
    orphans(busy)
    busy.clock.advance_s(5000.0)
    assert sweep(busy, busy.open(Undated(busy.store))) == 0


@pytest.mark.parametrize(
    "bad",
    [
        {"commit_deadline_s": 0.0},
        {"commit_deadline_s": 1801.0},
        {"abandoned_s": 10.0},
        {"uploads_idle_s": 10.0},
    ],
)
def test_policy_that_could_touch_a_live_upload_is_refused(bad):
    """The grace time is at least twice what a writer may take, by construction."""
    with pytest.raises(InvalidInputError):
        JanitorPolicy(**bad)
