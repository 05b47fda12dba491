"""An actor that downloads during its pause stops the fleet: it stages in the background instead.

Watches for the next version (a computed key, never a listing), fetches and verifies it, decodes
it, and composes it with what is staged already. Activation is the applier's, at a safe point.

When many versions wait it takes the cheapest way to the newest one: composites, or an anchor. A
version that cannot be read, or is gone, is fetched once more (by `fetch_all`), then another way is
planned around it; until there is one the follower waits where it is. It never skips a version and
never continues past one.

Memory: `stage_max_bytes` of decoded changes plus one version; when full, staging waits.
"""

from __future__ import annotations

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
from deltastore.pipeline.pace import Pace
from deltastore.pipeline.staged import StagedUpdate, join_updates
from deltastore.repository.fetch import load_manifest
from deltastore.repository.history import require_signed
from deltastore.repository.points import ActiveVersion, check_link
from deltastore.repository.rebuild import fetch_whole, step_blocks
from deltastore.repository.resolve import read_head_hint, version_exists
from deltastore.repository.way import Edge, Step, find_way

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.clock import Clock
    from deltastore.events import EventSink
    from deltastore.format.block import Block
    from deltastore.format.signing import TrustedKeys
    from deltastore.repository.run import Run

JUMP_VERSIONS = 8
"""Further behind than this a plan is worth two listings: below it there is no composite to find."""


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
        seed: int | None = None,
        trusted: TrustedKeys | None = None,
        until: int | None = None,
    ) -> None:
        """Follow `run` from `active`.

        Args:
            name: of the actor, for events.
            hint_source: called with (newest known version, seconds); waits at most that long for
                a newer version to be advertised and returns its number. Hints only save polls.
            seed: of the jitter; None: another one for everybody, so that a fleet spreads.
            trusted: keys that must have signed versions and shortcuts; None trusts the bucket.
            until: nothing beyond this version is staged; None: everything.
        """
        self._run = run
        self._name = name
        self._clock = clock
        self._settings = settings or FollowerSettings()
        self._sink = sink
        self._hint_source = hint_source
        self._lock = threading.Lock()
        self._trusted = trusted
        self._until = until
        self._tip = active
        self._steps: list[Step] = []  # of a way that was planned, not yet staged
        self._may_be_behind = True  # until a poll has found nothing new
        self._staged: StagedUpdate | None = None
        self._error: DeltastoreError | None = None
        self._head_seen = active.version
        hinted, now_s = hint_source is not None, clock.monotonic_s()
        self._pace = Pace(self._settings, hinted=hinted, now_s=now_s, seed=seed)
        self._backoff = self._pace.backoff()
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
            self._tip, self._staged, self._steps = active, None, []
            self._may_be_behind = True

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
        if not self._keep(tip, update):
            return False  # `reset` came in between
        self._pace.arrived(self._clock.monotonic_s())
        return True

    def _keep(self, tip: ActiveVersion, update: StagedUpdate) -> bool:
        """Stage what leads on from `tip`; composed without the lock, `take` would wait for it."""
        with self._lock:
            if self._tip != tip:
                return False
            before = self._staged
            if before is not None and before.state is not None:
                update = join_updates(self._run.layout, before, update)  # writes into its state
                self._staged, self._tip = update, update.target
                return True
        joined = update if before is None else join_updates(self._run.layout, before, update)
        with self._lock:
            if self._tip != tip:
                return False
            self._staged = joined if self._staged is before else update  # it was taken
            self._tip = update.target
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
        planned = self._planned_step(tip)
        if planned is not None:
            return self._stage_or_around(tip, planned)
        following = tip.version + 1
        if self._clipped(following) != following:
            return None
        try:
            manifest = load_manifest(self._run, following)
        except NotFoundError as err:
            if err.kind is not Kind.VERSION_MISSING:
                raise
            self._refuse_hole(following)
            self._may_be_behind = False
            return None
        self._head_seen = max(self._head_seen, following)
        step = self._jump(tip) if self._may_be_behind else None
        self._may_be_behind = True
        if step is None:
            require_signed(self._run, manifest, self._trusted)
            check_link(tip, manifest)
            step = Step(manifest)
        return self._stage_or_around(tip, step)

    def _planned_step(self, tip: ActiveVersion) -> Step | None:
        """The next step of the way under way, if it starts at the tip."""
        step = self._steps.pop(0) if self._steps else None
        if step is not None and step.base in {None, tip.version}:
            return step
        self._steps = []
        return None

    def _jump(self, tip: ActiveVersion) -> Step | None:
        """The first step of the cheapest way to a version far above, if one is known to exist."""
        hinted = read_head_hint(self._run)
        if hinted is None or self._clipped(hinted) - tip.version <= JUMP_VERSIONS:
            return None
        newest = self._clipped(self._newest(tip.version))
        if newest - tip.version <= JUMP_VERSIONS:
            return None
        return self._plan(tip, newest, frozenset())

    def _plan(self, tip: ActiveVersion, newest: int, avoid: frozenset[Edge]) -> Step:
        way = find_way(
            self._run,
            newest,
            held=tip,
            streams=self._settings.streams,
            avoid=avoid,
            trusted=self._trusted,
        )
        first, *self._steps = way.steps
        return first

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

    def _stage_or_around(self, tip: ActiveVersion, step: Step) -> StagedUpdate:
        """Stage a step, or another one around what is unreadable or gone, as often as it helps."""
        avoid: set[Edge] = set()
        cause: DeltastoreError | None = None
        while True:
            try:
                return self._stage(tip, step)
            except (IntegrityError, FormatError, NotFoundError) as err:
                self._steps = []
                if err.kind in {Kind.BUCKET_MISSING, Kind.RUN_MISSING}:
                    raise
                cause = cause or err
                avoid.add(step.edge)
            try:
                newest = self._clipped(self._newest(step.version))
                step = self._plan(tip, newest, frozenset(avoid))
            except NotFoundError:
                raise cause from None  # no way around: wait here, read again at the next poll

    def _stage(self, tip: ActiveVersion, step: Step) -> StagedUpdate:
        started_s = self._clock.monotonic_s()
        streams = self._settings.streams
        target = ActiveVersion.of(step.target)
        size_bytes = step.size_bytes
        versions = target.version - tip.version
        if step.base is None:
            state = fetch_whole(self._run, step, streams=streams)
            update = StagedUpdate(tip, target, [], size_bytes, versions, state)
        else:
            blocks: list[Block] = []
            for part in step_blocks(self._run, step, streams=streams):
                blocks.extend(part)
            update = StagedUpdate(tip, target, blocks, size_bytes, versions)
        seconds = self._clock.monotonic_s() - started_s
        self._sink(
            VersionStaged(
                actor=self._name,
                version=target.version,
                size_bytes=size_bytes,
                nnz=update.nnz,
                stage_s=seconds,
                region=self._run.region,
                parts=step.parts,
            )
        )
        return update

    def _clipped(self, version: int) -> int:
        return version if self._until is None else min(version, self._until)

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
                new = self.poll()
            except DeltastoreError as err:
                self._error = err  # shown to the actor; tried again after the wait
                wait_s = self._pace.failed_s(self._backoff, self._clock.monotonic_s())
                self._clock.wait(self._stop, wait_s)  # a hint does not end it
                continue
            self._backoff.succeeded()
            if not new:
                self._wait()

    def _wait(self) -> None:
        """Until a hint arrives or the next poll is due."""
        now_s = self._clock.monotonic_s()
        wait_s = self._pace.idle_s(now_s)
        if self._hint_source is None:
            self._clock.wait(self._stop, wait_s)
            return
        deadline_s = now_s + wait_s
        while not self._stop.is_set() and self._clock.monotonic_s() < deadline_s:
            hinted = self._hint_source(self._tip.version, min(0.5, wait_s))
            if hinted is not None and hinted > self._tip.version:
                return
