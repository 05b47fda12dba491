"""Who writes a run lets its store check every body, where a store does; who reads asks nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from deltastore.errors import StorageError
from deltastore.format.canonical import canonical_json
from deltastore.format.dtypes import DType
from deltastore.format.keys import Hint, RunKeys
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.mixing import fingerprint_state
from deltastore.pipeline.host import HostSource
from deltastore.pipeline.publisher import Publisher
from deltastore.pipeline.replay import replay
from deltastore.pipeline.replicator import Region
from deltastore.repository.body_checks import have_bodies_checked
from deltastore.repository.run import Run, create_run, open_run
from deltastore.storage.memory import MemoryStore
from deltastore.storage.store import PutMode
from deltastore.storage.wrapper import StoreWrapper
from deltastore.testing.clock import FakeClock
from deltastore.testing.s3_proxy import FlipBit, Reply, S3Proxy
from tests.unit.pipeline.harness import write_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deltastore.storage.s3 import S3Store
    from deltastore.storage.store import ObjectStore

KEYS = RunKeys("r")
HINT = KEYS.hint(Hint.CHECKSUMS)
SUM = "x-amz-checksum-crc32"


def _run(store: ObjectStore, folder: Path, **options: object) -> tuple[Run, BitState]:
    layout = Layout.build([TensorEntry("w", DType.BF16, (4000,))])
    state = BitState(layout, [np.arange(4000, dtype=np.uint16)])
    run = create_run(
        store, "r", layout=layout, files=write_files(state, folder / "v0"),
        fingerprint=fingerprint_state(state), clock=FakeClock(), **options,
    )  # fmt: skip
    return run, state


def test_a_damaged_segment_never_stays_in_the_bucket(
    open_s3: Callable[..., S3Store], proxy: S3Proxy, tmp_path: Path
) -> None:
    """CASE S3: the answer is kept when the run is made; a publisher goes by it, and sends again."""
    _made, state = _run(open_s3(), tmp_path)
    store = open_s3()
    assert b'"checked":true' in store.get(HINT)
    before = len(proxy.seen)
    run = open_run(StoreWrapper(store), "r")
    publisher = Publisher.open(run, HostSource(state), clock=FakeClock())
    proxy.add("PUT", ".seg", FlipBit(3, of_request=True))
    state.arrays[0][::7] += np.uint16(1)
    publisher.publish(1).result(60)
    publisher.close()
    seen = proxy.seen[before:]
    assert not [s for s in seen if ".probe" in s.target]
    assert sum("hints/checksums" in s.target for s in seen) == 1
    segments = [s for s in seen if s.method == "PUT" and ".seg" in s.target]
    assert len(segments) == 2
    assert all(SUM in s.headers for s in segments)
    assert replay(run, clock=FakeClock()).state.equals(state)


def test_readers_ask_for_nothing_more(
    open_s3: Callable[..., S3Store], proxy: S3Proxy, tmp_path: Path
) -> None:
    """Opening and replaying a run reads no hint of it and tries nothing out."""
    _made, state = _run(open_s3(), tmp_path)
    before = len(proxy.seen)
    assert replay(open_run(open_s3(), "r"), clock=FakeClock()).state.equals(state)
    targets = [s.target for s in proxy.seen[before:]]
    assert targets
    assert not [t for t in targets if "checksums" in t or ".probe" in t]


@pytest.mark.parametrize("hint", [None, b"garbage", b"[]", b'{"checked":1,"store":"@"}', "moved"])
def test_a_missing_foreign_or_broken_answer_is_found_out_anew(
    open_s3: Callable[..., S3Store], hint: bytes | str | None
) -> None:
    """What is not the answer of this very store is not believed; the one found replaces it."""
    store = open_s3()
    if isinstance(hint, bytes):
        body = hint.replace(b"@", store.where.encode())
        store.put(HINT, body, mode=PutMode.OVERWRITE)
    elif hint is not None:
        body = canonical_json({"checked": True, "store": "s3://elsewhere at http://other"})
        store.put(HINT, body, mode=PutMode.OVERWRITE)
    assert have_bodies_checked(store, KEYS).ok
    assert store.get(HINT) == canonical_json({"checked": True, "store": store.where})
    assert list(store.list(".probe/")) == []


def test_what_a_store_refuses_is_not_sent_and_not_tried_again(
    open_s3: Callable[..., S3Store], proxy: S3Proxy
) -> None:
    """A store that does not know the header: bodies go without, and the next opening knows."""
    proxy.add("PUT", ".probe", Reply(501, "NotImplemented"), times=9)
    assert not have_bodies_checked(open_s3(), KEYS).ok
    tried = len([s for s in proxy.seen if ".probe" in s.target])
    store = open_s3()
    assert not have_bodies_checked(store, KEYS).ok
    assert len([s for s in proxy.seen if ".probe" in s.target]) == tried
    store.put("k", b"body", mode=PutMode.CREATE)
    assert SUM not in [s for s in proxy.seen if s.method == "PUT"][-1].headers


def test_an_identity_that_may_not_try_goes_without(
    open_s3: Callable[..., S3Store], proxy: S3Proxy, tmp_path: Path
) -> None:
    """A trainer whose policy ends at its run publishes all the same; an outage is an error."""
    run, state = _run(open_s3(), tmp_path, probe=False)
    proxy.add("PUT", ".probe", Reply(403, "AccessDenied"), times=9)
    publisher = Publisher.open(run, HostSource(state), clock=FakeClock())
    publisher.close()
    assert HINT not in [info.key for info in run.store.list("r/hints/")]
    proxy.add("GET", "hints/checksums", Reply(503, "SlowDown"), times=99)
    with pytest.raises(StorageError):
        have_bodies_checked(run.store, run.keys)


def test_a_region_is_asked_by_its_replicator(
    open_s3: Callable[..., S3Store], tmp_path: Path
) -> None:
    """Each region keeps its own answer, and home's publisher does not wait for it."""
    region = open_s3()
    run, state = _run(MemoryStore(), tmp_path, regions={"b": region}, probe=False)
    copy = open_run(region, "r")
    publisher = Publisher.open(
        run, HostSource(state), clock=FakeClock(), regions=[Region("b", copy)]
    )
    assert publisher.wait_regions(60) == []
    publisher.close()
    assert b'"checked":true' in region.get(HINT)
    assert not have_bodies_checked(run.store, run.keys).ok
