"""Chains of a thousand tiny versions in a second, committed as a publisher does, but at once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from deltastore.chain.diff import diff_tensor
from deltastore.format.block import total_change
from deltastore.format.dtypes import DType
from deltastore.format.fingerprint import ZERO
from deltastore.format.layout import Layout, TensorEntry
from deltastore.format.manifest import SegmentRef, VersionKind, VersionManifest
from deltastore.format.mixing import fingerprint_state
from deltastore.format.segment import SegmentIdentity, encode_segment, segment_encodings
from deltastore.format.signing import unsigned
from deltastore.repository.commit import commit_version, write_head_hint
from deltastore.repository.fetch import load_manifest
from deltastore.repository.fullversion import upload_full
from deltastore.repository.points import ActiveVersion
from deltastore.repository.rebuild import Held, Replayed, replay
from deltastore.repository.run import Run, create_run, open_run
from deltastore.repository.template import read_template
from deltastore.storage.memory import MemoryStore
from deltastore.storage.store import PutMode
from deltastore.testing.clock import FakeClock
from tests.unit.pipeline.harness import random_state, write_files

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from deltastore.events import Event
    from deltastore.format.block import Block
    from deltastore.format.layout import BitState
    from deltastore.format.signing import Signer
    from deltastore.storage.store import ObjectStore

NAME = "r1"
ENTRIES = (
    TensorEntry("embed", DType.BF16, (16, 8), ("head",)),
    TensorEntry("layer", DType.BF16, (40,)),
    TensorEntry("bias", DType.F32, (6,)),
    TensorEntry("step", DType.I64, ()),
    TensorEntry("none", DType.F16, (0, 3)),
)


@dataclass
class Chain:
    """A run that grows, and the trainer's state at every version."""

    folder: Path
    store: ObjectStore | None = None
    clock: FakeClock = field(default_factory=FakeClock)
    signer: Signer = unsigned
    events: list[Event] = field(default_factory=list)
    parts: int = 1
    entries: tuple[TensorEntry, ...] = ENTRIES
    start: BitState | None = None

    def __post_init__(self) -> None:
        self.store = self.store or MemoryStore(clock=self.clock)
        self.layout = self.start.layout if self.start else Layout.build(self.entries)
        self.state = self.start or random_state(self.layout, 1)
        self.rng = np.random.default_rng(2)
        self.states = {0: self.state.copy()}
        self.run: Run = create_run(
            self.store,
            NAME,
            layout=self.layout,
            files=write_files(self.state, self.folder),
            fingerprint=fingerprint_state(self.state),
            clock=self.clock,
            probe=False,
        )
        self.head = load_manifest(self.run, 0)

    def change(self, places: int = 3) -> None:
        """Change a few elements by a step, now and then one to any pattern."""
        for _ in range(places):
            bits = self.state.arrays[self.rng.integers(0, 4)]
            at = self.rng.integers(0, bits.size)
            if self.rng.random() < 0.1:
                bits[at] = self.rng.integers(0, 1 << 16)
            else:
                bits[at] += np.array(self.rng.choice([1, -1]), np.int64).astype(bits.dtype)

    def extend(self, versions: int = 1) -> None:
        """Train and publish."""
        for _ in range(versions):
            self.change()
            self.publish()

    def publish(self) -> VersionManifest:
        """Commit the present state as the next delta, in `parts` segments."""
        before = self.states[self.head.core.version]
        blocks = [
            block
            for tensor in range(len(self.layout))
            for block in diff_tensor(
                self.layout, tensor, before.arrays[tensor], self.state.arrays[tensor]
            )
        ]
        return self.commit([blocks[i :: self.parts] for i in range(self.parts)])

    def commit(self, segments: Sequence[Sequence[Block]]) -> VersionManifest:
        """Commit the next delta, of these segments."""
        base = self.head.core
        version = base.version + 1
        identity = SegmentIdentity(self.layout.digest, base.version, version)
        refs, encodings, change = [], set(), ZERO
        for number, part in enumerate(segments):
            body = encode_segment(self.layout, identity, part)
            digest = hashlib.sha256(body).hexdigest()
            key = self.run.keys.segment(version, number, digest)
            self.run.store.put(key, body, mode=PutMode.CREATE)
            refs.append(SegmentRef(key, len(body), digest, sum(b.nnz for b in part)))
            encodings |= segment_encodings(body)
            change = change + total_change(part)
        core = replace(
            base,
            version=version,
            kind=VersionKind.DELTA,
            base_version=base.version,
            base_policy_hash=self.head.policy_hash,
            segments=tuple(refs),
            files=(),
            nnz=sum(ref.nnz for ref in refs),
            fingerprint_before=base.fingerprint_after,
            fingerprint_after=base.fingerprint_after + change,
            encodings=tuple(sorted(encodings)),
            step_first=version,
            step_last=version,
        )
        return self._commit(core)

    def publish_full(self) -> VersionManifest:
        """Commit the present state as a full version."""
        base = self.head.core
        files = upload_full(self.run, base.version + 1, self.state, read_template(self.run))
        core = replace(
            base,
            version=base.version + 1,
            kind=VersionKind.FULL,
            base_version=base.version,
            base_policy_hash=self.head.policy_hash,
            segments=(),
            files=files,
            nnz=0,
            fingerprint_before=base.fingerprint_after,
            fingerprint_after=fingerprint_state(self.state),
            encodings=(),
        )
        return self._commit(core)

    def _commit(self, core) -> VersionManifest:
        self.head = VersionManifest(core, self.signer(core.canonical_bytes()))
        commit_version(self.run, self.head)
        write_head_hint(self.run, self.head)
        self.states[core.version] = self.state.copy()
        return self.head

    def open(self, store: ObjectStore | None = None) -> Run:
        """The run as a (wrapped) store has it."""
        return open_run(store or self.store, NAME)

    def replay(self, version: int | None = None, **options: object) -> Replayed:
        """Rebuild a version and check that it is the trainer's, bit for bit."""
        run = options.pop("run", None) or self.run
        replayed = replay(run, version, clock=self.clock, streams=2, **options)
        at = replayed.manifest.core.version
        assert at == (self.head.core.version if version is None else version)
        assert replayed.state.equals(self.states[at])
        return replayed

    def held(self, version: int) -> Held:
        """A copy of the state at a version, as something to build on."""
        point = ActiveVersion.of(load_manifest(self.run, version))
        return Held(self.states[version].copy(), point)

    def list_keys(self, part: str = "") -> list[str]:
        """Keys that contain `part`."""
        return [info.key for info in self.run.store.list("") if part in info.key]
