"""A trainer that dies at any step of a version leaves the old version or the new one, whole."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from deltastore.maintenance.fsck import check_run
from deltastore.maintenance.janitor import JanitorPolicy, run_janitor
from deltastore.repository.run import open_run
from deltastore.storage.url import open_store
from deltastore.testing.clock import FakeClock
from tests.faults.crash_kit import EIGHT_DAYS_S, Expected, bodies, crash, named_bodies, rebuilt
from tests.unit.pipeline.harness import RUN

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.storage.store import ObjectStore


def _sweep(store: ObjectStore, root: Path) -> tuple[int, int]:
    """A janitor comes by when all is eight days old: the orphans and the halves that it took."""
    for path in root.rglob("*"):
        if path.is_file():
            aged_s = path.stat().st_mtime - EIGHT_DAYS_S
            os.utime(path, (aged_s, aged_s))
    done = run_janitor(open_run(store, RUN), JanitorPolicy(), dry_run=False)
    return done.deleted, len(done.uploads)


def test_killed_at_every_system_call_on_files(tmp_path: Path) -> None:
    """SIGKILL at each write, fsync, link and unlink: old until the manifest's link, then new; and
    the janitor leaves neither an orphan nor a file that was half written."""
    url = f"file://{tmp_path}/store"
    steps = crash("tests.faults.crash_child", url, str(tmp_path))
    assert [step["killed"] for step in steps] == [True] * (len(steps) - 1) + [False]
    expected, committed = Expected(tmp_path / "expected"), []
    orphans = halves = 0
    for step in steps:
        folder = tmp_path / "store" / step["folder"]
        store = open_store(f"{url}/{step['folder']}")
        committed.append(expected.check(store))
        state = expected.go_on(store)
        assert rebuilt(store).equals(state)
        deleted, aborted = _sweep(store, folder)
        orphans += deleted
        halves += aborted
        assert bodies(store) == named_bodies(open_run(store, RUN)), step
        assert not [path for path in folder.rglob("*") if path.name.startswith(".")], step
        assert _sweep(store, folder) == (0, 0)
        run = open_run(store, RUN)
        assert check_run(run, deep=True, streams=2, clock=FakeClock()).findings == ()
        assert rebuilt(store).equals(state)
        store.close()
    assert committed == sorted(committed)
    assert committed.count(False) >= 8
    assert committed.count(True) >= 3
    assert orphans, "no crash left an orphan: the janitor had nothing to show"
    assert halves >= 4, "a put is cut after its file was made: at its write, sync, link and unlink"
