"""A slow region that delays the others makes the fleet as slow as its worst link: each has its own
threads, its own streams and its own backlog.

A region receives bodies while they are uploaded to home (each byte leaves the trainer once per
region), and a version's manifest only after home has it and the region has the version before.
Bodies of versions that it cannot take now wait in its backlog; what does not fit there, and what it
missed before the trainer started, is copied from home. One that is too far behind begins again at
an anchor (region_restart.py). The same code runs as a worker, when the trainer is gone.

Write order per version: every body (create-only, content-named), then the manifest, then the
hint. A crash leaves orphan bodies, never a manifest that names an absent object.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltastore.errors import DeltastoreError, Kind, NotFoundError, StorageError
from deltastore.events import RegionCommitted, RegionFailed, StageFinished
from deltastore.pipeline.backlog import Backlog
from deltastore.pipeline.copying import Backoff, replicate_version
from deltastore.pipeline.region_restart import (
    restart_at_anchor,
    restart_version,
    unfinished_restart,
)
from deltastore.repository.body_checks import have_bodies_checked
from deltastore.repository.fetch import load_manifest
from deltastore.repository.resolve import find_head, version_exists
from deltastore.storage.store import PutMode

if TYPE_CHECKING:
    from deltastore.clock import Clock
    from deltastore.config import PublisherSettings
    from deltastore.events import EventSink
    from deltastore.format.manifest import SegmentRef, VersionManifest
    from deltastore.pipeline.backlog import WaitingBody
    from deltastore.repository.run import Run

RETRY_FIRST_S = 0.5
RETRY_CAP_S = 30.0
RESTART_EVERY_VERSIONS = 64  # behind: how often to ask whether an anchor is the shorter way
MAX_MANIFESTS = 64  # kept for a region that is behind; more are read from home
MAX_NOTED = 256  # versions whose arrivals are remembered; of more, bodies are looked for again
CLOSE_WAIT_S = 30.0  # a request that hangs longer is left to end with the process
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Region:
    """A region other than home.

    Args:
        name: as events and metrics say it.
        run: the run's place in its bucket, with its own endpoint, prefix and credentials.
        streams: requests in flight to it; None: as many as to home.
    """

    name: str
    run: Run
    streams: int | None = None


@dataclass(frozen=True, slots=True)
class RegionLimits:
    """What one region may use.

    Args:
        streams: requests in flight to it, unless the region says otherwise.
        memory_max_bytes, disk_max_bytes: of its backlog.
        folder: for the backlog and large files on their way; None: memory only.
        confirmed_max_s: bodies that arrived longer ago are looked for again before a commit: a
            janitor may have taken them for orphans.
        patience_s: how long after home's commit somebody else may bring the version.
    """

    streams: int = 8
    memory_max_bytes: int = 256 << 20
    disk_max_bytes: int = 8 << 30
    folder: Path | None = None
    confirmed_max_s: float = 1800.0
    patience_s: float = 0.0

    @classmethod
    def of(cls, settings: PublisherSettings) -> RegionLimits:
        """What the publisher's settings allow each region."""
        folder = None if settings.spool_folder is None else Path(settings.spool_folder)
        return cls(
            streams=settings.streams,
            memory_max_bytes=settings.region_memory_bytes,
            disk_max_bytes=settings.backlog_max_bytes,
            folder=folder,
            confirmed_max_s=settings.commit_deadline_s,
        )


class RegionReplicator:
    """Brings committed versions to one region, in order, without ever blocking the publisher.

    Args:
        region, home: where to, and where from when a body was missed.
        target: the version that home holds now.

    Memory: the backlog's, and of each stream one body at most.
    """

    def __init__(
        self,
        region: Region,
        home: Run,
        *,
        target: int,
        limits: RegionLimits,
        clock: Clock,
        sink: EventSink,
    ) -> None:
        self.name = region.name
        self._home = home
        self._run = region.run
        self._limits = limits
        self._streams = region.streams or limits.streams
        self._clock = clock
        self._sink = sink
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._backoff = Backoff(first_s=RETRY_FIRST_S, cap_s=RETRY_CAP_S)
        self._sent_at_s: dict[int, dict[str, float]] = {}
        self._committed_at_s: dict[int, float] = {}
        self._manifests: dict[int, VersionManifest] = {}
        self._target = target
        self._held = -1
        self._error: DeltastoreError | None = None
        self._look_again_at = 0
        self._backlog = Backlog(
            region.name,
            memory_max_bytes=limits.memory_max_bytes,
            disk_max_bytes=limits.disk_max_bytes,
            folder=limits.folder,
            trouble=self._tell,
        )
        self._threads = [
            threading.Thread(target=self._send, name=f"send-{self.name}-{i}", daemon=True)
            for i in range(self._streams)
        ]
        self._threads.append(
            threading.Thread(target=self._work, name=f"region-{self.name}", daemon=True)
        )
        for thread in self._threads:
            thread.start()

    @property
    def held(self) -> int:
        """The newest version the region is known to hold; -1 until it has answered."""
        return self._held

    @property
    def error(self) -> DeltastoreError | None:
        """What keeps the region from going on, until it goes on."""
        return self._error

    @property
    def backlog_bytes(self) -> int:
        """Bytes that wait for the region, in memory and on disk."""
        return self._backlog.memory_bytes + self._backlog.disk_bytes

    def offer(self, version: int, ref: SegmentRef, body: bytes) -> None:
        """Take a body of a version that is not committed yet. Never blocks.

        When the backlog is full the body is not kept: the region copies it from home later.
        """
        if version > self._held:
            self._backlog.add(version, ref.key, body, sha256=ref.sha256)

    def committed(self, manifest: VersionManifest) -> None:
        """Home holds this version now. Never blocks."""
        version = manifest.core.version
        with self._changed:
            self._target = max(self._target, version)
            if len(self._committed_at_s) < MAX_NOTED:
                self._committed_at_s[version] = self._clock.monotonic_s()
            if len(self._manifests) < MAX_MANIFESTS:
                self._manifests[version] = manifest
            self._changed.notify_all()

    def abandon(self, version: int) -> None:
        """The version will not be committed with these bodies: forget them."""
        self._backlog.drop(version)
        with self._changed:
            self._sent_at_s.pop(version, None)

    def wait_until(self, version: int, timeout_s: float) -> bool:
        """Wait until the region holds `version`; False when time is up."""
        with self._changed:
            return self._changed.wait_for(lambda: self._held >= version, timeout_s)

    def close(self) -> None:
        """Stop after the requests in flight; what is missing stays in home's chain."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self._backlog.close()
        deadline_s = self._clock.monotonic_s() + CLOSE_WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - self._clock.monotonic_s()))

    def _send(self) -> None:
        """One stream: send what waits, the oldest first."""
        while (item := self._backlog.take()) is not None:
            self._pause()
            if self._stop.is_set():
                return
            try:
                body = self._backlog.read(item)
                if body is not None:
                    self._run.store.put(item.key, body, mode=PutMode.CREATE, sha256=item.sha256)
                    self._note_sent(item)
            except StorageError as err:
                self._backlog.give_back(item)
                self._report(err)
                continue
            except DeltastoreError as err:  # sending it again cannot help; the commit says why
                self._report(err)
            else:
                self._backoff.succeeded()
            self._backlog.finish(item)

    def _note_sent(self, item: WaitingBody) -> None:
        with self._changed:
            known = item.version in self._sent_at_s or len(self._sent_at_s) < MAX_NOTED
            if item.version > self._held and not item.dropped and known:
                sent = self._sent_at_s.setdefault(item.version, {})
                sent[item.key] = self._clock.monotonic_s()

    def _work(self) -> None:
        while not self._stop.is_set():
            self._pause()
            try:
                if self._held < 0:
                    self._find_held()
                while self._held < self._target and not self._stop.is_set():
                    self._go_on()
            except DeltastoreError as err:
                self._report(err)
                continue
            except Exception as err:  # noqa: BLE001 - a thread that ends is behind for ever
                _log.exception("region %s met what nobody expected", self.name)
                self._report(_unexpected(err))
                continue
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stop.is_set() or self._target > self._held, RETRY_CAP_S
                )

    def _go_on(self) -> None:
        """Bring the next version, or begin again at an anchor where that is the way."""
        far = self._target - self._held > RESTART_EVERY_VERSIONS
        if far and self._held >= self._look_again_at:
            if self._restart(lost=False):
                return
            self._look_again_at = self._held + RESTART_EVERY_VERSIONS
        try:
            self._bring(self._held + 1)
        except NotFoundError as err:
            if err.kind is not Kind.OBJECT_MISSING or not self._restart(lost=True):
                raise

    def _restart(self, *, lost: bool) -> bool:
        version = restart_version(
            self._home, self._held, self._target, streams=self._streams, lost=lost
        )
        if version is not None:
            self._restart_at(version)
        return version is not None

    def _restart_at(self, version: int) -> None:
        started_s = self._clock.monotonic_s()
        streams, folder, held = self._streams, self._limits.folder, self._held
        copied_bytes = restart_at_anchor(
            self._home, self._run, version, held=held, streams=streams, folder=folder
        )
        self._set_held(version)
        seconds = self._clock.monotonic_s() - started_s
        self._sink(
            StageFinished(self.name, version, "catch_up", version - held, copied_bytes, seconds)
        )

    def _find_held(self) -> None:
        """Where the region is; a restart that was cut there is finished first."""
        have_bodies_checked(self._run.store, self._run.keys)
        held = find_head(self._run)
        unfinished = unfinished_restart(self._run, held)
        self._set_held(held)
        if unfinished is not None:
            try:
                self._restart_at(unfinished)
            except BaseException:
                self._held = -1
                raise

    def _pause(self) -> None:
        left_s = self._backoff.left_s(self._clock.monotonic_s())
        if left_s > 0:
            self._clock.wait(self._stop, left_s)

    def _report(self, err: DeltastoreError) -> None:
        """Say what went wrong, once per attempt however many streams met it; then wait."""
        if self._backoff.failed(self._clock.monotonic_s()):
            self._tell(err)

    def _tell(self, err: DeltastoreError) -> None:
        self._error = err
        try:
            self._sink(RegionFailed(self.name, self._held + 1, err.kind.value, str(err)))
        except DeltastoreError as untold:  # a full event log must not end this thread
            self._error = untold
        except Exception as untold:  # noqa: BLE001 - nor may a sink with a fault in it
            _log.exception("region %s could not report", self.name)
            self._error = _unexpected(untold)

    def _bring(self, version: int) -> None:
        if self._limits.patience_s and self._brought_by_others(version):
            return
        while not self._backlog.wait_sent(version, RETRY_CAP_S):
            if self._stop.is_set():
                return
        if self._stop.is_set():
            return
        started_s = self._clock.monotonic_s()
        with self._changed:
            sent = self._sent_at_s.pop(version, {})
            told = self._manifests.get(version)
        fresh_s = started_s - self._limits.confirmed_max_s
        manifest = told or load_manifest(self._home, version)
        copied_bytes = replicate_version(
            self._home,
            self._run,
            manifest,
            present=frozenset(key for key, at_s in sent.items() if at_s >= fresh_s),
            streams=self._streams,
            folder=self._limits.folder,
        )
        self._backoff.succeeded()
        self._announce(manifest, started_s, copied_bytes)

    def _announce(self, manifest: VersionManifest, started_s: float, copied_bytes: int) -> None:
        version = manifest.core.version
        now_s = self._clock.monotonic_s()
        with self._changed:
            committed_s = self._committed_at_s.pop(version, None)
        self._set_held(version)
        parts = len(manifest.core.segments) + len(manifest.core.files)
        self._sink(
            StageFinished(self.name, version, "copy", parts, copied_bytes, now_s - started_s)
        )
        lag_s = 0.0 if committed_s is None else now_s - committed_s
        self._sink(RegionCommitted(self.name, version, manifest.core.delta_bytes, lag_s))

    def _brought_by_others(self, version: int) -> bool:
        """Leave a version to the trainer for a while; whether the region got it meanwhile."""
        with self._changed:
            committed_s = self._committed_at_s.get(version, self._clock.monotonic_s())
        left_s = committed_s + self._limits.patience_s - self._clock.monotonic_s()
        if left_s > 0:
            self._clock.wait(self._stop, left_s)
        if self._stop.is_set() or not version_exists(self._run, version):
            return self._stop.is_set()
        self._set_held(version)
        return True

    def _set_held(self, version: int) -> None:
        with self._changed:
            self._held, self._error = version, None
            done: tuple[dict[int, Any], ...] = (
                self._sent_at_s,
                self._committed_at_s,
                self._manifests,
            )
            for known in done:
                for old in [v for v in known if v <= version]:
                    del known[old]
            self._changed.notify_all()
        self._backlog.drop(version, and_below=True)


def _unexpected(err: Exception) -> DeltastoreError:
    return DeltastoreError(
        f"{type(err).__name__}: {err}",
        kind=Kind.UNAVAILABLE,
        hint="this is a fault of deltastore or of an event sink: the log has its traceback",
    )
