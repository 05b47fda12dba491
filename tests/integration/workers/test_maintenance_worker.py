"""The maintenance worker as a process: alone, twice at once, and on a bucket that fails."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.cli.exits import ExitCode
from deltastore.cli.keys import read_trusted
from deltastore.clock import SystemClock
from deltastore.errors import InvalidInputError
from deltastore.events import AnchorWritten, CompositeWritten, MaintenanceFailed, ObjectsDeleted
from deltastore.format.key_files import trusted_line
from deltastore.format.signing import MaySign, SigningKey, sign_with
from deltastore.maintenance.fsck import check_run
from deltastore.observability.jsonl import read_events
from deltastore.storage.fs import FileStore
from tests.unit.chain_life.kit import NAME, Chain
from workers.config import MaintenanceConfig, RegionConfig, WorkerConfig, parse_config

if TYPE_CHECKING:
    from deltastore.events import Event
    from deltastore.maintenance.findings import Report

ROOT = Path(__file__).resolve().parents[3]
END_S = 120.0
HEAD = 20
SOON = MaintenanceConfig(join_seconds_max=0.0, anchor_multiple=8, rounds_max=1, streams=2)


class Site:
    """A run in a folder, and workers started for it."""

    def __init__(self, folder: Path, **chain: Any) -> None:
        self.folder = folder
        self.chain = Chain(folder / "v0", store=FileStore(folder / "home"), **chain)
        self.chain.extend(HEAD)
        self._started = 0

    def start(self, settings: MaintenanceConfig, *duty: str) -> subprocess.Popen[str]:
        """Start a worker."""
        config = WorkerConfig(
            run=NAME,
            home="home",
            regions=(RegionConfig("home", f"file://{self.folder}/home"),),
            redis_url="",
            run_dir=str(self.folder / "run"),
            maintenance=settings,
        )
        self._started += 1
        path = self.folder / f"{self._started}.json"
        path.write_text(json.dumps(asdict(config)))
        return subprocess.Popen(
            [sys.executable, "-m", "workers.maintenance", *duty, str(path)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def check(self, **options: Any) -> Report:
        """The deep check."""
        return check_run(self.chain.run, deep=True, streams=2, clock=SystemClock(), **options)

    def events(self, kind: type[Event]) -> list[Event]:
        """What the workers reported."""
        stamped = read_events(self.folder / "run" / "events" / "maintenance-tend.jsonl")
        return [one.event for one in stamped if isinstance(one.event, kind)]


def ended(process: subprocess.Popen[str]) -> int:
    """Wait for the end; its exit code."""
    _out, err = process.communicate(timeout=END_S)
    assert "Traceback" not in err, err
    return process.returncode


def test_two_at_once(tmp_path: Path) -> None:
    """Two workers over one bucket at once make one set of shortcuts, all whole, and leave nothing
    behind; a third finds nothing to do."""
    site = Site(tmp_path)
    both = [site.start(SOON), site.start(SOON)]
    assert [ended(process) for process in both] == [ExitCode.OK, ExitCode.OK]
    report = site.check()
    assert (report.findings, report.replayed) == ((), HEAD + 1)
    assert report.shortcuts == report.proved == 4  # the anchor 16; 0-8, 8-16 and 0-16
    written = len(site.events(AnchorWritten)) + len(site.events(CompositeWritten))
    assert written == report.shortcuts
    before = site.chain.list_keys()
    assert ended(site.start(SOON, "tend")) == ExitCode.OK
    assert site.chain.list_keys() == before


def test_it_deletes_only_when_told(tmp_path: Path) -> None:
    """By default nothing is deleted; with `delete` retention goes on from round to round, and the
    newest versions stay replayable."""
    site = Site(tmp_path)
    policy = {"keep_versions": 2, "grace_s": 0.05, "every_s": 0.1}
    few = MaintenanceConfig(**(asdict(SOON) | policy | {"rounds_max": 3}))
    assert ended(site.start(few)) == ExitCode.OK
    assert site.events(ObjectsDeleted) == []
    assert site.check().gone == 0
    assert ended(site.start(MaintenanceConfig(**(asdict(few) | {"delete": True})))) == ExitCode.OK
    report = site.check()
    assert (report.findings, report.floor, report.gone) == ((), 16, 16)
    assert site.events(ObjectsDeleted)
    for version in (17, HEAD):
        site.chain.replay(version)


def test_a_task_that_fails_keeps_nobody_back(tmp_path: Path) -> None:
    """What cannot be made is reported, with its kind; the other tasks are done all the same."""
    site = Site(tmp_path)
    (key,) = site.chain.list_keys(f"/deltas/{3:010d}/")
    site.chain.run.store.delete([key])
    process = site.start(SOON)
    assert ended(process) == ExitCode.NOT_FOUND
    failed = {event.task: event.kind for event in site.events(MaintenanceFailed)}
    assert failed["anchors"] == "object_missing"
    written = {(e.base_version, e.version) for e in site.events(CompositeWritten)}
    assert (8, 16) in written


def test_it_stops_when_told(tmp_path: Path) -> None:
    """SIGTERM ends a worker between tasks, with exit code 0."""
    site = Site(tmp_path)
    process = site.start(MaintenanceConfig(**(asdict(SOON) | {"rounds_max": None})))
    assert process.stderr is not None
    assert "home: anchor 16" in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert ended(process) == ExitCode.OK


def test_it_signs_and_trusts(tmp_path: Path) -> None:
    """A worker with keys signs its shortcuts, and builds only on what trusted keys signed."""
    trainer, worker = SigningKey.generate(), SigningKey.generate()
    site = Site(tmp_path, signer=sign_with(trainer))
    trusted, secret = tmp_path / "trusted", tmp_path / "worker.key"
    lines = [
        trusted_line(trainer.public, [MaySign.VERSIONS]),
        trusted_line(worker.public, [MaySign.SHORTCUTS]),
    ]
    trusted.write_text("\n".join(lines))
    secret.write_bytes(worker.to_pem())
    keys = {"sign_keys": (str(secret),), "trusted_keys": str(trusted)}
    settings = MaintenanceConfig(**(asdict(SOON) | keys))
    assert ended(site.start(settings)) == ExitCode.OK
    report = site.check(trusted=read_trusted(trusted))
    assert (report.findings, report.proved) == ((), 4)
    site.chain.signer = sign_with(SigningKey.generate())
    site.chain.extend(8)
    assert ended(site.start(settings)) == ExitCode.INTEGRITY
    assert {e.kind for e in site.events(MaintenanceFailed)} == {"signature"}


@pytest.mark.parametrize(
    "part",
    [{"tasks": ["nonsense"]}, {"tasks": []}, {"regions": ["nowhere"]}, {"rounds_max": 0}],
)
def test_settings_that_are_refused(part: dict[str, Any]) -> None:
    """A maintenance part that cannot work is refused by name before anything starts."""
    document = {
        "run": NAME,
        "home": "home",
        "regions": [{"name": "home", "url": "file:///runs"}],
        "redis_url": "",
        "run_dir": "/run",
        "maintenance": part,
    }
    with pytest.raises(InvalidInputError, match=next(iter(part))):
        parse_config(json.dumps(document).encode(), what="the file")
