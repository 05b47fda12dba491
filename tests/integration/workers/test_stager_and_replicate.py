"""Stager and maintenance as processes: they outlive trainers, die hard and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from deltastore.cli.exits import ExitCode
from deltastore.clock import SystemClock
from deltastore.config import FollowerSettings
from deltastore.coordination.memory import MemoryCoordination
from deltastore.events import RegionCommitted, VersionStaged
from deltastore.observability.jsonl import read_events
from deltastore.pipeline.applier import Applier
from deltastore.pipeline.host import HostTarget
from deltastore.pipeline.spool import SpoolFolder
from deltastore.pipeline.spool_use import read_use
from deltastore.pipeline.stager import Stager
from deltastore.pipeline.stager_rank import StagedFeed
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion
from deltastore.repository.run import open_run
from deltastore.storage.fs import FileStore
from deltastore.storage.memory import MemoryStore
from deltastore.testing.servers import free_port
from tests.integration.workers.loop_kit import (
    HOME,
    JOIN_S,
    OTHER,
    Fleet,
    checkpoint_with_tokenizer,
    small_trainer,
)
from tests.integration.workers.loop_kit import RUN as LOOP_RUN
from tests.unit.pipeline.harness import RUN, World
from workers.actor.assembly import act
from workers.config import (
    ActorConfig,
    RegionConfig,
    ReplicateConfig,
    StagerConfig,
    WorkerConfig,
)
from workers.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[3]
END_S = 120.0
RANK = """
import sys, threading
from pathlib import Path
from deltastore.clock import SystemClock
from deltastore.pipeline.stager_rank import StagedFeed
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion
from deltastore.repository.run import open_run
from deltastore.storage.fs import FileStore
run = open_run(FileStore(Path(sys.argv[1])), sys.argv[2])
active = ActiveVersion.of(load_manifest(run, 0))
feed = StagedFeed(Path(sys.argv[3]), run.layout, active, rank="dying", clock=SystemClock())
feed.catch_up()
print(feed.staged().target.version, flush=True)
threading.Event().wait()
"""


class Site:
    """A run on two folders as regions, and the processes started for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stores = {name: FileStore(folder / name) for name in ("home", "far")}
        self.world = World(
            folder / "v0",
            home_store=self.stores["home"],
            region_stores={"far": self.stores["far"]},
            clock=SystemClock(),
        )
        self.spool = SpoolFolder(folder / "spool")
        self.processes: list[subprocess.Popen[str]] = []

    def config(self, **changes: Any) -> WorkerConfig:
        """A worker's settings on this site."""
        parts: dict[str, Any] = {
            "run": RUN,
            "home": "home",
            "regions": tuple(
                RegionConfig(name, f"file://{self.folder / name}", streams=2)
                for name in self.stores
            ),
            "redis_url": "",
            "run_dir": str(self.folder / "run"),
        }
        return WorkerConfig(**(parts | changes))

    def start(self, *command: str, config: WorkerConfig | None = None) -> subprocess.Popen[str]:
        """Start `python COMMAND`, with the configuration in a file if there is one."""
        arguments = list(command)
        if config is not None:
            path = self.folder / f"{len(self.processes)}.json"
            path.write_text(json.dumps(asdict(config)))
            arguments.append(str(path))
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def start_stager(self, **changes: Any) -> subprocess.Popen[str]:
        """Start the host's stager."""
        stager = StagerConfig("home", str(self.spool.path))
        return self.start("-m", "workers.stager", config=self.config(stager=stager, **changes))

    def publish(self, versions: int) -> None:
        """A trainer makes so many versions and is gone."""
        publisher = self.world.publisher(step=1)
        for step in range(2, versions + 1):
            self.world.step(publisher, step)
        publisher.close()

    def rank(self, name: str) -> tuple[StagedFeed, HostTarget]:
        """A rank in this process, at version 0."""
        active = ActiveVersion.of(load_manifest(self.world.run, 0))
        feed = StagedFeed(
            self.spool.path, self.world.layout, active, rank=name, clock=SystemClock()
        )
        return feed, HostTarget(self.world.zero.copy())


@pytest.fixture
def site(tmp_path):
    """A run; its processes are ended by their ids."""
    made = Site(tmp_path)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _until(true) -> None:
    waiting = threading.Event()
    for _ in range(int(END_S / 0.02)):
        if true():
            return
        waiting.wait(0.02)
    pytest.fail("it does not come to hold")


def _end(process: subprocess.Popen[str]) -> int:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=END_S)
    return process.returncode


def test_stager_survives_the_death_of_a_rank_and_ranks_its_own(site):
    """kill -9 of a rank and of the stager: nothing beyond the bound is left, and all goes on."""
    site.publish(3)
    stager = site.start_stager()
    _until(lambda: (site.spool.path / "stager.lock").exists())
    dying = site.start("-c", RANK, str(site.folder / "home"), RUN, str(site.spool.path))
    feed, target = site.rank("r0")
    assert dying.stdout.readline().strip() == "3", dying.stderr.read()
    feed.catch_up()
    dying.kill()
    dying.wait()
    _until(lambda: not (site.spool.ranks / "dying.json").exists())
    assert not (site.spool.offers / "dying.json").exists()
    stager.kill()
    stager.wait()
    left = list(site.spool.updates.iterdir())
    assert len(left) == 1
    update = feed.staged()  # mapped: it outlives the stager
    again = site.start_stager()
    _until(lambda: not left[0].exists())
    assert feed.take() is update
    applier = Applier(target, update.base, name="r0", clock=SystemClock())
    applier.activate(update)
    assert target.state.equals(site.world.state)
    site.publish(2)
    _until(lambda: feed.poll() or (feed.staged() is not None))
    feed.catch_up()
    applier.activate(feed.take())
    assert target.state.equals(site.world.state)
    feed.stop()
    assert _end(again) == ExitCode.OK
    assert list(site.spool.updates.iterdir()) == []


def test_regions_are_brought_up_after_the_trainer_is_gone(site):
    """`workers.maintenance replicate` brings a region 20 versions up, from home, and ends."""
    site.publish(20)
    config = site.config(replicate=ReplicateConfig(poll_s=0.1, patience_s=0.0, until_current=True))
    process = site.start("-m", "workers.maintenance", "replicate", config=config)
    _out, err = process.communicate(timeout=END_S)
    assert process.returncode == ExitCode.OK, err
    assert site.world.digests(site.stores["far"]) == site.world.digests(site.stores["home"])
    assert site.world.replayed(store=site.stores["far"]).equals(site.world.state)
    events = read_events(site.folder / "run" / "events" / "maintenance-replicate.jsonl")
    committed = [e.event.version for e in events if isinstance(e.event, RegionCommitted)]
    assert committed == list(range(1, 21))


def test_replicate_follows_a_living_trainer(site):
    """A maintenance worker that stays brings what is committed later, and ends on SIGTERM."""
    config = site.config(replicate=ReplicateConfig(poll_s=0.05, patience_s=0.0))
    process = site.start("-m", "workers.maintenance", "replicate", config=config)
    site.publish(4)
    far = open_run(site.stores["far"], RUN)
    _until(lambda: _holds(far, 4))
    assert _end(process) == ExitCode.OK
    assert site.world.replayed(store=site.stores["far"]).equals(site.world.state)


def _holds(run, version) -> bool:
    from deltastore.repository.resolve import version_exists

    return version_exists(run, version)


def test_metrics_are_served_where_the_file_says(site):
    """A worker with a metrics port answers a scrape with what it has done; a stager says what it
    has done with its store to the engines of its host as well."""
    port = free_port()
    site.publish(3)
    stager = site.start_stager(metrics_port=port)
    _until(lambda: (site.spool.path / "stager.lock").exists())
    feed, _target = site.rank("r0")
    feed.catch_up()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    feed.stop()
    assert _end(stager) == ExitCode.OK
    assert f'deltastore_actor_stage_seconds_count{{region="home",run="{RUN}"}} 3.0' in text
    assert 'deltastore_store_requests_total{op="get",outcome="ok",region="home"' in text
    told = read_use(site.spool.path)
    assert told is not None
    assert told.region == "home"
    assert told.requests["get", "ok"] > 3
    events = [e.event for e in read_events(site.folder / "run" / "events" / "stager-home.jsonl")]
    staged_bytes = sum(event.size_bytes for event in events if isinstance(event, VersionStaged))
    assert told.received_bytes > staged_bytes > 0


@pytest.mark.parametrize(
    ("command", "changes", "message"),
    [
        (("-m", "workers.stager"), {}, "no `stager` part"),
        (("-m", "workers.maintenance", "replicate"), {}, "no `replicate` part"),
        (("-m", "workers.maintenance", "sweep"), {}, "there is no duty 'sweep'"),
    ],
)
def test_files_that_lack_the_part(site, command, changes, message):
    """A file without the worker's part, or an unknown duty, is one line that says so."""
    process = site.start(*command, config=site.config(**changes))
    _out, err = process.communicate(timeout=END_S)
    assert process.returncode == ExitCode.INVALID_INPUT
    assert message in err.splitlines()[-1]


def test_two_actors_of_one_host_through_one_stager(tmp_path):
    """Trainer and actors as in the demo, the actors as ranks of one host: all end at its bits."""
    checkpoint = checkpoint_with_tokenizer(tmp_path / "model")
    fleet = Fleet(
        RunFolder(tmp_path / "run"),
        checkpoint,
        {HOME: MemoryStore(), OTHER: MemoryStore()},
        MemoryCoordination(SystemClock()),
        small_trainer(),
    )
    fleet.create()
    folder = tmp_path / "spool"
    stager = Stager(
        open_run(fleet.stores[HOME], LOOP_RUN),
        folder,
        name="host",
        clock=SystemClock(),
        settings=FollowerSettings(poll_min_s=0.05),
        sink=fleet.events.append,
    )
    stopping = threading.Event()
    staging = threading.Thread(target=stager.run, args=(stopping,))
    staging.start()
    try:
        fleet.start_trainer()
        for name in ("a1", "a2"):
            settings = ActorConfig(
                name,
                HOME,
                idle_s=0.02,
                heartbeat_ttl_s=6.0,
                lease_s=20.0,
                catch_up_s=JOIN_S,
                stager_folder=str(folder),
            )
            around = fleet.around(actor=settings)
            fleet._start(name, lambda around=around: act(around, lambda actor: None))
        fleet.until_trained()
        report = json.loads(fleet.folder.trainer_done.read_text())
        fleet.folder.ask_to_stop(report["version"])
        reports = [fleet.wait(name) for name in ("a1", "a2")]
        fleet.wait("trainer")
    finally:
        fleet.close()
        stopping.set()
        staging.join(60)
    for found in reports:
        assert found.fingerprint == report["fingerprint"]
        assert found.policy_hash == report["policy_hash"]
    assert {e.actor for e in fleet.seen(VersionStaged)} == {"host"}
