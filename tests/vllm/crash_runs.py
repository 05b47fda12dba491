"""A run that goes to and fro between two states: fresh engines to compare with are needed twice."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.api import RunHandle
from deltastore.clock import SystemClock
from deltastore.pipeline.held_lock import is_locked
from deltastore.pipeline.host import HostSource
from deltastore.pipeline.spool import SpoolFolder
from tests.vllm.runs import TinyRun, cli

if TYPE_CHECKING:
    from collections.abc import Callable

ENGINE = "e"
PLAIN = {"weight_transfer_config": {"backend": "deltastore"}}
"""A fresh engine to compare with: of the same kind, but it follows nothing."""


class SwingingRun(TinyRun):
    """Odd versions have one state, even ones another; version 0 has neither's bits."""

    head = 0

    def swing(self) -> int:
        """Publish the next version."""
        arrays = self.state.arrays
        if self.head < 2:
            self.change(0.1)
            self.states = [*getattr(self, "states", ()), [bits.copy() for bits in arrays]]
        else:
            for bits, wanted in zip(arrays, self.states[self.head % 2], strict=True):
                bits[:] = wanted
        self.head = self.publish(lambda: None)
        return self.head

    @property
    def like(self) -> int:
        """The first version with the state that the newest has, as `deltastore replay` proves."""
        first = 2 - self.head % 2
        if self.head > 2:
            newest = self.replayed(self.head)
            assert weights(newest) == weights(self.replayed(first))
            shutil.rmtree(newest)
        return first


class SwingingS3Run(SwingingRun):
    """The same in a bucket; the environment says of which server."""

    def __post_init__(self) -> None:
        self.url = "s3://models/team/r1"
        self.rng = np.random.default_rng(self.seed)
        cli("init", self.url, "--checkpoint", self.checkpoint)

    def publish(self, change: Callable[[], None] | None = None) -> int:
        """The same, over connections that `close` closes."""
        if self.publishers:
            return super().publish(change)
        (change or self.change)()
        handle = RunHandle(self.run, SystemClock())
        self.publishers.append(handle.publisher(HostSource(self.state)))
        return int(self.publishers[0].head.core.version)

    def close(self) -> None:
        """Let go of the trainer's threads and connections."""
        super().close()
        self.run.store.close()


def weights(checkpoint: Path) -> bytes:
    """All bytes of a replayed checkpoint's tensors."""
    return b"".join(path.read_bytes() for path in sorted(checkpoint.glob("*.safetensors")))


def users_of(spool: Path) -> list[int]:
    """Processes whose command names that spool: stagers."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended meanwhile
        if str(spool).encode() in words:
            found.append(int(path.parent.name))
    return found


def is_alive(pid: int) -> bool:
    """Whether that process runs still: one that nobody has buried does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}


def files_in(spool: Path) -> set[str]:
    """What lies in a spool, but for notes, locks and counts, of which each name has one."""
    ours = {"ranks", "offers", "use.json", ".use.json.part"}
    return {
        str(path.relative_to(spool))
        for path in spool.rglob("*")
        if path.is_file()
        and path.suffix != ".lock"
        and path.relative_to(spool).parts[0] not in ours
    }


def until(what: Callable[[], Any], within_s: float = 30.0, say: Callable[[], Any] = str) -> None:
    """Wait until something holds."""
    clock, never = SystemClock(), threading.Event()
    deadline_s = clock.monotonic_s() + within_s
    while not what():
        assert clock.monotonic_s() < deadline_s, say()
        clock.wait(never, 0.02)


def require_nothing_left(run: TinyRun) -> None:
    """What an engine that was killed leaves: no process, no lock, no update, no offer."""
    spool = run.spool
    until(lambda: not users_of(spool), say=lambda: users_of(spool))
    assert not [path for path in spool.rglob("*.lock") if is_locked(path)]
    folder = SpoolFolder(spool)
    assert not [*folder.updates.iterdir(), *folder.offers.iterdir()]
    assert len(files_in(spool)) <= 1, "a meeting's file, until the next meeting"


def require_tidy(run: TinyRun, ranks: int = 1) -> None:
    """While an engine is at HEAD the spool has its own files, and none of those before it."""
    spool = run.spool
    names = {f"{ENGINE}-{rank}" for rank in range(ranks)}
    notes = {f"{name}.{kind}" for name in names for kind in ("json", "lock")}
    assert {path.name for path in (spool / "ranks").iterdir()} == notes
    assert {path.name for path in (spool / "offers").iterdir()} <= {f"{n}.json" for n in names}
    assert {path.name for path in (spool / "whole").iterdir()} == {f"{ENGINE}.lock"}
    # The stager removes what has been taken when it sees that it has been.
    until(lambda: not files_in(spool), say=lambda: files_in(spool))
    assert len(users_of(spool)) == 1
