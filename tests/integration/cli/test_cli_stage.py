"""The stager of a host as a command, in a process of its own, as an engine starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.adapters.safetensors_dir import load_state, scan_checkpoint
from deltastore.adapters.vllm.whole_spool import WholeSpool
from deltastore.cli.staging import require_spool
from deltastore.clock import SystemClock
from deltastore.events import VersionStaged
from deltastore.observability.jsonl import read_events
from deltastore.pipeline.applier import Applier
from deltastore.pipeline.held_lock import is_locked
from deltastore.pipeline.host import HostTarget
from deltastore.pipeline.spool import SpoolFolder
from deltastore.pipeline.spool_use import read_use
from deltastore.pipeline.stager_rank import StagedFeed
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion
from deltastore.repository.run import open_run
from deltastore.testing.s3_proxy import Reply, S3Proxy
from deltastore.testing.servers import free_port
from tests.integration.cli.cli_kit import Cli, documented

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from deltastore.pipeline.staged import StagedUpdate
    from deltastore.testing.servers import SeaweedServer


@contextmanager
def staging(*words: str | Path, env: Mapping[str, str] | None = None) -> Iterator[Any]:
    """`deltastore stage` with pipes on stdin and stdout; its first line has been read."""
    command = [sys.executable, "-m", "deltastore.cli", "stage", *map(str, words), "--json"]
    environment = {**os.environ, **(env or {})}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            assert list(ready) == documented("stage")
            assert (ready["run"], ready["version"]) == ("r1", None)
            yield process
        finally:
            process.kill()


def _taken(feed: StagedFeed) -> StagedUpdate:
    """What is staged next, however long the stager takes to write it."""
    while feed.staged() is None:
        feed.catch_up()  # ends at once when the stager knows of nothing newer, yet
    update = feed.take()
    assert update is not None
    return update


def test_stage_feeds_the_ranks_of_its_host(
    files: Cli, old: Path, new: Path, newer: Path, tmp_path: Path
) -> None:
    """Two versions are staged by the command for a rank of another process, which lands on the
    newest checkpoint's bits; a second stager for the folder is refused; a closed stdin ends it."""
    url, folder = files.url("r1"), tmp_path / "spool"
    files.json("init", url, "--checkpoint", old)
    run = open_run(files.store(), "r1")
    zero = ActiveVersion.of(load_manifest(run, 0))
    clock = SystemClock()
    target = HostTarget(load_state(scan_checkpoint(old), run.layout))
    words = [url, "--folder", folder, "--poll-s", "0.05"]
    with staging(*words, "--until-stdin-ends") as process:
        files.error(2, "lease_held", "stage", *words)
        feed = StagedFeed(folder, run.layout, zero, rank="a-0", clock=clock, catch_up_s=30)
        applier = Applier(target, zero, name="a", clock=clock)
        for version, source in enumerate((new, newer), 1):
            files.json("publish", url, source, "--step", str(version))
            row = json.loads(process.stdout.readline())
            assert (row["version"], row["read_bytes"] > 0) == (version, True)
            update = _taken(feed)
            assert applier.activate(update).version == version
            wanted = load_state(scan_checkpoint(source), run.layout)
            assert all(
                bytes(a) == bytes(b)
                for a, b in zip(target.state.arrays, wanted.arrays, strict=True)
            )
        process.stdin.close()
        assert process.wait(30) == 0
        feed.stop()
    assert not is_locked(SpoolFolder(folder).stager_lock)
    assert list(SpoolFolder(folder).updates.iterdir()) == []


def test_what_a_stager_does_is_counted_and_told(
    bucket: Cli, old: Path, new: Path, tmp_path: Path, s3_server: SeaweedServer
) -> None:
    """Over a line that drops an answer: its own metrics, its events and what it tells the ranks all
    have requests, bytes, parts and the retry by cause, under the region's name."""
    url, folder, port = bucket.url("r1"), tmp_path / "spool", free_port()
    bucket.json("init", url, "--checkpoint", old, "--home", "east")
    bucket.json("publish", url, new, "--step", "1")
    run = open_run(bucket.store(), "r1")
    zero, one = (load_manifest(run, version) for version in (0, 1))
    keys = ["--access-key-env", "TEST_ACCESS_KEY", "--secret-key-env", "TEST_SECRET_KEY"]
    words = ["--poll-s", "0.05", "--metrics-port", str(port), "--events", tmp_path / "events"]
    with S3Proxy(s3_server.endpoint) as line:
        line.add("GET", ".seg", Reply(503, "SlowDown"))
        where = ["--endpoint-url", line.endpoint, *keys]
        with staging(url, "--folder", folder, *words, *where, env=bucket.env) as process:
            feed = StagedFeed(
                folder, run.layout, ActiveVersion.of(zero), rank="a-0", clock=SystemClock()
            )
            row = json.loads(process.stdout.readline())
            assert (row["version"], row["region"]) == (1, "east")
            assert row["parts"] == len(one.core.segments)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                text = answer.read().decode()
            feed.stop()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    label = 'region="east",run="r1"'
    assert f'store_retries_total{{cause="throttled",{label}}} 1.0' in text
    assert f"actor_staged_parts_total{{{label}}} {row['parts']}.0" in text
    assert f"actor_staged_bytes_total{{{label}}} {row['read_bytes']}.0" in text
    told = read_use(folder)
    assert told is not None
    assert (told.region, told.retries) == ("east", {"throttled": 1})
    assert told.received_bytes > row["read_bytes"]
    assert told.requests["get", "ok"] >= 2 + row["parts"]
    events = [stamped.event for stamped in read_events(tmp_path / "events")]
    assert [(e.region, e.parts) for e in events if isinstance(e, VersionStaged)] == [
        ("east", row["parts"])
    ]


@pytest.mark.parametrize(("number", "code"), [(15, 0), (2, 130)])
def test_stage_ends_cleanly(files: Cli, old: Path, tmp_path: Path, number: int, code: int) -> None:
    """SIGTERM ends it with 0 and Ctrl-C with 130, and the folder is free for the next one."""
    url, folder = files.url("r1"), tmp_path / "spool"
    files.json("init", url, "--checkpoint", old)
    for _ in range(2):
        with staging(url, "--folder", folder) as process:
            process.send_signal(number)
            assert process.wait(30) == code


def test_stage_needs_a_run(files: Cli, tmp_path: Path) -> None:
    """A run that is not there is an error of its own, and nothing is staged."""
    files.error(3, "run_missing", "stage", files.url("none"), "--folder", tmp_path / "spool")
    assert not (tmp_path / "spool").exists()


def test_another_folder_is_not_made_a_spool(files: Cli, old: Path, tmp_path: Path) -> None:
    """A folder that holds something else is refused by name, and nothing is put there."""
    url, folder = files.url("r1"), tmp_path / "home"
    files.json("init", url, "--checkpoint", old)
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    error = files.error(4, "output_exists", "stage", url, "--folder", folder)
    assert str(folder) in error["message"]
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    files.error(3, "file_missing", "stage", url, "--folder", folder / "notes.txt")


@pytest.mark.parametrize("first", ["nobody", "a disk", "a rank", "a whole state"])
def test_a_spool_is_taken(tmp_path: Path, first: str) -> None:
    """An empty folder, a fresh disk, and one that an engine or a stager has begun are spools."""
    match first:
        case "a disk":
            (tmp_path / "lost+found").mkdir()
        case "a rank":
            SpoolFolder(tmp_path)
            (tmp_path / "trusted-keys").write_text("")
        case "a whole state":
            WholeSpool(tmp_path, "engine").close()
    require_spool(tmp_path)
    require_spool(tmp_path / "none")
