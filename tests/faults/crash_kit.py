"""What the crash tests expect of a bucket whose trainer was killed, and how they look at it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.errors import NotFoundError
from deltastore.format.keys import KeyKind, RunKeys, parse_key
from deltastore.pipeline.host import HostSource
from deltastore.pipeline.publisher import Publisher
from deltastore.pipeline.replay import replay
from deltastore.repository.fetch import load_manifest
from deltastore.repository.resolve import find_head
from deltastore.repository.run import open_run
from deltastore.storage.wrapper import StoreWrapper
from deltastore.testing.clock import FakeClock
from tests.unit.pipeline.harness import RUN, World, change_some

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from deltastore.format.layout import BitState
    from deltastore.pipeline.replicator import Region
    from deltastore.repository.run import Run
    from deltastore.storage.store import (
        Body,
        ByteRange,
        ObjectInfo,
        ObjectStore,
        PutMode,
        PutOutcome,
    )

ROOT = Path(__file__).parents[2]
KEYS = RunKeys(RUN)
EIGHT_DAYS_S = 8 * 86_400.0
_BODIES = {KeyKind.SEGMENT, KeyKind.ANCHOR_FILE}


def crash(program: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a program whose children die; what it printed of each."""
    done = subprocess.run(
        [sys.executable, "-m", program, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def exists(store: ObjectStore, key: str) -> bool:
    """Whether the store holds it."""
    try:
        store.head(key)
    except NotFoundError:
        return False
    return True


def rebuilt(store: ObjectStore) -> BitState:
    """The newest version, from the bucket alone."""
    return replay(open_run(store, RUN), None, clock=FakeClock(), streams=1).state


class Expected:
    """The states of the old version and of version 2; every child computes the same."""

    def __init__(self, folder: Path) -> None:
        self.world = World(folder)
        self.old = self.world.zero
        change_some(self.world.state, self.world.rng)
        self.new = self.world.state

    def check(self, store: ObjectStore) -> bool:
        """The bucket alone gives one of both, bit for bit; whether it is the new one."""
        committed = exists(store, KEYS.version(2))
        assert rebuilt(store).equals(self.new if committed else self.old)
        return committed

    def go_on(self, store: ObjectStore, regions: Sequence[Region] = ()) -> BitState:
        """A new trainer takes over and publishes: what the newest version is then, everywhere."""
        state = self.new.copy()
        change_some(state, np.random.default_rng(7))
        run = open_run(store, RUN)
        publisher = Publisher.open(run, HostSource(state), clock=FakeClock(), regions=regions)
        publication = publisher.publish(2)
        if publication is not None:
            publication.result(60)
        assert publisher.wait_regions(60) == []
        publisher.close()
        return state


def bodies(store: ObjectStore) -> set[str]:
    """The keys of all bodies that are there."""
    keys = {info.key for info in store.list(f"{RUN}/")}
    return {key for key in keys if parse_key(key).kind in _BODIES}


def named_bodies(run: Run) -> set[str]:
    """The keys of all bodies that the version manifests name."""
    cores = [load_manifest(run, version).core for version in range(find_head(run) + 1)]
    files = {file.key for core in cores for file in core.files if file.key is not None}
    return files | {ref.key for core in cores for ref in core.segments}


class FolderStore(StoreWrapper):
    """What lies under a prefix of a store: one client serves many runs, a new one costs time."""

    def __init__(self, inner: ObjectStore, name: str) -> None:
        super().__init__(inner)
        self._prefix = f"{name}/"

    def put(self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        """A put in there."""
        return self.inner.put(self._prefix + key, body, mode=mode, sha256=sha256)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """A get in there."""
        return self.inner.get(self._prefix + key, byte_range)

    def head(self, key: str) -> ObjectInfo:
        """A head in there."""
        return replace(self.inner.head(self._prefix + key), key=key)

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """A listing in there."""
        after = None if start_after is None else self._prefix + start_after
        for info in self.inner.list(self._prefix + prefix, start_after=after):
            yield replace(info, key=info.key.removeprefix(self._prefix))

    def delete(self, keys: Iterable[str]) -> None:
        """A deletion in there."""
        self.inner.delete(self._prefix + key for key in keys)


class AgedStore(StoreWrapper):
    """A store whose listings say that all in them is eight days older; its time is what it was."""

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """The same objects, older."""
        for info in super().list(prefix, start_after=start_after):
            yield replace(info, last_modified_s=info.last_modified_s - EIGHT_DAYS_S)
