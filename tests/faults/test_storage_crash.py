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
from deltastore.format.keys import RunKeys
from deltastore.pipeline.host import HostSource
from deltastore.pipeline.publisher import Publisher
from deltastore.pipeline.replay import replay
from deltastore.repository.run import open_run
from deltastore.storage.url import open_store
from deltastore.testing.clock import FakeClock
from tests.unit.pipeline.harness import RUN, World, change_some

if TYPE_CHECKING:
    from deltastore.format.layout import BitState
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
