"""A region whose chain begins at an anchor lives as well as one that has everything."""

from __future__ import annotations

import pytest

from deltastore.maintenance.anchors import AnchorPolicy, run_anchors, write_anchor
from deltastore.maintenance.composites import run_composites
from deltastore.maintenance.janitor import JanitorPolicy, run_janitor
from deltastore.maintenance.retention import run_retention
from deltastore.maintenance.retention_plan import RetentionPolicy
from deltastore.repository.history import locate
from deltastore.repository.template import read_template
from deltastore.storage.memory import MemoryStore
from deltastore.storage.store import PutMode
from tests.unit.chain_life.kit import Chain

START, HEAD = 20, 90


@pytest.fixture
def region(tmp_path):
    """The chain, and a region that holds it from anchor 20 on."""
    chain = Chain(tmp_path)
    chain.extend(HEAD)
    write_anchor(chain.run, START, clock=chain.clock)
    store = MemoryStore(clock=chain.clock)
    for key in chain.list_keys():
        folder, number = (*key.split("/")[1:], "0")[:2]
        first = {"deltas": START + 1, "versions": START, "anchors": START}.get(folder, 0)
        if number[:10].isdigit() and int(number[:10]) < first:
            continue
        store.put(key, chain.store.get(key), mode=PutMode.CREATE)
    return chain, chain.open(store)


def test_everything_above_the_anchor_is_replayable(region):
    """Joiners and laggards of the region reach every version from its anchor on."""
    chain, run = region
    for version in (START, START + 1, 64, HEAD):
        chain.replay(version, run=run)
    chain.replay(HEAD, run=run, held=chain.held(5))
    chain.replay(HEAD, run=run, held=chain.held(50))
    point = chain.held(60).point
    assert locate(run, point.fingerprint, newest=HEAD, streams=2) == point
    assert [f.name for f in read_template(run).extras] == ["config.json"]


def test_the_region_is_maintained(region):
    """Composites, anchors, retention and the janitor work on it, and lose nothing it keeps."""
    chain, run = region
    assert run_composites(run, clock=chain.clock).failed == ()
    assert chain.replay(run=run).report.composites <= 2
    policy = AnchorPolicy(join_seconds_max=0.0, share_of_anchor_bytes_max=0.0)
    made = run_anchors(run, policy, clock=chain.clock)
    assert made is not None
    keep_all = RetentionPolicy(keep_versions=200, grace_s=10.0)
    keep_few = RetentionPolicy(keep_versions=10, grace_s=10.0)
    assert run_retention(run, keep_all, dry_run=False).floor == 0
    for _ in range(2):
        done = run_retention(run, keep_few, dry_run=False)
        chain.clock.advance_s(10.0)
    assert done.floor == 64
    assert done.deleted > 0
    chain.clock.advance_s(10_000.0)
    assert run_janitor(run, JanitorPolicy(), dry_run=False).deleted == 0
    for version in range(64, HEAD + 1):
        chain.replay(version, run=run)
