"""A trainer that dies at any put of a version leaves home and region old or new, and both whole."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING

import pytest

from deltastore.maintenance.fsck import check_run
from deltastore.maintenance.janitor import JanitorPolicy, run_janitor
from deltastore.pipeline.applier import Applier
from deltastore.pipeline.follower import Follower
from deltastore.pipeline.host import HostTarget
from deltastore.pipeline.replication import Replication
from deltastore.pipeline.replicator import Region, RegionLimits
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion
from deltastore.repository.resolve import find_head
from deltastore.repository.run import open_run
from deltastore.storage.uploads import incomplete_uploads_of
from deltastore.storage.url import open_store
from deltastore.testing.clock import FakeClock
from tests.faults.crash_kit import (
    KEYS,
    AgedStore,
    Expected,
    FolderStore,
    bodies,
    crash,
    exists,
    named_bodies,
)
from tests.faults.region_crash_child import BODY, HINT, MANIFEST, Point
from tests.unit.pipeline.harness import RUN

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.format.layout import BitState
    from deltastore.storage.store import ObjectStore
    from deltastore.testing.servers import SeaweedServer


def _is_new(point: Point, where: str) -> bool | None:
    """Whether a store holds version 2 after that death; None: either is right."""
    if where == "home":
        return (point.where == "far" and point.what != BODY) or point.what == HINT or (
            point.what == MANIFEST and point.after
        )  # fmt: skip
    if point.where == "far":
        return point.what == HINT or (point.what == MANIFEST and point.after)
    return None if point.what == HINT else False  # the region is told before home's hint is written


def _followed(store: ObjectStore, zero: BitState) -> tuple[int, BitState]:
    """What an actor of that region that was at version 0 comes to."""
    run, clock = open_run(store, RUN), FakeClock()
    target = HostTarget(zero.copy())
    begin = ActiveVersion.of(load_manifest(run, 0))
    follower = Follower(run, begin, name="a", clock=clock)
    applier = Applier(target, begin, name="a", clock=clock)
    follower.catch_up()
    update = follower.take()
    if update is not None:
        applier.activate(update)
    return applier.active.version, target.state


def _replicate(home: ObjectStore, far: ObjectStore) -> None:
    """As the worker does, when there is no trainer any more."""
    worker = Replication(
        open_run(home, RUN),
        [Region("far", open_run(far, RUN), streams=2)],
        limits=RegionLimits(memory_max_bytes=0, disk_max_bytes=0),
        poll_s=1.0,
        clock=FakeClock(),
        sink=lambda _event: None,
    )
    assert worker.behind(60) == []
    worker.close()


def _same_chain(a: ObjectStore, b: ObjectStore) -> bool:
    """Whether both hold the same objects. Bodies are named by their digests, and one policy hash
    names the whole history; that each is what its name says is fsck's to find."""
    held = []
    for store in (a, b):
        run = open_run(store, RUN)
        sizes = {i.key: i.size_bytes for i in store.list(f"{RUN}/") if "/hints/" not in i.key}
        held.append((sizes, load_manifest(run, find_head(run)).policy_hash))
    return held[0] == held[1]


def _swept(store: ObjectStore, *, deep: bool) -> int:
    """How many orphans the janitor took, eight days later; nothing else is left or lost."""
    aged = AgedStore(store)
    run = open_run(aged, RUN)
    deleted = run_janitor(run, JanitorPolicy(), dry_run=False, streams=2).deleted
    assert bodies(store) == named_bodies(run)
    uploads = incomplete_uploads_of(store)
    assert uploads is None or list(uploads.incomplete_uploads("")) == []
    assert check_run(run, deep=deep, streams=2, clock=FakeClock()).findings == ()
    return deleted


class Death:
    """What one death left in home and in the region."""

    def __init__(self, point: Point, home: ObjectStore, far: ObjectStore) -> None:
        self.point = point
        self.home = home
        self.far = far

    def check(self, expected: Expected) -> int:
        """Old or new, whole, for the bucket and for a follower; then somebody goes on, and in the
        end both hold the same and nothing else. Returns how many orphans there were."""
        point = self.point
        assert expected.check(self.home) == _is_new(point, "home"), point
        is_new = exists(self.far, KEYS.version(2))
        assert _is_new(point, "far") in {is_new, None}, point
        version, state = _followed(self.far, expected.old)
        assert version == (2 if is_new else 1), point
        assert state.equals(expected.new if is_new else expected.old), point
        if point.where == "home" and point.what == MANIFEST:
            # Between the region's bodies and home's manifest, or between home's and the region's.
            there = {key for key in bodies(self.far) if BODY in key}
            assert there == {key for key in bodies(self.home) if BODY in key}
            assert there
            assert not exists(self.far, KEYS.version(2))
        if point.rescue == "worker":
            _replicate(self.home, self.far)
            assert expected.check(self.far)
            assert find_head(open_run(self.far, RUN)) == find_head(open_run(self.home, RUN)) == 2
        state = expected.go_on(self.home, [Region("far", open_run(self.far, RUN), streams=2)])
        orphans = _swept(self.home, deep=False) + _swept(self.far, deep=True)
        version, followed = _followed(self.far, expected.old)
        assert version == find_head(open_run(self.home, RUN)) > 2, point
        assert followed.equals(state), point
        assert _same_chain(self.home, self.far), point
        return orphans


@pytest.fixture
def far_bucket(s3_server: SeaweedServer) -> str:
    """The region's own bucket."""
    return s3_server.create_bucket(f"far-{secrets.token_hex(6)}")


def test_killed_at_every_put_to_home_and_a_region(
    s3_server: SeaweedServer, s3_bucket: str, far_bucket: str, tmp_path: Path
) -> None:
    """SIGKILL before and after each body, manifest and hint in home and in a region, on a real
    server: also between the region's bodies and home's manifest, and between both manifests."""
    options = {
        "endpoint_url": s3_server.endpoint,
        "access_key": s3_server.access_key,
        "secret_key": s3_server.secret_key,
    }
    urls = (f"s3://{s3_bucket}", f"s3://{far_bucket}")
    rows = crash("tests.faults.region_crash_child", *urls, str(tmp_path), json.dumps(options))
    expected = Expected(tmp_path / "expected")
    buckets = [open_store(url, **options) for url in urls]
    orphans = {}
    for row in rows[1:]:
        point = Point(**row["point"])
        home, far = (FolderStore(bucket, row["folder"]) for bucket in buckets)
        orphans[point] = Death(point, home, far).check(expected)
    for bucket in buckets:
        bucket.close()
    segments = max(point.nth for point in orphans)
    assert segments >= 2
    assert len(orphans) == 4 * (segments + 2) + 2
    # The successor's bytes differ, so bodies of the version that never was stay behind.
    assert orphans[Point("home", MANIFEST, 1, after=False)] == 2 * segments
    assert orphans[Point("home", BODY, 1, after=False)] < 2 * segments
    assert not any(orphans[point] for point in orphans if _is_new(point, "home"))
