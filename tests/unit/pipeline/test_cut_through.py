"""The line is busy while the weights are still being read, and what waits is bounded."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from deltastore.clock import SystemClock
from deltastore.config import PublisherSettings
from deltastore.errors import IntegrityError, InvalidInputError, Kind, StorageError
from deltastore.events import StageFinished
from deltastore.format.box import MAX_BOX_ELEMENTS
from deltastore.format.dtypes import DType
from deltastore.format.fingerprint import ZERO
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.mixing import fingerprint_state
from deltastore.pipeline.differ import Differ
from deltastore.pipeline.host import HostSource
from deltastore.pipeline.publisher import Publisher
from deltastore.pipeline.replay import replay
from deltastore.repository.run import create_run, open_run
from deltastore.storage.memory import MemoryStore
from deltastore.storage.s3 import S3Store
from deltastore.storage.s3_settings import S3Settings
from deltastore.testing.faults import Fail, FaultyStore, Op, fail_at
from tests.faults.test_replication import StalledStore
from tests.unit.pipeline.harness import RUN, World, change_some, write_files

SMALL_SEGMENTS = PublisherSettings(segment_min_bytes=1 << 16, segment_max_bytes=1 << 16)


class GatedSource(HostSource):
    """Does not give its last tensor away before `gate` is set."""

    def __init__(self, state: BitState, gate: threading.Event) -> None:
        super().__init__(state)
        self.gate = gate
        self.waited: bool | None = None

    def boxes(self, layout: Layout):
        """Boxes in layout order; the last one waits."""
        last = len(layout) - 1
        for box in super().boxes(layout):
            if box.tensor == last:
                self.waited = self.gate.wait(60)
            yield box


def _many_tensors(tmp_path, store, tensors=8, elements=1 << 17):
    layout = Layout.build(TensorEntry(f"t{i}", DType.BF16, (elements,)) for i in range(tensors))
    state = BitState.zeros(layout)
    run = create_run(
        store,
        RUN,
        layout=layout,
        files=write_files(state, tmp_path / "v0"),
        fingerprint=fingerprint_state(state),
        clock=SystemClock(),
        probe=False,
    )
    return run, state


def test_first_segment_is_in_the_bucket_before_the_last_tensor_is_read(
    tmp_path, s3_server, s3_bucket
):
    """Cut-through: a real server holds a segment while the last tensor has not been diffed."""
    settings = S3Settings(
        bucket=s3_bucket,
        endpoint_url=s3_server.endpoint,
        region=s3_server.region,
        access_key=s3_server.access_key,
        secret_key=s3_server.secret_key,
    )
    store = S3Store(settings)
    run, state = _many_tensors(tmp_path, store)
    gate = threading.Event()
    gate.set()
    source = GatedSource(state, gate)
    seen: list[str] = []
    one_at_a_time = threading.Lock()

    def announced(version, ref):
        with one_at_a_time:
            if not gate.is_set():  # nothing but the bucket itself is asked
                found = s3_server.client().list_objects_v2(
                    Bucket=s3_bucket, Prefix=f"{RUN}/deltas/{version:010d}/"
                )
                seen.extend(entry["Key"] for entry in found["Contents"])
            gate.set()

    publisher = Publisher.open(
        run, source, clock=SystemClock(), settings=SMALL_SEGMENTS, announce=announced
    )
    gate.clear()
    rng = np.random.default_rng(5)
    for bits in state.arrays:
        bits ^= rng.integers(1, 1 << 16, bits.size).astype(np.uint16)
    publication = publisher.publish(1)
    manifest = publication.result(60)
    publisher.close()
    assert source.waited is True
    assert seen
    assert set(seen) < {ref.key for ref in manifest.core.segments}
    assert replay(run, clock=SystemClock()).state.equals(state)
    store.close()


def _stands_in(thread_prefix: str, function: str) -> bool:
    """Whether some thread of that name waits, as deep as it is, inside that function."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident)
        while frame is not None and thread.name.startswith(thread_prefix):
            if frame.f_code.co_name == function:
                return True
            frame = frame.f_back
    return False


def test_a_line_that_hangs_stops_the_reading_of_weights(tmp_path):
    """While no put ends, encoded bodies fill the spool, segments the encoders' queue, and then no
    weights are read: memory is bounded however large the delta. All goes on when the line does."""
    store = StalledStore(MemoryStore())
    store.go.set()
    run, state = _many_tensors(tmp_path, store, tensors=16)
    spool_bytes = 1 << 20
    settings = replace(SMALL_SEGMENTS, spool_max_bytes=spool_bytes)
    publisher = Publisher.open(run, HostSource(state), clock=SystemClock(), settings=settings)
    store.go.clear()
    rng = np.random.default_rng(5)
    for bits in state.arrays:
        bits ^= rng.integers(1, 1 << 16, bits.size).astype(np.uint16)
    publication = publisher.publish(1)
    clock, never = SystemClock(), threading.Event()

    def full():
        submitter_waits = len(publisher._uploader._changed._waiters) == settings.encode_threads
        return submitter_waits and _stands_in("publish", "flush")

    while not (full() or publication.captured.is_set()):
        clock.wait(never, 0.005)
    assert not publication.captured.is_set()
    assert 0 < publisher._uploader.pending_bytes <= spool_bytes
    store.go.set()
    core = publication.result(60).core
    assert core.delta_bytes > 3 * spool_bytes  # else it would have fitted in somewhere
    publisher.close()
    assert replay(run, clock=SystemClock()).state.equals(state)


def test_announced_segments_are_those_of_the_manifest(tmp_path):
    """Every segment is announced once, after home has it, and none that the manifest lacks."""
    store = MemoryStore()
    run, state = _many_tensors(tmp_path, store, tensors=3)
    told = []

    def announced(version, ref):
        assert store.head(ref.key).size_bytes == ref.size_bytes
        told.append((version, ref))

    publisher = Publisher.open(
        run, HostSource(state), clock=SystemClock(), settings=SMALL_SEGMENTS, announce=announced
    )
    state.arrays[0][:] = np.arange(state.arrays[0].size).astype(np.uint16)
    core = publisher.publish(1).result(60).core
    publisher.close()
    assert sorted(told, key=lambda t: t[1].key) == [(core.version, ref) for ref in core.segments]


@pytest.mark.parametrize("threads", [1, 3])
def test_diff_on_threads_finds_the_same_blocks(threads):
    """However many threads compare a tensor, the blocks and their order are the same."""
    elements = 3 * MAX_BOX_ELEMENTS + 17
    layout = Layout.build([TensorEntry("w", DType.BF16, (elements,))])
    base, new = BitState.zeros(layout), BitState.zeros(layout)
    places = [0, 5, MAX_BOX_ELEMENTS - 1, MAX_BOX_ELEMENTS, elements - 1]
    new.arrays[0][places] = 1
    differ = Differ(layout, threads=threads)
    blocks = list(differ.blocks(HostSource(new), base, ZERO))
    differ.close()
    found = [block.box.start[0] + int(i) for block in blocks for i in block.indices]
    assert found == places


def test_source_that_fails_between_runs_of_a_tensor(tmp_path):
    """A consumer that stops in the middle of a tensor leaves no thread that still reads it."""
    layout = Layout.build([TensorEntry("w", DType.BF16, (5 * MAX_BOX_ELEMENTS,))])
    base, new = BitState.zeros(layout), BitState.zeros(layout)
    new.arrays[0][:: 1 << 20] = 1
    differ = Differ(layout, threads=2)
    blocks = differ.blocks(HostSource(new), base, ZERO)
    next(blocks)
    blocks.close()
    assert len(list(differ.blocks(HostSource(new), base, ZERO))) == 5
    differ.close()


def test_source_that_leaves_out_a_tensor_is_named():
    """A source whose boxes do not cover a tensor is refused by that tensor's name."""
    layout = Layout.build(TensorEntry(f"t{i}", DType.BF16, (4,)) for i in range(2))
    state = BitState.zeros(layout)

    class Half(HostSource):
        def boxes(self, layout):
            yield next(iter(super().boxes(layout)))

    differ = Differ(layout, threads=1)
    with pytest.raises(InvalidInputError, match="t1"):
        list(differ.blocks(Half(state), state, ZERO))
    differ.close()


def test_stages_are_reported(tmp_path):
    """Each stage of a version is one event with its bytes, parts and seconds."""
    world = World(tmp_path)
    publisher = world.publisher()
    manifest = world.step(publisher, 1)
    publisher.close()
    stages = {
        e.stage: e
        for e in world.events
        if isinstance(e, StageFinished) and e.version == manifest.core.version
    }
    assert list(stages) == ["capture", "encode", "upload", "commit"]
    assert stages["upload"].size_bytes == manifest.core.delta_bytes
    assert stages["upload"].parts == len(manifest.core.segments)
    assert {e.region for e in stages.values()} == {"home"}


@pytest.mark.parametrize(
    "failure", [IntegrityError("does not apply", kind=Kind.FINGERPRINT), MemoryError("no room")]
)
def test_baseline_that_cannot_be_promoted_is_rebuilt(tmp_path, monkeypatch, failure):
    """A committed delta that is not wholly applied costs a rebuild, no wrong version."""
    world = World(tmp_path)
    publisher = world.publisher()

    def refuse(state, blocks):
        state.arrays[0][:7] ^= 1
        raise failure

    with monkeypatch.context() as patch:
        patch.setattr("deltastore.pipeline.baseline.apply_blocks", refuse)
        world.step(publisher, 1)
        publisher._worker.submit(int).result(60)  # behind the promotion
    world.step(publisher, 2)
    publisher.close()
    assert world.replayed().equals(world.state)


def test_bodies_taken_by_a_janitor_are_not_waited_for(tmp_path):
    """CASE C8: an unanswered manifest whose bodies are gone is given up; the next covers it."""
    store = FaultyStore(MemoryStore())
    world = World(tmp_path, home_store=store)
    publisher = world.publisher()
    store.add(fail_at(Op.PUT, 1, Fail(), key_contains="/versions/"))
    change_some(world.state, world.rng)
    with pytest.raises(StorageError):
        publisher.publish(1).result(60)
    store.delete([info.key for info in store.list(f"{RUN}/deltas/0000000002/")])
    manifest = world.step(publisher, 2)
    publisher.close()
    assert manifest.core.version == 2
    assert replay(open_run(store, RUN), clock=world.clock).state.equals(world.state)
