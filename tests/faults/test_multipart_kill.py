"""A writer killed in the middle of an upload in parts leaves one that the janitor ends when it is
old: never one to which somebody still sends."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.errors import NotFoundError
from deltastore.maintenance.janitor import JanitorPolicy, run_janitor
from deltastore.repository.run import open_run
from deltastore.storage.store import PutMode, PutOutcome
from deltastore.testing.s3_proxy import Before, Choose, DateLater, DropResponse, Reply, S3Proxy
from tests.faults.crash_kit import ROOT
from tests.unit.pipeline.harness import RUN, World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deltastore.repository.run import Run
    from deltastore.storage.s3 import S3Store
    from deltastore.testing.servers import SeaweedServer

PART, PARTS = 5 << 20, 4
SEED, SIZE = 7, 3 * PART + 1000
DEAD, LIVE = (f"{RUN}/deltas/0000000001/0000-{letter * 64}" for letter in "ab")
TWO_DAYS_S = 2 * 86_400.0
_WAIT_S = 60.0
_WRITER = """
import json, random, sys
from deltastore.storage.s3 import S3Store
from deltastore.storage.s3_settings import S3Settings
from deltastore.storage.store import PutMode
settings, key, seed, size = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
store = S3Store(S3Settings(**settings, streams=1))
sys.stdout.write(store.put(key, random.Random(seed).randbytes(size), mode=PutMode.CREATE).name)
"""


class Writers:
    """Processes that put a body of four parts through the proxy, one part at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self.started: list[subprocess.Popen[str]] = []

    def start(self, key: str) -> subprocess.Popen[str]:
        """One more."""
        arguments = [json.dumps(self._settings), key, str(SEED), str(SIZE)]
        self.started.append(
            subprocess.Popen(
                [sys.executable, "-c", _WRITER, *arguments],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        return self.started[-1]

    def kill(self) -> None:
        """SIGKILL the first."""
        self.started[0].send_signal(signal.SIGKILL)

    def kill_unseen(self, _target: str) -> Reply:
        """The same, and the server does not see the request at which it happens."""
        self.kill()
        return Reply(503)


@pytest.fixture
def writers(s3_server: SeaweedServer, s3_bucket: str, proxy: S3Proxy) -> Iterator[Writers]:
    """None yet; what was started ends with the test."""
    made = Writers(
        {
            "bucket": s3_bucket,
            "endpoint_url": proxy.endpoint,
            "access_key": s3_server.access_key,
            "secret_key": s3_server.secret_key,
            "part_bytes": PART,
        }
    )
    yield made
    for writer in made.started:
        writer.kill()
        writer.communicate()


@pytest.fixture
def run(s3_store: S3Store, tmp_path: Path) -> Run:
    """A run in the bucket: what the janitor looks after."""
    World(tmp_path, home_store=s3_store)
    return open_run(s3_store, RUN)


@pytest.fixture(scope="module")
def body() -> bytes:
    """What the writers put."""
    return random.Random(SEED).randbytes(SIZE)


def _ended_by_janitor(run: Run) -> list[str]:
    done = run_janitor(run, JanitorPolicy(), dry_run=False, streams=2)
    return [upload.key for upload in done.uploads]


def _parts_held(server: SeaweedServer, bucket: str) -> list[int]:
    """How many parts the server holds of each upload, asked behind the library's back."""
    client = server.client()
    try:
        uploads = client.list_multipart_uploads(Bucket=bucket).get("Uploads", ())
        return [
            len(client.list_parts(Bucket=bucket, Key=u["Key"], UploadId=u["UploadId"])["Parts"])
            for u in uploads
        ]
    finally:
        client.close()


@pytest.mark.parametrize("sent", [1, 2, PARTS])
def test_killed_after_some_parts(
    writers: Writers,
    proxy: S3Proxy,
    s3_store: S3Store,
    s3_server: SeaweedServer,
    s3_bucket: str,
    run: Run,
    body: bytes,
    sent: int,
) -> None:
    """CASE S14: SIGKILL after the first part, in the middle, or before complete: there is no
    object; another put of it succeeds; the janitor ends the upload when it is old, not before."""
    at = ("PUT", f"partNumber={sent + 1}") if sent < PARTS else ("POST", f"{DEAD}?uploadId=")
    proxy.add(*at, Choose(writers.kill_unseen))
    assert writers.start(DEAD).wait(_WAIT_S) == -signal.SIGKILL
    assert _parts_held(s3_server, s3_bucket) == [sent]
    with pytest.raises(NotFoundError):
        s3_store.head(DEAD)
    (left,) = s3_store.incomplete_uploads(f"{RUN}/")
    assert left.key == DEAD
    assert left.idle_s < _WAIT_S
    assert _ended_by_janitor(run) == []

    assert s3_store.put(DEAD, body, mode=PutMode.CREATE) is PutOutcome.WRITTEN
    assert _parts_held(s3_server, s3_bucket) == [sent]  # it is another upload
    proxy.add("GET", f"{DEAD}?", DateLater(TWO_DAYS_S), times=9)
    assert _ended_by_janitor(run) == [DEAD]
    assert _parts_held(s3_server, s3_bucket) == []
    assert _ended_by_janitor(run) == []
    assert s3_store.get(DEAD) == body


def test_killed_when_the_upload_is_complete_and_nobody_has_heard_it(
    writers: Writers,
    proxy: S3Proxy,
    s3_store: S3Store,
    s3_server: SeaweedServer,
    s3_bucket: str,
    body: bytes,
) -> None:
    """CASE S4: SIGKILL between a completion whose answer is lost and the look at what came of it:
    the object is there, whole, no upload is left, and another put finds it as its own."""
    completed = threading.Event()
    proxy.add("POST", f"{DEAD}?uploadId=", DropResponse())

    def look(_target: str) -> Reply | None:
        completes = [s for s in proxy.seen if s.method == "POST" and "uploadId=" in s.target]
        if not completes:
            return None  # the look before the upload
        completed.set()
        return writers.kill_unseen(_target)

    for method in ("GET", "HEAD"):
        proxy.add(method, DEAD, Choose(look), times=9)
    assert writers.start(DEAD).wait(_WAIT_S) == -signal.SIGKILL
    assert completed.is_set()
    proxy.forget()
    assert _parts_held(s3_server, s3_bucket) == []
    assert s3_store.get(DEAD) == body
    assert s3_store.put(DEAD, body, mode=PutMode.CREATE) is PutOutcome.ALREADY_OURS


def test_the_upload_of_a_living_process_is_left(
    writers: Writers, proxy: S3Proxy, s3_store: S3Store, run: Run, body: bytes
) -> None:
    """CASE S14: beside a dead upload of two days another process is in the middle of its own: the
    dead one goes, the other is completed."""
    proxy.add("PUT", "partNumber=2", Choose(writers.kill_unseen))
    assert writers.start(DEAD).wait(_WAIT_S) == -signal.SIGKILL

    arrived, go = threading.Event(), threading.Event()

    def hold() -> None:
        arrived.set()
        assert go.wait(_WAIT_S)

    proxy.add("PUT", "partNumber=2", Before(hold))
    living = writers.start(LIVE)
    try:
        assert arrived.wait(_WAIT_S)
        proxy.add("GET", f"{DEAD}?", DateLater(TWO_DAYS_S), times=9)
        assert sorted(u.key for u in s3_store.incomplete_uploads("")) == [DEAD, LIVE]
        assert _ended_by_janitor(run) == [DEAD]
        assert [u.key for u in s3_store.incomplete_uploads("")] == [LIVE]
    finally:
        go.set()
    assert living.communicate(timeout=_WAIT_S)[0] == PutOutcome.WRITTEN.name
    assert s3_store.get(LIVE) == body
    assert list(s3_store.incomplete_uploads("")) == []
