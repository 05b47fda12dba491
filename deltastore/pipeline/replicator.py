"""A slow region that delays the others makes the fleet as slow as its worst link: each has its own
thread, its own streams and its own backlog.

A region receives bodies while they are uploaded to home (each byte leaves the trainer once per
region), and a version's manifest only after home has it and the region has the version before.
What it missed (it was down, its backlog was full, the trainer restarted) it copies from home.

Write order per version: every body (create-only, content-named), then the manifest, then the
hint. A crash leaves orphan bodies, never a manifest that names an absent object.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.errors import DeltastoreError
from deltastore.events import RegionCommitted, RegionFailed
from deltastore.repository.commit import commit_version, write_head_hint
from deltastore.repository.fetch import load_manifest
from deltastore.repository.resolve import find_head
from deltastore.storage.store import PutMode
from deltastore.storage.transfer import FetchItem, Uploader, fetch_all

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from deltastore.clock import Clock
    from deltastore.events import EventSink
    from deltastore.format.manifest import VersionManifest
    from deltastore.repository.run import Run
    from deltastore.storage.store import PutOutcome

RETRY_FIRST_S = 0.5
RETRY_CAP_S = 30.0


@dataclass(frozen=True, slots=True)
class Region:
    """A region other than home: its name and the run's place in its bucket."""

    name: str
    run: Run


def replicate_version(
    home: Run, region: Run, manifest: VersionManifest, *, present: frozenset[str], streams: int
) -> None:
    """Copy one committed version to a region that holds the version before it.

    Args:
        present: keys of bodies already confirmed in the region.
    """
    core = manifest.core
    missing = [FetchItem(s.key, s.size_bytes, s.sha256) for s in core.segments]
    missing += [FetchItem(f.key, f.size_bytes, f.sha256) for f in core.files if f.key is not None]
    missing = [item for item in missing if item.key not in present]
    for fetched in fetch_all(home.store, missing, streams=streams):
        region.store.put(fetched.item.key, fetched.body, mode=PutMode.CREATE)
    commit_version(region, manifest)
    write_head_hint(region, manifest)


class RegionReplicator:
    """Brings committed versions to one region, in order, without ever blocking the publisher.

    Args:
        region, home: where to, and where from when a body was missed.
        target: the version that home holds now.
        streams: requests in flight to the region.
        backlog_max_bytes: bodies waiting for the region; what does not fit comes from home later.

    Memory: at most `backlog_max_bytes` of bodies waiting for the region.
    """

    def __init__(
        self,
        region: Region,
        home: Run,
        *,
        target: int,
        streams: int,
        backlog_max_bytes: int,
        clock: Clock,
        sink: EventSink,
    ) -> None:
        self.name = region.name
        self._home = home
        self._run = region.run
        self._streams = streams
        self._clock = clock
        self._sink = sink
        self._uploader = Uploader(streams=streams, max_pending_bytes=backlog_max_bytes)
        self._backlog_max_bytes = backlog_max_bytes
        self._backlog_bytes = 0
        self._bodies: dict[int, dict[str, Future[PutOutcome]]] = {}
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._target = target
        self._committed_at_s: dict[int, float] = {}
        self._held = -1
        self._thread = threading.Thread(
            target=self._work, name=f"region-{region.name}", daemon=True
        )
        self._thread.start()

    def offer(self, version: int, key: str, body: bytes) -> None:
        """Take a body of a version that is not committed yet. Never blocks.

        When the backlog is full the body is dropped: the region copies it from home later.
        """
        with self._changed:
            behind = self._held >= 0 and version > self._held + 1
            if behind or self._backlog_bytes + len(body) > self._backlog_max_bytes:
                return
            self._backlog_bytes += len(body)
            future = self._uploader.submit(self._run.store, key, body, mode=PutMode.CREATE)
            self._bodies.setdefault(version, {})[key] = future
        future.add_done_callback(lambda _: self._release(len(body)))

    def committed(self, manifest: VersionManifest) -> None:
        """Home holds this version now. Never blocks."""
        version = manifest.core.version
        with self._changed:
            self._target = max(self._target, version)
            self._committed_at_s[version] = self._clock.monotonic_s()
            self._changed.notify_all()

    def abandon(self, version: int) -> None:
        """The version will not be committed: forget its bodies."""
        with self._changed:
            for future in self._bodies.pop(version, {}).values():
                future.cancel()

    def wait_until(self, version: int, timeout_s: float) -> bool:
        """Wait until the region holds `version`; False when time is up."""
        with self._changed:
            return self._changed.wait_for(lambda: self._held >= version, timeout_s)

    def close(self) -> None:
        """Stop after the request in flight; what is missing stays in home's chain."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join()
        self._uploader.close()

    def _release(self, size_bytes: int) -> None:
        with self._changed:
            self._backlog_bytes -= size_bytes

    def _work(self) -> None:
        wait_s = RETRY_FIRST_S
        while not self._stop.is_set():
            try:
                if self._held < 0:
                    self._set_held(find_head(self._run))
                while self._held < self._target and not self._stop.is_set():
                    self._bring(self._held + 1)
                wait_s = RETRY_FIRST_S
            except DeltastoreError as err:
                self._sink(RegionFailed(self.name, self._held + 1, err.kind.value, str(err)))
                self._clock.wait(self._stop, wait_s)
                wait_s = min(2 * wait_s, RETRY_CAP_S)
                continue
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stop.is_set() or self._target > self._held, RETRY_CAP_S
                )

    def _bring(self, version: int) -> None:
        with self._changed:
            bodies = self._bodies.pop(version, {})
        present = frozenset(key for key, future in bodies.items() if _confirmed(future))
        manifest = load_manifest(self._home, version)
        replicate_version(self._home, self._run, manifest, present=present, streams=self._streams)
        with self._changed:
            committed_s = self._committed_at_s.pop(version, None)
        now_s = self._clock.monotonic_s()
        lag_s = 0.0 if committed_s is None else now_s - committed_s
        self._set_held(version)
        self._sink(RegionCommitted(self.name, version, manifest.core.delta_bytes, lag_s))

    def _set_held(self, version: int) -> None:
        with self._changed:
            self._held = version
            for old in [v for v in self._bodies if v <= version]:
                del self._bodies[old]
            self._changed.notify_all()


def _confirmed(future: Future[PutOutcome]) -> bool:
    """Whether a body has arrived; one that failed is copied from home instead."""
    return not future.cancelled() and future.exception() is None


def behind(
    regions: Sequence[RegionReplicator], version: int, timeout_s: float, clock: Clock
) -> list[str]:
    """Names of the regions that do not hold `version` after at most `timeout_s`."""
    deadline_s = clock.monotonic_s() + timeout_s
    return [
        region.name
        for region in regions
        if not region.wait_until(version, max(0.0, deadline_s - clock.monotonic_s()))
    ]
