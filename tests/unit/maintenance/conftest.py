"""A small run in memory, whole, and copies of it to damage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from deltastore.adapters.safetensors_dir import (
    checkpoint_layout,
    load_state,
    scan_checkpoint,
)
from deltastore.format.manifest import FileRef, VersionCore, VersionKind, VersionManifest
from deltastore.format.mixing import fingerprint_state
from deltastore.ids import new_token
from deltastore.maintenance.fsck import check_run
from deltastore.pipeline.host import HostSource
from deltastore.pipeline.publisher import Publisher
from deltastore.repository.fetch import load_manifest
from deltastore.repository.run import Run, create_run, open_run
from deltastore.storage.memory import MemoryStore
from deltastore.storage.store import PutMode
from deltastore.testing.checkpoints import TinyShape, next_checkpoint, tiny_checkpoint
from deltastore.testing.clock import FakeClock

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from deltastore.maintenance.findings import Finding, Report
    from deltastore.storage.store import ObjectStore

SHAPE = TinyShape(vocab=32, hidden=8, intermediate=8, layers=1, heads=2, kv_heads=1)
NAME = "r1"
FULL_AT = 3
HEAD = 4


@dataclass(frozen=True)
class Copy:
    """A copy of the run that a test may damage."""

    store: MemoryStore

    def run(self, store: ObjectStore | None = None) -> Run:
        """The run as this (or a wrapped) store has it."""
        return open_run(store or self.store, NAME)

    def check(self, *, deep: bool, store: ObjectStore | None = None) -> Report:
        """What fsck says."""
        return check_run(self.run(store), deep=deep, streams=2, clock=FakeClock())

    def manifest(self, version: int) -> VersionManifest:
        """A version's manifest."""
        return load_manifest(self.run(), version)

    def segment(self, version: int) -> str:
        """The key of a version's first segment."""
        return self.manifest(version).core.segments[0].key

    def file(self, version: int, name: str) -> str:
        """The key of a file of a full version."""
        (key,) = [f.key for f in self.manifest(version).core.files if f.name == name]
        assert key is not None
        return key

    def write(self, key: str, body: bytes) -> None:
        """Put other bytes under a key, as no deltastore would."""
        self.store.put(key, body, mode=PutMode.OVERWRITE)


def found(report: Report) -> list[tuple[str, str, int | None, str | None]]:
    """The findings as (severity, defect, version, key)."""
    return [(f.severity.value, f.defect.value, f.version, f.key) for f in report.findings]


def errors(findings: tuple[Finding, ...]) -> list[tuple[str, int | None]]:
    """Defect and version of the findings that are errors."""
    return [(f.defect.value, f.version) for f in findings if f.severity.value == "error"]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """The objects of a run: full 0, deltas 1 and 2, full 3, delta 4."""
    folders = [tiny_checkpoint(tmp_path_factory.mktemp("v0"), seed=1, extras=True, shape=SHAPE)]
    for version in range(1, HEAD + 1):
        folder = tmp_path_factory.mktemp(f"v{version}")
        folders.append(next_checkpoint(folders[-1], folder, seed=version, density=0.05))
    store, clock = MemoryStore(), FakeClock()
    checkpoints = [scan_checkpoint(folder) for folder in folders]
    layout = checkpoint_layout(checkpoints[0])
    states = [load_state(checkpoint, layout) for checkpoint in checkpoints]
    run = create_run(
        store,
        NAME,
        layout=layout,
        files=checkpoints[0].files,
        fingerprint=fingerprint_state(states[0]),
        clock=clock,
    )
    for version in range(1, HEAD + 1):
        if version == FULL_AT:
            _commit_full(run, version, folders[version])
        else:
            source = HostSource(states[version])
            Publisher.open(run, source, clock=clock, step=version).close()
    return {info.key: store.get(info.key) for info in store.list("")}


@pytest.fixture
def copy(whole: Mapping[str, bytes]) -> Copy:
    """A fresh copy of the run."""
    return make_copy(whole)


def make_copy(objects: Mapping[str, bytes]) -> Copy:
    """A store with these objects."""
    store = MemoryStore()
    for key, body in objects.items():
        store.put(key, body, mode=PutMode.CREATE)
    return Copy(store)


def _commit_full(run: Run, version: int, folder: Path) -> None:
    """Commit a full version, as a publisher with a damaged baseline does."""
    import hashlib

    base = load_manifest(run, version - 1)
    checkpoint = scan_checkpoint(folder)
    attempt, refs = new_token(), []
    for file in checkpoint.files:
        body, key = file.path.read_bytes(), run.keys.anchor_file(version, attempt, file.name)
        run.store.put(key, body, mode=PutMode.CREATE)
        refs.append(FileRef(file.name, key, len(body), hashlib.sha256(body).hexdigest()))
    core = VersionCore(
        run=run.name,
        run_id=run.record.run_id,
        version=version,
        kind=VersionKind.FULL,
        base_version=version - 1,
        base_policy_hash=base.policy_hash,
        layout_digest=run.layout.digest,
        segments=(),
        files=tuple(refs),
        nnz=0,
        fingerprint_before=base.core.fingerprint_after,
        fingerprint_after=fingerprint_state(load_state(checkpoint, run.layout)),
        encodings=(),
        step_first=version,
        step_last=version,
        generation=base.core.generation + 1,
        writer_nonce=new_token(),
        created_ms=0,
    )
    manifest = VersionManifest(core)
    run.store.put(run.keys.version(version), manifest.to_bytes(), mode=PutMode.CREATE)
