"""What a thousand versions cost who comes late: joins, checks and retention of a long chain.

Run by `make bench-chain`. A small model is published for a thousand versions to a folder, by the
publisher that a trainer uses, while maintenance does a round every eight versions, as a worker
beside it would. Measured on the way at chains of 1, 10, 100 and 1,000 versions: a hot join, against
the same join without shortcuts. Then `verify --deep`, and retention down to the last 50 versions
while four followers replay versions of those all the time.
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.report import Report, Target
from deltastore.adapters.safetensors_dir import checkpoint_layout, load_state, scan_checkpoint
from deltastore.clock import SystemClock
from deltastore.config import OnBacklog, PublisherSettings
from deltastore.errors import DeltastoreError
from deltastore.events import discard
from deltastore.format.kernels import warm_up
from deltastore.format.mixing import fingerprint_state
from deltastore.format.signing import unsigned
from deltastore.maintenance.anchors import AnchorPolicy, run_anchors
from deltastore.maintenance.composites import run_composites
from deltastore.maintenance.fsck import check_run
from deltastore.maintenance.retention import RetentionDone, run_retention
from deltastore.maintenance.retention_plan import RetentionPolicy
from deltastore.maintenance.room import make_room
from deltastore.maintenance.settings import MaintenanceSettings
from deltastore.pipeline.host import HostSource
from deltastore.pipeline.publisher import Publisher
from deltastore.repository.fetch import load_manifest
from deltastore.repository.rebuild import Replayed, replay
from deltastore.repository.run import Run, create_run, open_run
from deltastore.storage.fs import FileStore
from deltastore.storage.wrapper import StoreWrapper
from deltastore.testing.checkpoints import TinyShape, tiny_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.format.layout import BitState
    from deltastore.storage.store import ObjectInfo

NAME = "chain"
STREAMS = 4
DENSITY = 0.01
KEEP = 50
FOLLOWERS = 4
ROUND_EVERY = 8
GRACE_S = 1.0
CLOCK = SystemClock()
SMALL = TinyShape(vocab=2048, hidden=128, intermediate=384, layers=4, heads=4, kv_heads=2)
MADE = MaintenanceSettings(streams=STREAMS)


@dataclass
class Training:
    """A run that grows, with maintenance beside it."""

    folder: Path
    shape: TinyShape
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    publish_s: float = 0.0
    upkeep_s: float = 0.0

    def __post_init__(self) -> None:
        checkpoint = scan_checkpoint(tiny_checkpoint(self.folder / "v0", shape=self.shape))
        layout = checkpoint_layout(checkpoint)
        self.state = load_state(checkpoint, layout)
        self.run = create_run(
            FileStore(self.folder / "bucket"),
            NAME,
            layout=layout,
            files=checkpoint.files,
            fingerprint=fingerprint_state(self.state),
            clock=CLOCK,
        )
        settings = PublisherSettings(
            streams=STREAMS, on_backlog=OnBacklog.WAIT, baseline_check_every_versions=256
        )
        self.publisher = Publisher.open(
            self.run, HostSource(self.state), clock=CLOCK, settings=settings
        )  # commits version 1: the fence

    def step(self) -> None:
        """One optimizer step and its version; now and then a round of maintenance."""
        _train(self.state, self.rng)
        started_s = time.monotonic()
        version = self.publisher.head.core.version + 1
        publication = self.publisher.publish(version)
        assert publication is not None
        publication.result(60)
        self.publish_s += time.monotonic() - started_s
        if version % ROUND_EVERY == 0:
            self.upkeep()

    def upkeep(self) -> None:
        """What a maintenance worker does in a round."""
        started_s = time.monotonic()
        made = run_anchors(self.run, AnchorPolicy(), clock=CLOCK, settings=MADE)
        if made is None:
            make_room(
                self.run,
                AnchorPolicy(),
                RetentionPolicy(),
                clock=CLOCK,
                settings=MADE,
                sink=discard,
                signer=unsigned,
            )
        run_composites(self.run, clock=CLOCK, settings=MADE)
        self.upkeep_s += time.monotonic() - started_s

    @property
    def head(self) -> int:
        """The newest version."""
        return self.publisher.head.core.version


def _train(state: BitState, rng: np.random.Generator) -> None:
    """Move about DENSITY of the elements by a step of their pattern, as AdamW does on BF16."""
    for bits in state.arrays:
        count = rng.binomial(bits.size, DENSITY)
        places = rng.integers(0, bits.size, count)
        bits[places] += rng.choice(np.array([1, -1], np.int64), count).astype(bits.dtype)


class WithoutShortcuts(StoreWrapper):
    """A bucket as it would be without maintenance."""

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Pass a listing on, shortcuts left out."""
        for info in super().list(prefix, start_after=start_after):
            if "/composites/" not in info.key and "/anchors/" not in info.key:
                yield info


def measure_join(report: Report, training: Training) -> None:
    """A join of HEAD, with shortcuts and without, and whether the bound holds."""
    run, head = training.run, training.head
    plain = open_run(WithoutShortcuts(FileStore(training.folder / "bucket")), NAME)
    joined = _join(run)
    slow = _join(plain)
    assert joined.state.equals(training.state)
    assert slow.state.equals(training.state)
    found, bare = joined.report, slow.report
    where = {"versions": head, "via": found.via}
    wholes = sum(found.via.count(kind) for kind in ("anchor v", "full v"))
    parts = (("whole states", wholes, 1), ("composites", found.composites, 2))
    for name, count, most in (*parts, ("deltas", found.links, 7)):
        report.add(f"join: {name}", count, "", target=Target(most=most), versions=head)
    report.add(
        "join: bytes",
        found.size_bytes / 1e6,
        "MB",
        baseline=bare.size_bytes / 1e6,
        density=DENSITY,
        larger_is_better=False,
        **where,
    )
    report.add(
        "join: time",
        found.seconds,
        "s",
        baseline=bare.seconds,
        density=DENSITY,
        larger_is_better=False,
        versions=head,
    )


def _join(run: Run) -> Replayed:
    return replay(run, clock=CLOCK, streams=STREAMS)


def measure_check(report: Report, training: Training) -> None:
    """`verify --deep` of the whole chain and all its shortcuts."""
    found = check_run(training.run, deep=True, streams=STREAMS, clock=CLOCK)
    versions = training.head + 1
    report.add("verify --deep: findings", len(found.findings), "", target=Target(most=0))
    report.add("verify --deep: versions proved", found.replayed, "", target=Target(least=versions))
    report.add(
        "verify --deep: shortcuts proved",
        found.proved,
        "",
        target=Target(least=max(1, found.shortcuts)),
    )
    report.add("verify --deep: time", found.seconds, "s", megabytes=found.size_bytes // 1_000_000)


@dataclass
class Follower:
    """Replays versions among the last KEEP, over and over, and says what went wrong."""

    run: Run
    head: int
    seed: int
    replays: int = 0
    plans: int = 0
    failures: list[str] = field(default_factory=list)

    def follow(self, stopping: threading.Event) -> None:
        """Until told to stop, and at least once."""
        chance = random.Random(self.seed)
        while not stopping.is_set() or not self.replays:
            version = chance.randint(self.head - KEEP + 1, self.head)
            try:
                done = replay(self.run, version, clock=CLOCK, streams=1)
            except DeltastoreError as err:
                self.failures.append(f"{version}: {err}")
                self.replays += 1
                continue
            wanted = load_manifest(self.run, version).core.fingerprint_after
            if fingerprint_state(done.state) != wanted:
                self.failures.append(f"{version}: another state")
            self.replays += 1
            self.plans += done.report.plans


def measure_retention(report: Report, training: Training) -> None:
    """Retention to the last KEEP versions while followers replay them."""
    run, head = training.run, training.head
    bucket = training.folder / "bucket"
    stopping = threading.Event()
    followers = [
        Follower(open_run(FileStore(bucket), NAME), head, seed) for seed in range(FOLLOWERS)
    ]
    threads = [threading.Thread(target=f.follow, args=(stopping,)) for f in followers]
    before_bytes = _stored_bytes(run)
    for thread in threads:
        thread.start()
    started_s = time.monotonic()
    policy = RetentionPolicy(keep_versions=KEEP, grace_s=GRACE_S, keep_version_zero=False)
    try:
        make_room(
            run,
            AnchorPolicy(),
            policy,
            clock=CLOCK,
            settings=MADE,
            sink=discard,
            signer=unsigned,
        )
        done = _retain(run, policy)
        seconds = time.monotonic() - started_s
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
    failures = [text for follower in followers for text in follower.failures]
    for text in failures[:5]:
        print(f"a follower failed: {text}")
    replays = sum(follower.replays for follower in followers)
    report.add(
        "retention: followers' failures", len(failures), "", target=Target(most=0), replays=replays
    )
    report.add("retention: floor", done.floor, "", target=Target(least=1), versions=head)
    report.add("retention: objects deleted", done.deleted, "", target=Target(least=1))
    report.add(
        "retention: bytes kept",
        _stored_bytes(run) / 1e6,
        "MB",
        baseline=before_bytes / 1e6,
        larger_is_better=False,
    )
    report.add("retention: time", seconds, "s", grace_s=GRACE_S)
    whole = 0
    for version in range(max(0, head - KEEP + 1), head + 1):
        done_one = replay(run, version, clock=CLOCK, streams=STREAMS)
        wanted = load_manifest(run, version).core.fingerprint_after
        whole += fingerprint_state(done_one.state) == wanted
    report.add("retention: versions replayable", whole, "", target=Target(least=min(KEEP, head)))
    checked = check_run(run, deep=True, streams=STREAMS, clock=CLOCK)
    report.add("retention: findings after", len(checked.findings), "", target=Target(most=0))


def _retain(run: Run, policy: RetentionPolicy) -> RetentionDone:
    """Rounds until the floor is up and what is below it has gone."""
    deleted = 0
    while True:
        done = run_retention(run, policy, dry_run=False, streams=STREAMS)
        deleted += done.deleted
        if done.plan.settled == done.plan.floor and not done.deleted:
            return RetentionDone(done.plan, done.floor, deleted)
        time.sleep(GRACE_S / 4)


def _stored_bytes(run: Run) -> int:
    return sum(info.size_bytes for info in run.store.list(run.keys.root))


def main(versions: int = 1000, shape: TinyShape = SMALL) -> int:
    """Grow, join, check, retain; 0 when every bound holds."""
    warm_up()
    with tempfile.TemporaryDirectory(prefix="deltastore-bench-") as folder:
        training = Training(Path(folder), shape)
        report = Report(
            "chain",
            versions=versions,
            elements=training.run.layout.elements,
            dense_mb=round(training.run.dense_bytes / 1e6, 2),
            seed=7,
            streams=STREAMS,
        )
        joins = {1, 10, 100, versions}
        while True:
            if training.head in joins:
                training.upkeep()
                measure_join(report, training)
            if training.head >= versions:
                break
            training.step()
        training.publisher.close()
        report.add("publish: per version", training.publish_s / versions, "s", density=DENSITY)
        report.add("maintenance: per version", training.upkeep_s / versions, "s", density=DENSITY)
        deltas = [load_manifest(training.run, v).core.delta_bytes for v in range(2, versions + 1)]
        report.add(
            "delta: mean",
            float(np.mean(deltas)) / 1e3,
            "kB",
            baseline=training.run.dense_bytes / 1e3,
            density=DENSITY,
            larger_is_better=False,
        )
        measure_check(report, training)
        measure_retention(report, training)
        return report.finish()


if __name__ == "__main__":
    sys.exit(main(*(int(word) for word in sys.argv[1:2])))
