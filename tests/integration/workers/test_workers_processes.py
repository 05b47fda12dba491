"""The workers as a user starts them: processes, files, signals, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.cli.exits import ExitCode
from deltastore.clock import SystemClock
from deltastore.events import ActorJoined, StepTrained
from deltastore.observability.jsonl import read_events
from deltastore.storage.url import open_store
from tests.integration.workers.loop_kit import (
    HOME,
    RUN,
    Fleet,
    checkpoint_with_tokenizer,
    small_trainer,
)
from workers.config import ActorConfig, RegionConfig, WorkerConfig
from workers.run_folder import RunFolder, read_report

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.testing.servers import RedisServer

ROOT = Path(__file__).resolve().parents[3]
END_S = 180.0


class Site:
    """A run on local files, and the processes started for it."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = RunFolder(folder / "run")
        self.checkpoint = checkpoint_with_tokenizer(folder / "model")
        self.store_url = f"file://{folder / 'bucket'}"
        (folder / "bucket").mkdir()
        self.redis_url = redis_url
        self.processes: list[subprocess.Popen[str]] = []

    def create(self) -> None:
        """Make the run."""
        store = open_store(self.store_url)
        Fleet(self.folder, self.checkpoint, {HOME: store}, None, small_trainer()).create()  # type: ignore[arg-type]
        store.close()

    def config(self, **changes: Any) -> WorkerConfig:
        """A worker's settings on this site."""
        parts: dict[str, Any] = {
            "run": RUN,
            "home": HOME,
            "regions": (RegionConfig(HOME, self.store_url),),
            "redis_url": self.redis_url,
            "run_dir": str(self.folder.path),
            "checkpoint": str(self.checkpoint),
        }
        return WorkerConfig(**(parts | changes))

    def start(self, part: str, name: str, config: WorkerConfig) -> subprocess.Popen[str]:
        """Start `python -m workers.PART` on a file with that configuration."""
        path = self.folder.path / f"{name}.json"
        path.write_text(json.dumps(asdict(config)))
        process = subprocess.Popen(
            [sys.executable, "-m", f"workers.{part}", str(path)],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process


@pytest.fixture
def site(tmp_path: Path, redis_server: RedisServer) -> Iterator[Site]:
    """A place for a run; every process started there is ended."""
    site = Site(tmp_path, redis_server.url)
    yield site
    for process in site.processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_trainer_and_actors_as_processes(site: Site) -> None:
    """Files in, exit code 0 out: events, final states and reports lie in the run's folder."""
    site.create()
    trainer = site.start("trainer", "trainer", site.config(trainer=small_trainer(steps=2)))
    actors = {
        name: site.start(
            "actor",
            name,
            site.config(
                actor=ActorConfig(name, HOME, idle_s=0.05),
                checkpoint=str(site.checkpoint) if name == "a1" else None,
            ),
        )
        for name in ("a1", "a2")
    }
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + END_S
    while not site.folder.trainer_done.exists():
        ended = [p.communicate()[1] for p in site.processes if p.poll() is not None]
        assert not ended, ended
        assert clock.monotonic_s() < deadline_s
        clock.sleep_s(0.05)
    done = read_report(site.folder.trainer_done)
    assert done.version == 3
    actors["a2"].send_signal(signal.SIGTERM)
    assert actors["a2"].wait(END_S) == ExitCode.OK
    site.folder.ask_to_stop(done.version)
    assert actors["a1"].wait(END_S) == ExitCode.OK
    assert trainer.wait(END_S) == ExitCode.OK
    report = read_report(site.folder.actor_report("a1"))
    assert (report.version, report.fingerprint) == (done.version, done.fingerprint)
    assert read_report(site.folder.actor_report("a2")).version <= done.version
    steps = [s.event for s in read_events(site.folder.events("trainer"))]
    assert [e.step for e in steps if isinstance(e, StepTrained)] == [1, 2]
    joins = [s.event for s in read_events(site.folder.events("a2"))]
    assert [e.via[:7] for e in joins if isinstance(e, ActorJoined)] == ["full v0"]


def test_what_cannot_work_ends_with_one_line_and_its_code(site: Site) -> None:
    """No run, no part, an unset secret: an exit code by class and one line, no traceback."""
    absent = site.config(trainer=small_trainer())
    secret = site.config(
        regions=(
            RegionConfig(
                HOME, "s3://bucket", access_key_env="NO_SUCH_A", secret_key_env="NO_SUCH_B"
            ),
        ),
        trainer=small_trainer(),
    )
    cases = [
        ("trainer", "absent", absent, ExitCode.NOT_FOUND, "there is no run 'loop'"),
        ("trainer", "secret", secret, ExitCode.INVALID_INPUT, "NO_SUCH_A is not set"),
        ("actor", "part", site.config(), ExitCode.INVALID_INPUT, "no `actor` part"),
    ]
    started = [site.start(part, name, config) for part, name, config, _, _ in cases]
    for process, (_, _, _, code, said) in zip(started, cases, strict=True):
        _, err = process.communicate(timeout=END_S)
        assert process.returncode == code, err
        last = err.strip().splitlines()[-1]
        assert last.startswith("error: ")
        assert said in last
        assert "Traceback" not in err
