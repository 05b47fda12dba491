"""A tiny run on stores in memory: enough to publish, follow and activate in milliseconds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from deltastore.format.checkpoint_file import build_header
from deltastore.format.dtypes import DType
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.mixing import fingerprint_state
from deltastore.pipeline.applier import Applier
from deltastore.pipeline.follower import Follower
from deltastore.pipeline.host import HostSource, HostTarget
from deltastore.pipeline.publisher import Publisher
from deltastore.pipeline.replay import replay
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion
from deltastore.repository.run import CheckpointFile, Run, create_run, open_run
from deltastore.storage.memory import MemoryStore
from deltastore.testing.clock import FakeClock

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from deltastore.events import Event
    from deltastore.format.manifest import VersionManifest
    from deltastore.storage.store import ObjectStore

ENTRIES = (
    TensorEntry("embed.weight", DType.BF16, (64, 32), ("lm_head.weight",)),
    TensorEntry("layers.0.weight", DType.BF16, (48, 32)),
    TensorEntry("layers.0.bias", DType.F32, (48,)),
    TensorEntry("position_ids", DType.I64, (1, 16)),
    TensorEntry("scale", DType.F32, ()),
    TensorEntry("empty", DType.F16, (0, 4)),
)
RUN = "r1"


def random_state(layout: Layout, seed: int) -> BitState:
    """Random patterns, NaN payloads and subnormals among them."""
    rng = np.random.default_rng(seed)
    return BitState(
        layout,
        [
            rng.integers(0, 1 << min(s.dtype.element_bits, 63), s.elements, np.uint64).astype(
                s.dtype.bits_dtype
            )
            for s in layout.tensors
        ],
    )


def change_some(state: BitState, rng: np.random.Generator, share: float = 0.02) -> None:
    """Move some elements by a step, and some to arbitrary patterns, in place."""
    for bits in state.arrays:
        if not bits.size:
            continue
        places = rng.random(bits.size) < share
        bits[places] += rng.choice(np.array([1, -1], np.int64), int(places.sum())).astype(
            bits.dtype
        )
        wild = rng.random(bits.size) < share / 10
        bits[wild] = rng.integers(0, 1 << 16, int(wild.sum())).astype(bits.dtype)


def write_files(state: BitState, folder: Path) -> list[CheckpointFile]:
    """One safetensors shard and a config, as version 0 is uploaded."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = [TensorEntry(s.name, s.dtype, s.shape) for s in state.layout.tensors]
    header = build_header(entries)
    shard = folder / "model.safetensors"
    with shard.open("wb") as handle:
        handle.write(header.raw)
        for tensor in header.data_order():
            handle.write(state[tensor.name].tobytes())
    config = folder / "config.json"
    config.write_text("{}")
    return [CheckpointFile("model.safetensors", shard), CheckpointFile("config.json", config)]


@dataclass
class World:
    """A run, the trainer's state, and whoever follows."""

    folder: Path
    home_store: ObjectStore = field(default_factory=MemoryStore)
    region_stores: Mapping[str, ObjectStore] = field(default_factory=dict)
    clock: FakeClock = field(default_factory=FakeClock)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layout = Layout.build(ENTRIES)
        self.state = random_state(self.layout, 1)
        self.rng = np.random.default_rng(2)
        self.zero = self.state.copy()
        self.run = create_run(
            self.home_store,
            RUN,
            layout=self.layout,
            files=write_files(self.state, self.folder),
            fingerprint=fingerprint_state(self.state),
            clock=self.clock,
            regions=self.region_stores,
            probe=False,
        )

    def publisher(self, **options: object) -> Publisher:
        """Take over the run with the trainer's present state."""
        return Publisher.open(
            open_run(self.home_store, RUN),
            HostSource(self.state),
            clock=self.clock,
            sink=self.events.append,
            **options,
        )

    def step(self, publisher: Publisher, step: int) -> VersionManifest:
        """One optimizer step and its version."""
        change_some(self.state, self.rng)
        publication = publisher.publish(step)
        assert publication is not None
        return publication.result(60)

    def actor(self, store: ObjectStore | None = None, state: BitState | None = None) -> Actor:
        """An actor that holds version 0."""
        run = open_run(store or self.home_store, RUN)
        return Actor(self, run, HostTarget(state or self.zero.copy()))

    def replayed(self, version: int | None = None, store: ObjectStore | None = None) -> BitState:
        """A version rebuilt from a bucket alone."""
        run = open_run(store or self.home_store, RUN)
        return replay(run, version, clock=self.clock, streams=2).state

    def digests(self, store: MemoryStore) -> dict[str, str]:
        """Every object outside hints/ and its digest: what immutability speaks of."""
        return {
            info.key: hashlib.sha256(store.get(info.key)).hexdigest()
            for info in store.list("")
            if "/hints/" not in info.key
        }


class Actor:
    """A follower and an applier over a state on the host."""

    def __init__(self, world: World, run: Run, target: HostTarget) -> None:
        self.run = run
        self.target = target
        active = ActiveVersion.of(load_manifest(run, 0))
        options = {"name": "a1", "clock": world.clock, "sink": world.events.append}
        self.follower = Follower(run, active, **options)
        self.applier = Applier(target, active, **options)

    def advance(self) -> ActiveVersion:
        """Stage all there is and activate it."""
        self.follower.catch_up()
        update = self.follower.take()
        if update is not None:
            self.applier.activate(update)
        return self.applier.active
