"""What a version costs from the trainer's weights to an actor's, against doing one thing at a time.

Run by `make bench-pipeline`. The link is a shaped one in front of a real S3 server, on the real
clock; its speed is set from what encoding takes here, so that the ratios hold on any machine. Work
of one core is measured in process time, the least of several runs; waiting in wall time.

The server has a core of its own, for a trainer's bucket is not on the trainer's machine: on shared
cores its work (10 ms per MB, more than encoding) is added to the encoder's, and no overlap can hide
it. The state is a quarter of 8 B parameters and changes as one RL step does, so that a request
weighs against its segment as it would there.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.report import Report, Target
from benchmarks.traces import GaussianTrace
from deltastore.chain.diff import diff_tensor
from deltastore.clock import SystemClock
from deltastore.config import PublisherSettings
from deltastore.format.block import total_change
from deltastore.format.dtypes import DType
from deltastore.format.fingerprint import ZERO
from deltastore.format.kernels import warm_up
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.mixing import fingerprint_state
from deltastore.format.segment import SegmentIdentity, decode_segment, encode_segment
from deltastore.pipeline.applier import Applier
from deltastore.pipeline.differ import Differ
from deltastore.pipeline.host import HostSource, HostTarget
from deltastore.pipeline.publisher import Publisher
from deltastore.pipeline.replay import Held
from deltastore.pipeline.staged import StagedUpdate
from deltastore.repository.commit import write_head_hint
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion
from deltastore.repository.run import CheckpointFile, create_run, open_run
from deltastore.storage.memory import MemoryStore
from deltastore.storage.s3 import S3Store
from deltastore.storage.s3_settings import S3Settings
from deltastore.storage.store import Body, PutMode, PutOutcome
from deltastore.storage.transfer import Uploader
from deltastore.storage.wrapper import StoreWrapper
from deltastore.testing.faults import BandwidthStore
from deltastore.testing.servers import SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.format.manifest import VersionManifest
    from deltastore.storage.store import ObjectStore

TENSORS = 64
TENSOR_ELEMENTS = 32 << 20
DENSITY = 0.0096
RATIOS = (0.5, 1.0, 2.0, 4.0)
"""Upload time over encode time."""
RUNS = 5
CLOCK = SystemClock()
# A delta of 8 B parameters has 16 segments of some 6 MB; this state has a quarter, in as many.
SETTINGS = PublisherSettings(segment_min_bytes=3 << 19, segment_max_bytes=3 << 19)
RUN = "bench"


class Trainer:
    """A state that moves between two points, as often as wanted, by the same changes."""

    def __init__(self, tensors: int, elements: int, density: float) -> None:
        trace = GaussianTrace(elements)
        self.points = (trace.base, trace.updated(density))
        self.layout = Layout.build(
            TensorEntry(f"t{i}", DType.BF16, (elements,)) for i in range(tensors)
        )
        self.at = 0
        # One array under all names: the diff reads the same bytes that it would read anyway.
        self.source = HostSource(BitState(self.layout, [self.points[0]] * tensors))

    @property
    def density(self) -> float:
        """Share of the elements that a version changes."""
        return float(np.count_nonzero(self.points[0] != self.points[1]) / self.points[0].size)

    def step(self) -> None:
        """Move to the other point."""
        self.at = 1 - self.at
        self.source.state = BitState(self.layout, [self.points[self.at]] * len(self.layout))

    def held(self) -> BitState:
        """A copy of its own for a publisher."""
        return self.source.state.copy()


class Link(StoreWrapper):
    """A bucket behind a line whose speed can be set."""

    def __init__(self, bucket: ObjectStore, *, bytes_per_s: float, clock: SystemClock) -> None:
        super().__init__(bucket)
        self._clock = clock
        self.set_speed(bytes_per_s)

    def set_speed(self, bytes_per_s: float) -> None:
        """Give the line another speed."""
        self._line = BandwidthStore(self.inner, bytes_per_s=bytes_per_s, clock=self._clock)

    def put(self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        """A put that takes its time."""
        return self._line.put(key, body, mode=mode, sha256=sha256)


@contextmanager
def server_apart(folder: Path) -> Iterator[SeaweedServer]:
    """An S3 server on one core, everything else of this process on the others, if there are any."""
    cores = sorted(os.sched_getaffinity(0))
    ours, its = (cores[:-1], cores[-1:]) if len(cores) > 1 else (cores, cores)
    os.sched_setaffinity(0, its)  # a process inherits the cores of the thread that starts it
    try:
        with SeaweedServer(folder) as server:
            os.sched_setaffinity(0, ours)  # and so does every thread from here on
            yield server
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def published(trainer: Trainer, store: ObjectStore, folder: Path) -> Iterator[Publisher]:
    """A publisher of a new run on that store, one version ahead so that segments are sized."""
    config = folder / "config.json"
    config.write_text("{}")
    state = trainer.held()
    run = create_run(
        store,
        RUN,
        layout=trainer.layout,
        files=[CheckpointFile("config.json", config)],
        fingerprint=fingerprint_state(state),
        clock=CLOCK,
        probe=False,
    )
    held = Held(state, ActiveVersion.of(load_manifest(run, 0)))
    publisher = Publisher.open(run, trainer.source, clock=CLOCK, settings=SETTINGS, baseline=held)
    try:
        publish(trainer, publisher)
        yield publisher
    finally:
        publisher.close()


@dataclass(frozen=True, slots=True)
class Published:
    """One version, measured."""

    seconds: float
    """Until its commit."""
    cpu_s: float
    """Of all threads, until the baseline is that version."""
    captured_s: float
    """Until the weights may change."""
    manifest: VersionManifest


def publish(trainer: Trainer, publisher: Publisher, *, step: bool = True) -> Published:
    """Publish the state after another step, or as it is."""
    if step:
        trainer.step()
    started, cpu = time.perf_counter(), time.process_time()
    publication = publisher.publish(1)
    publication.wait_captured(600)
    captured_s = time.perf_counter() - started
    manifest = publication.result(600)
    seconds = time.perf_counter() - started
    publisher._worker.submit(int).result(600)  # the baseline has moved as well
    return Published(seconds, time.process_time() - cpu, captured_s, manifest)


def upload_alone_s(store: ObjectStore, bodies: list[bytes], manifest: VersionManifest) -> float:
    """Seconds to send a version's bodies, its manifest and the hint, and do nothing else."""
    run = open_run(store, RUN)
    began = time.perf_counter()
    with Uploader(streams=SETTINGS.streams) as uploader:
        for i, body in enumerate(bodies):
            key = f"{RUN}/alone/{began}-{i}"
            uploader.submit(run.store, key, body, mode=PutMode.CREATE)
    run.store.put(f"{RUN}/alone/{began}", manifest.to_bytes(), mode=PutMode.CREATE)
    write_head_hint(run, manifest)
    return time.perf_counter() - began


def cut_through(report: Report, trainer: Trainer, bucket: ObjectStore, folder: Path) -> None:
    """Publishing over links of several speeds, against encoding and uploading alone.

    All three are measured one after the other, several times, so that whatever else the machine
    does meets them alike; medians are compared.
    """
    density = trainer.density
    link = Link(bucket, bytes_per_s=1e12, clock=CLOCK)
    with (
        published(trainer, MemoryStore(), folder) as unlinked,
        published(trainer, link, folder) as linked,
    ):
        first = [publish(trainer, unlinked) for _ in range(RUNS)]
        publish(trainer, linked, step=False)
        manifest = first[-1].manifest
        stored = unlinked._home.store
        bodies = [stored.get(ref.key) for ref in manifest.core.segments]
        size_bytes = sum(len(body) for body in bodies)
        encode_s = statistics.median(one.seconds for one in first)
        captured_s = statistics.median(one.captured_s for one in first)
        report.add(
            "publish without a link (diff, encode, commit)",
            trainer.layout.size_bytes / encode_s / 1e9,
            "GB/s of model",
            density=density,
        )
        report.add("weights may change after", captured_s / encode_s, "x of that", density=density)
        report.add("delta", size_bytes / 1e6, "MB", density=density, segments=len(bodies))
        for ratio in RATIOS:
            link.set_speed(size_bytes / (encode_s * ratio))
            encode, upload, wall = [], [], []
            for _ in range(RUNS):
                encode.append(publish(trainer, unlinked).seconds)
                upload.append(upload_alone_s(link, bodies, manifest))
                wall.append(publish(trainer, linked, step=False).seconds)
            alone_s = [statistics.median(encode), statistics.median(upload)]
            report.add(
                "publish over a link: wall time over the longer of encode and upload",
                statistics.median(wall) / max(alone_s),
                "x",
                baseline=sum(alone_s) / max(alone_s),
                target=Target(most=1.15),
                density=density,
                larger_is_better=False,
                upload_to_encode=f"{alone_s[1] / alone_s[0]:.2f}",
            )


def least_cpu_s(action, runs: int = 5) -> float:
    """Process seconds of the cheapest of several runs."""
    times = []
    for _ in range(runs):
        started = time.process_time()
        action()
        times.append(time.process_time() - started)
    return min(times)


def diff_threads(report: Report, trainer: Trainer) -> None:
    """Whether comparing a tensor on two threads pays here."""
    base = BitState(trainer.layout, [trainer.points[1 - trainer.at]] * len(trainer.layout))
    seconds = {}
    for threads in (1, 2):
        differ = Differ(trainer.layout, threads=threads)
        times = []
        for _ in range(RUNS):
            started = time.perf_counter()
            for _block in differ.blocks(trainer.source, base, ZERO):
                pass
            times.append(time.perf_counter() - started)
        seconds[threads] = min(times)
        differ.close()
    gigabytes = trainer.layout.size_bytes / 1e9
    report.add(
        "diff on two threads (wall time)",
        gigabytes / seconds[2],
        "GB/s of model",
        baseline=gigabytes / seconds[1],
        density=trainer.density,
    )


def applying(report: Report, density: float) -> None:
    """Decode and activate one version through the Applier, on one core, per change."""
    trainer = Trainer(1, TENSOR_ELEMENTS, density)
    old, new = trainer.points
    blocks = list(diff_tensor(trainer.layout, 0, old, new))
    body = encode_segment(trainer.layout, SegmentIdentity(trainer.layout.digest, 0, 1), blocks)
    nnz = sum(block.nnz for block in blocks)
    before = fingerprint_state(trainer.source.state)
    base = ActiveVersion(0, "0" * 64, before, 1)
    target = ActiveVersion(1, "1" * 64, before + total_change(blocks), 1)
    decode_s = least_cpu_s(lambda: decode_segment(trainer.layout, body))
    decoded = decode_segment(trainer.layout, body).blocks
    pauses = []
    for _ in range(5):
        host = HostTarget(BitState(trainer.layout, [old.copy()]))
        applier = Applier(host, base, name="a", clock=CLOCK)
        update = StagedUpdate(base, target, decoded, len(body))
        pauses.append(least_cpu_s(lambda a=applier, u=update: a.activate(u), runs=1))
    pause_s = min(pauses)
    scan_s = least_cpu_s(lambda: old.copy(), runs=3)
    report.add(
        "activate (two passes, proof included): in the pause",
        pause_s / nnz * 1e9,
        "ns per change",
        target=Target(most=25),
        density=trainer.density,
    )
    report.add(
        "decode and activate",
        (decode_s + pause_s) / nnz * 1e9,
        "ns per change",
        baseline=scan_s / nnz * 1e9,
        target=Target(most=35),
        density=trainer.density,
        larger_is_better=False,
        baseline_is="copying the whole tensor once",
    )


def main() -> int:
    """Measure, print, write build/bench/pipeline.json."""
    from benchmarks.many_tensors import many_tensors  # which uses what is defined here

    warm_up()
    trainer = Trainer(TENSORS, TENSOR_ELEMENTS, DENSITY)
    report = Report(
        "pipeline",
        seed=3,
        streams=SETTINGS.streams,
        encode_threads=SETTINGS.encode_threads,
        segment_bytes=SETTINGS.segment_max_bytes,
        state_bytes=trainer.layout.size_bytes,
        server_on_its_own_core=len(os.sched_getaffinity(0)) > 1,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with server_apart(folder / "s3") as server:
            bucket = S3Store(
                S3Settings(
                    bucket=server.create_bucket("bench"),
                    endpoint_url=server.endpoint,
                    region=server.region,
                    access_key=server.access_key,
                    secret_key=server.secret_key,
                )
            )
            cut_through(report, trainer, bucket, folder)
            bucket.close()
        diff_threads(report, trainer)
        for density in (0.0096, 0.03):
            applying(report, density)
        many_tensors(report, folder)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
