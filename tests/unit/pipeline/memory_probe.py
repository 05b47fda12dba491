"""Run by test_memory.py in processes of its own: prints how far resident memory grew, in bytes."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

from deltastore.clock import SystemClock
from deltastore.config import PublisherSettings
from deltastore.format.dtypes import DType
from deltastore.format.kernels import warm_up
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.mixing import fingerprint_state
from deltastore.pipeline.applier import Applier
from deltastore.pipeline.follower import Follower
from deltastore.pipeline.host import HostSource, HostTarget
from deltastore.pipeline.publisher import Publisher
from deltastore.pipeline.replay import Held
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion
from deltastore.repository.run import CheckpointFile, create_run
from deltastore.storage.fs import FileStore

MIB = 1 << 20
SETTINGS = PublisherSettings(
    diff_threads=2,
    encode_threads=2,
    streams=2,
    segment_min_bytes=1 * MIB,
    segment_max_bytes=1 * MIB,
    spool_max_bytes=4 * MIB,
)


def resident_bytes(field: str) -> int:
    """A field of this process's memory: VmRSS now, VmHWM at its highest."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise ValueError(field)


def forget_peak() -> None:
    """Begin a new highest mark."""
    Path("/proc/self/clear_refs").write_text("5")


def make_run(folder: Path, layout: Layout):
    """A run whose version 0 is all zeros, of which no file holds the weights."""
    config = folder / "config.json"
    config.write_text("{}")
    state = BitState.zeros(layout)
    return create_run(
        FileStore(folder / "bucket"),
        "r",
        layout=layout,
        files=[CheckpointFile("config.json", config)],
        fingerprint=fingerprint_state(state),
        clock=SystemClock(),
    )


def held_zero(run) -> Held:
    """Version 0 on the host; its pages are not touched, so they take no memory."""
    return Held(BitState.zeros(run.layout), ActiveVersion.of(load_manifest(run, 0)))


def publish(folder: Path, gigabytes: int) -> int:
    """Publish a change of 2^21 neighbouring elements in each of 8 places of a virtual state."""
    elements = (gigabytes << 30) // 2 // 8
    layout = Layout.build(TensorEntry(f"t{i}", DType.BF16, (elements,)) for i in range(8))
    run = make_run(folder, layout)
    source = BitState.zeros(layout)
    publisher = Publisher.open(
        run, HostSource(source), clock=SystemClock(), settings=SETTINGS, baseline=held_zero(run)
    )
    rng = np.random.default_rng(1)
    for bits in source.arrays:
        begin = int(rng.integers(0, elements - (1 << 22)))
        bits[begin : begin + (1 << 22) : 2] = rng.integers(1, 1 << 15, 1 << 21)
    before = resident_bytes("VmRSS")
    forget_peak()
    manifest = publisher.publish(1).result(300)
    grown = resident_bytes("VmHWM") - before
    publisher.close()
    assert manifest.core.nnz >= 8 << 21, manifest.core.nnz
    sys.stderr.write(f"{manifest.core.nnz}\n")
    return grown


def activate_one(folder: Path, elements: int) -> int:
    """Follow and activate a version in which one element of a large tensor has changed."""
    layout = Layout.build([TensorEntry("w", DType.BF16, (elements // 1024, 1024))])
    run = make_run(folder, layout)
    source = BitState.zeros(layout)
    publisher = Publisher.open(
        run, HostSource(source), clock=SystemClock(), baseline=held_zero(run), settings=SETTINGS
    )
    source.arrays[0][elements // 2] = 7
    publisher.publish(1).result(300)
    publisher.close()
    held = held_zero(run)
    target = HostTarget(held.state)
    follower = Follower(run, held.point, name="a", clock=SystemClock())
    applier = Applier(target, held.point, name="a", clock=SystemClock())
    before = resident_bytes("VmRSS")
    forget_peak()
    follower.catch_up()
    applier.activate(follower.take())
    grown = resident_bytes("VmHWM") - before
    assert target.state.arrays[0][elements // 2] == 7
    return grown


def many_rounds(folder: Path, rounds: int) -> int:
    """Publish, follow and activate so many versions; growth over the second half."""
    layout = Layout.build(TensorEntry(f"t{i}", DType.BF16, (1 << 16,)) for i in range(8))
    run = make_run(folder, layout)
    source = BitState.zeros(layout)
    publisher = Publisher.open(
        run, HostSource(source), clock=SystemClock(), baseline=held_zero(run), settings=SETTINGS
    )
    held = held_zero(run)
    follower = Follower(run, held.point, name="a", clock=SystemClock())
    applier = Applier(HostTarget(held.state), held.point, name="a", clock=SystemClock())
    rng = np.random.default_rng(2)
    half = 0
    for step in range(1, rounds + 1):
        for bits in source.arrays:
            bits[rng.integers(0, bits.size, 600)] += np.uint16(1)
        publisher.publish(step).result(300)
        follower.catch_up()
        applier.activate(follower.take())
        if step == rounds // 2:
            half = resident_bytes("VmRSS")
    publisher.close()
    assert held.state.equals(source)
    return resident_bytes("VmRSS") - half


def main() -> None:
    """Measure what the first argument names, with the second as its size."""
    warm_up()
    measures = {"publish": publish, "activate_one": activate_one, "many_rounds": many_rounds}
    with tempfile.TemporaryDirectory(dir=sys.argv[3]) as folder:
        sys.stdout.write(f"{measures[sys.argv[1]](Path(folder), int(sys.argv[2]))}\n")


if __name__ == "__main__":
    main()
