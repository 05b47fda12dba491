"""`deltastore init` and `publish` killed by SIGKILL at every step: run them again, that is all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.adapters.safetensors_dir import checkpoint_layout, load_state, scan_checkpoint
from deltastore.maintenance.findings import Severity
from deltastore.maintenance.fsck import check_run
from deltastore.pipeline.replay import replay
from deltastore.repository.resolve import find_head
from deltastore.repository.run import open_run
from deltastore.storage.url import open_store
from deltastore.testing.checkpoints import next_checkpoint, tiny_checkpoint
from deltastore.testing.clock import FakeClock

if TYPE_CHECKING:
    from deltastore.testing.servers import SeaweedServer

ROOT = Path(__file__).parents[2]
RUN_EXISTS = 4
"""The exit code of `init` where the run is whole already."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `old` and `new`."""
    folder = tmp_path_factory.mktemp("checkpoints")
    old = tiny_checkpoint(folder / "old", seed=1)
    next_checkpoint(old, folder / "new", seed=2)
    return folder


def _crash(
    command: str, url: str, checkpoints: Path, server: SeaweedServer | None, out: Path
) -> list[dict[str, Any]]:
    """What the children did, in the order of the step at which each was killed."""
    options: list[str] = []
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    if server is not None:
        keys = ["--access-key-env", "TEST_ACCESS_KEY", "--secret-key-env", "TEST_SECRET_KEY"]
        options = ["--endpoint-url", server.endpoint, *keys]
        env |= {"TEST_ACCESS_KEY": server.access_key, "TEST_SECRET_KEY": server.secret_key}
    program = "tests.faults.cli_crash_child"
    done = subprocess.run(
        [sys.executable, "-m", program, command, url, str(checkpoints), json.dumps(options), out],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["killed"] for row in rows] == [True] * (len(rows) - 1) + [False]
    return rows


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("init", "files"),
        ("publish", "files"),
        pytest.param("publish", "bucket", marks=pytest.mark.slow),
        pytest.param("init", "bucket", marks=pytest.mark.slow),
    ],
)
def test_killed_at_every_put_and_run_again(
    command: str,
    kind: str,
    checkpoints: Path,
    s3_server: SeaweedServer,
    s3_bucket: str,
    tmp_path: Path,
) -> None:
    """Before and after each put: the second command succeeds, or says that the run is whole, and
    the run then holds the checkpoint bit for bit, with nothing worse in it than an orphan."""
    server = s3_server if kind == "bucket" else None
    url = f"s3://{s3_bucket}/{command}" if server else f"file://{tmp_path}/store"
    rows = _crash(command, url, checkpoints, server, tmp_path / "outcomes")
    assert len(rows) >= 7
    kept = {} if server is None else {
        "endpoint_url": server.endpoint,
        "access_key": server.access_key,
        "secret_key": server.secret_key,
    }  # fmt: skip
    checkpoint = scan_checkpoint(checkpoints / ("old" if command == "init" else "new"))
    expected = load_state(checkpoint, checkpoint_layout(checkpoint))
    codes = []
    store = open_store(url, **kept)
    for row in rows:
        run = open_run(store, row["run"])
        found = replay(run, None, clock=FakeClock(), streams=1)
        assert found.state.equals(expected), row
        assert find_head(run) >= (command == "publish")
        report = check_run(run, deep=True, streams=2, clock=FakeClock())
        assert {f.severity for f in report.findings} <= {Severity.NOTE}, row
        codes.append(row["again"])
    store.close()
    if command == "publish":
        assert set(codes) == {0}
    else:
        assert codes == sorted(codes)
        assert set(codes) == {0, RUN_EXISTS}
