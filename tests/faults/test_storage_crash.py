"""A trainer that dies at any step of a version leaves the old version or the new one, whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.errors import NotFoundError
from deltastore.format.keys import KeyKind, RunKeys, parse_key
from deltastore.maintenance.fsck import check_run
from deltastore.maintenance.janitor import JanitorPolicy, run_janitor
from deltastore.pipeline.host import HostSource
from deltastore.pipeline.publisher import Publisher
from deltastore.pipeline.replay import replay
from deltastore.repository.fetch import load_manifest
from deltastore.repository.resolve import find_head
from deltastore.repository.run import open_run
from deltastore.storage.url import open_store
from deltastore.testing.clock import FakeClock
from tests.unit.pipeline.harness import RUN, World, change_some

if TYPE_CHECKING:
    from deltastore.format.layout import BitState
    from deltastore.repository.run import Run
    from deltastore.storage.store import ObjectStore
    from deltastore.testing.servers import SeaweedServer

ROOT = Path(__file__).parents[2]
KEYS = RunKeys(RUN)
_PROGRAM = "tests.faults.crash_child"


def _crash(url: str, folder: Path, kind: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What the children did, in the order of the step at which each was killed."""
    done = subprocess.run(
        [sys.executable, "-m", _PROGRAM, url, str(folder), kind, json.dumps(options)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def _same(a: BitState, b: BitState) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a.arrays, b.arrays, strict=True))


def _exists(store: ObjectStore, key: str) -> bool:
    try:
        store.head(key)
    except NotFoundError:
        return False
    return True


class Expected:
    """The states of the old version and of version 2; every child computes the same."""

    def __init__(self, folder: Path) -> None:
        world = World(folder)
        self.old = world.zero
        change_some(world.state, world.rng)
        self.new = world.state

    def check(self, store: ObjectStore) -> bool:
        """The bucket alone gives one of both, and a new trainer goes on; whether it is the new."""
        committed = _exists(store, KEYS.version(2))
        held = self.new if committed else self.old
        run = open_run(store, RUN)
        assert _same(replay(run, None, clock=FakeClock(), streams=1).state, held)

        state = self.new.copy()
        change_some(state, np.random.default_rng(7))
        publisher = Publisher.open(run, HostSource(state), clock=FakeClock())
        publication = publisher.publish(2)
        if publication is not None:
            publication.result(60)
        publisher.close()
        head = replay(open_run(store, RUN), None, clock=FakeClock(), streams=1)
        assert _same(head.state, state)
        return committed


def _named_keys(run: Run) -> set[str]:
    """The keys of all bodies that the version manifests name."""
    cores = [load_manifest(run, version).core for version in range(find_head(run) + 1)]
    files = {file.key for core in cores for file in core.files if file.key is not None}
    return files | {ref.key for core in cores for ref in core.segments}


def _sweep(store: ObjectStore, root: Path) -> tuple[int, set[str]]:
    """A janitor comes by when all is eight days old: what it deleted, and which bodies are left."""
    for path in root.rglob("*"):
        if path.is_file():
            aged_s = path.stat().st_mtime - 8 * 86400
            os.utime(path, (aged_s, aged_s))
    run = open_run(store, RUN)
    done = run_janitor(run, JanitorPolicy(), dry_run=False)
    kinds = {KeyKind.SEGMENT, KeyKind.ANCHOR_FILE}
    keys = {info.key for info in store.list(f"{RUN}/")}
    return done.deleted, {key for key in keys if parse_key(key).kind in kinds}


def _check_all(
    steps: list[dict[str, Any]], url: str, folder: Path, options: dict[str, Any]
) -> list[bool]:
    expected = Expected(folder / "expected")
    committed = []
    for step in steps:
        store = open_store(f"{url}/{step['folder']}", **options)
        committed.append(expected.check(store))
        store.close()
    assert [step["killed"] for step in steps] == [True] * (len(steps) - 1) + [False]
    return committed


def test_killed_at_every_system_call_on_files(tmp_path: Path) -> None:
    """SIGKILL at each write, fsync, link and unlink: old until the manifest's link, then new."""
    url = f"file://{tmp_path}/store"
    steps = _crash(url, tmp_path, "calls", {})
    committed = _check_all(steps, url, tmp_path, {})
    assert committed == sorted(committed)
    assert committed.count(False) >= 8
    assert committed.count(True) >= 3
    swept = 0
    for step in steps:
        store = open_store(f"{url}/{step['folder']}")
        before = replay(open_run(store, RUN), None, clock=FakeClock(), streams=1).state
        deleted, left = _sweep(store, tmp_path / "store" / step["folder"])
        swept += deleted
        assert left == _named_keys(open_run(store, RUN)), step
        again, _left = _sweep(store, tmp_path / "store" / step["folder"])
        assert again == 0
        assert (
            check_run(open_run(store, RUN), deep=True, streams=2, clock=FakeClock()).findings == ()
        )
        after = replay(open_run(store, RUN), None, clock=FakeClock(), streams=1).state
        assert _same(before, after)
        store.close()
    assert swept, "no crash left an orphan: the janitor had nothing to show"


def test_killed_at_every_put_on_a_real_server(
    s3_server: SeaweedServer, s3_bucket: str, tmp_path: Path
) -> None:
    """SIGKILL before and after each put on S3: old until the manifest is acknowledged, then new."""
    options = {
        "endpoint_url": s3_server.endpoint,
        "access_key": s3_server.access_key,
        "secret_key": s3_server.secret_key,
    }
    url = f"s3://{s3_bucket}"
    steps = _crash(url, tmp_path, "puts", options)
    committed = _check_all(steps, url, tmp_path, options)
    assert committed == sorted(committed)
    assert committed.count(False) >= 3
    assert committed.count(True) >= 2
