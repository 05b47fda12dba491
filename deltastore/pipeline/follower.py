"""An actor that downloads during its pause stops the fleet: it stages in the background instead.

Watches for the next version (a computed key, never a listing), fetches and verifies it, decodes
it, and composes it with what is staged already. Activation is the applier's, at a safe point.

A version that cannot be read is fetched once more (by `fetch_all`), then another way is planned
around it (the next full version); until there is one the follower waits where it is. It never
skips a version and never continues past one.

Memory: `stage_max_bytes` of decoded changes plus one version; when full, staging waits.
"""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

from deltastore.config import FollowerSettings
from deltastore.errors import (
    DeltastoreError,
    FormatError,
    IntegrityError,
    Kind,
    NotFoundError,
)
from deltastore.events import VersionStaged, discard
from deltastore.format.manifest import VersionKind, VersionManifest
from deltastore.pipeline.history import links_to
from deltastore.pipeline.staged import StagedUpdate, join_updates
from deltastore.repository.fetch import fetch_blocks, load_manifest
from deltastore.repository.full import fetch_full_state
from deltastore.repository.points import ActiveVersion, check_link
from deltastore.repository.resolve import read_head_hint, version_exists

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.clock import Clock
    from deltastore.events import EventSink
    from deltastore.format.block import Block
    from deltastore.repository.run import Run


class Follower:
    """Stages the versions after the active one. `poll` does one round; `start` polls for ever."""

    def __init__(
        self,
        run: Run,
        active: ActiveVersion,
        *,
        name: str,
        clock: Clock,
        settings: FollowerSettings | None = None,
        sink: EventSink = discard,
        hint_source: Callable[[int, float], int | None] | None = None,
        seed: int = 0,
    ) -> None:
        """Follow `run` from `active`.

        Args:
            name: of the actor, for events.
            hint_source: called with (newest known version, seconds); waits at most that long for
                a newer version to be advertised and returns its number. Hints only save polls.
            seed: of the jitter.
        """
        self._run = run
        self._name = name
        self._clock = clock
        self._settings = settings or FollowerSettings()
        self._sink = sink
        self._hint_source = hint_source
        self._jitter = random.Random(seed)  # spreads polls, protects nothing
        self._lock = threading.Lock()
        self._tip = active
        self._staged: StagedUpdate | None = None
        self._error: DeltastoreError | None = None
        self._head_seen = active.version
        self._last_new_s: float | None = None
        self._interval_s = self._settings.poll_min_s * 8
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def head_seen(self) -> int:
        """The newest version known to exist in this region."""
        return self._head_seen

    @property
    def tip(self) -> ActiveVersion:
        """The newest version staged or active."""
        return self._tip

    @property
    def error(self) -> DeltastoreError | None:
        """What keeps the follower from going on, until it goes on."""
        return self._error

    def staged(self) -> StagedUpdate | None:
        """What is ready for activation; it stays staged."""
        return self._staged

    def take(self) -> StagedUpdate | None:
        """Take what is staged, to activate it; on failure call `reset`."""
        with self._lock:
            update, self._staged = self._staged, None
        return update

    def reset(self, active: ActiveVersion) -> None:
        """Begin again from `active`: what was staged or taken is fetched anew."""
        with self._lock:
            self._tip, self._staged = active, None

    def poll(self) -> bool:
        """Stage the next version if there is one; return whether something new is staged.

        At most one request when nothing is new. Raises what keeps the next version from being
        staged; calling again tries again, around what is unreadable.
        """
        with self._lock:
            tip, staged = self._tip, self._staged
        if staged is not None and staged.host_bytes >= self._settings.stage_max_bytes:
            return False
        try:
            update = self._next(tip)
        except DeltastoreError as err:
            self._error = err
            raise
        self._error = None
        if update is None:
            return False
        with self._lock:
            if self._tip != tip:
                return False  # `reset` came in between
            before = self._staged
            self._staged = (
                update if before is None else join_updates(self._run.layout, before, update)
            )
            self._tip = update.target
        self._note_interval()
        return True

    def catch_up(self) -> None:
        """Stage until nothing newer exists. Stops early when the staging memory is full."""
        while self.poll():
            pass

    def start(self) -> None:
        """Poll in a background thread until `stop`."""
        self._thread = threading.Thread(target=self._watch, name="follow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the background thread after the request in flight."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _next(self, tip: ActiveVersion) -> StagedUpdate | None:
        following = tip.version + 1
        try:
            manifest = load_manifest(self._run, following)
        except NotFoundError as err:
            if err.kind is not Kind.VERSION_MISSING:
                raise
            self._refuse_hole(following)
            return None
        self._head_seen = max(self._head_seen, following)
        check_link(tip, manifest)
        try:
            return self._stage(tip, manifest)
        except (IntegrityError, FormatError, NotFoundError) as err:
            if err.kind in {Kind.BUCKET_MISSING, Kind.RUN_MISSING}:
                raise
            return self._stage_around(tip, following, err)

    def _refuse_hole(self, following: int) -> None:
        """An absent next version is the end, unless a later one is known to exist."""
        if self._head_seen > following and not version_exists(self._run, following):
            raise IntegrityError(
                f"version {following} is missing below version {self._head_seen}",
                kind=Kind.BROKEN_CHAIN,
                run=self._run.name,
                version=following,
                hint="restore its manifest from another region",
            )

    def _stage(self, tip: ActiveVersion, manifest: VersionManifest) -> StagedUpdate:
        started_s = self._clock.monotonic_s()
        streams = self._settings.streams
        target = ActiveVersion.of(manifest)
        size_bytes = manifest.core.delta_bytes
        if manifest.core.kind is VersionKind.FULL:
            state = fetch_full_state(self._run, manifest, streams=streams)
            update = StagedUpdate(tip, target, [], size_bytes, state=state)
        else:
            blocks: list[Block] = []
            for part in fetch_blocks(self._run, manifest, streams=streams):
                blocks.extend(part)
            update = StagedUpdate(tip, target, blocks, size_bytes)
        seconds = self._clock.monotonic_s() - started_s
        self._sink(
            VersionStaged(
                actor=self._name,
                version=target.version,
                size_bytes=size_bytes,
                nnz=update.nnz,
                stage_s=seconds,
            )
        )
        return update

    def _stage_around(
        self, tip: ActiveVersion, unreadable: int, cause: DeltastoreError
    ) -> StagedUpdate:
        """Plan past an unreadable version: only a full version above it can help."""
        try:
            links = links_to(
                self._run,
                self._newest(unreadable),
                held=tip,
                streams=self._settings.streams,
                avoid=frozenset({unreadable}),
            )
        except NotFoundError:
            raise cause from None  # no way around: wait here, and read it again at the next poll
        return self._stage(tip, links[0])

    def _newest(self, known: int) -> int:
        hinted = read_head_hint(self._run)
        newest = known
        if hinted is not None and hinted > known and version_exists(self._run, hinted):
            newest = hinted
        while version_exists(self._run, newest + 1):
            newest += 1
        self._head_seen = max(self._head_seen, newest)
        return newest

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                if self.poll():
                    continue
            except DeltastoreError as err:
                self._error = err  # shown to the actor; tried again after the wait
            self._wait()

    def _wait(self) -> None:
        """Until a hint arrives or the next poll is due, with jitter so that a fleet spreads."""
        base_s = (
            self._settings.poll_hinted_s
            if self._hint_source is not None
            else max(self._settings.poll_min_s, self._interval_s / 8)
        )
        wait_s = base_s * self._jitter.uniform(0.75, 1.25)
        if self._hint_source is None:
            self._clock.wait(self._stop, wait_s)
            return
        deadline_s = self._clock.monotonic_s() + wait_s
        while not self._stop.is_set() and self._clock.monotonic_s() < deadline_s:
            hinted = self._hint_source(self._tip.version, min(0.5, wait_s))
            if hinted is not None and hinted > self._tip.version:
                return

    def _note_interval(self) -> None:
        now_s = self._clock.monotonic_s()
        if self._last_new_s is not None:
            self._interval_s = 0.5 * self._interval_s + 0.5 * (now_s - self._last_new_s)
        self._last_new_s = now_s
