"""A checkpoint that cannot be rebuilt from the bucket alone is not a checkpoint: this rebuilds it.

Replays the chain to any version, bit for bit, along the cheapest way. What is missing or damaged on
the way (a body below the floor, a shortcut that does not hold) is planned around: such a read ends
in success, or in the error that says what is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.errors import DeltastoreError, FormatError, IntegrityError, Kind, NotFoundError
from deltastore.format.shortcut import AnchorManifest, CompositeManifest
from deltastore.repository.applying import Application
from deltastore.repository.fetch import fetch_blocks, fetch_composite_blocks, load_manifest
from deltastore.repository.floor import read_floor
from deltastore.repository.full import fetch_full_state, fetch_state
from deltastore.repository.history import require_signed
from deltastore.repository.points import ActiveVersion
from deltastore.repository.resolve import find_head
from deltastore.repository.way import DEFAULT_COST, FULL, Edge, Step, Way, find_way

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deltastore.chain.plan import TransferCost
    from deltastore.clock import Clock
    from deltastore.format.block import Block
    from deltastore.format.fields import SegmentRef
    from deltastore.format.layout import BitState
    from deltastore.format.manifest import VersionManifest
    from deltastore.format.signing import TrustedKeys
    from deltastore.repository.run import Run

MAX_PLANS = 64
"""Ways tried before giving up: each failure takes one link out, retention rarely more than two."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A state on the host and the version it is at."""

    state: BitState
    point: ActiveVersion


@dataclass(frozen=True, slots=True)
class JoinReport:
    """From what a version was reached, and what it cost.

    Args:
        via: for people, for example "full v0 + 8 deltas".
        size_bytes: bytes of bodies read from the bucket.
        links: deltas applied.
        composites: composites applied.
        plans: ways tried; more than one when something was gone or damaged.
        parts: objects with weights that were applied.
    """

    via: str
    size_bytes: int
    links: int
    seconds: float
    composites: int = 0
    plans: int = 1
    parts: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Replayed:
    """A rebuilt state, the manifest that names it, and how it was reached."""

    state: BitState
    manifest: VersionManifest
    report: JoinReport

    @property
    def held(self) -> Held:
        """The state as something to build on."""
        return Held(self.state, ActiveVersion.of(self.manifest))


def replay(
    run: Run,
    version: int | None = None,
    *,
    clock: Clock,
    held: Held | None = None,
    streams: int = 8,
    progress: Callable[[int], None] | None = None,
    cost: TransferCost = DEFAULT_COST,
    trusted: TrustedKeys | None = None,
) -> Replayed:
    """Rebuild a version (None: HEAD) from the bucket.

    Args:
        held: a state to build on if the version's history passes through it; it is changed in
            place and must not be used afterwards.
        progress: called with the bytes of each piece read.
        cost: what requests and bytes cost, to choose between ways.
        trusted: keys that must have signed the version and every shortcut; None trusts the bucket.

    Raises NotFoundError (version_missing, gone), IntegrityError, FormatError, StorageError.
    """
    started_s = clock.monotonic_s()
    target = find_head(run) if version is None else version
    journey = _Journey(run, target, held, streams, progress, cost, trusted)
    state, manifest = journey.travel()
    return Replayed(state, manifest, journey.report(clock.monotonic_s() - started_s))


class _Journey:
    """The state on its way to a version, and what was learnt on the way."""

    def __init__(
        self,
        run: Run,
        target: int,
        held: Held | None,
        streams: int,
        progress: Callable[[int], None] | None,
        cost: TransferCost,
        trusted: TrustedKeys | None,
    ) -> None:
        self._run = run
        self._target = target
        self._held = held
        self._proved = False  # whether what is held was read from the bucket, and proved
        self._streams = streams
        self._progress = progress or _ignore
        self._cost = cost
        self._trusted = trusted
        self._avoid: set[Edge] = set()
        self._first_version = None if held is None else held.point.version
        self._taken: list[Step] = []
        self._read_bytes = 0
        self._plans = 0
        self._cause: DeltastoreError | None = None

    def travel(self) -> tuple[BitState, VersionManifest]:
        """Plan, take the steps, plan again around what fails."""
        while True:
            way = self._plan()
            if self._take_all(way):
                break
        if self._held is None:
            raise IntegrityError(
                "a way without a start", kind=Kind.BROKEN_CHAIN, run=self._run.name
            )
        if self._taken:
            return self._held.state, self._taken[-1].target
        manifest = load_manifest(self._run, self._target)
        require_signed(self._run, manifest, self._trusted)
        return self._held.state, manifest

    def report(self, seconds: float) -> JoinReport:
        """How it went."""
        way = Way(tuple(self._taken))
        kinds = [step.kind for step in self._taken]
        last_start = max((i for i, step in enumerate(self._taken) if step.base is None), default=0)
        return JoinReport(
            via=way.describe(self._first_version),
            size_bytes=self._read_bytes,
            links=kinds[last_start:].count("delta"),
            seconds=seconds,
            composites=kinds[last_start:].count("composite"),
            plans=self._plans,
            parts=sum(step.parts for step in self._taken),
        )

    def _plan(self) -> Way:
        self._plans += 1
        point = None if self._held is None else self._held.point
        try:
            if self._plans > MAX_PLANS and self._cause is not None:
                raise self._cause
            return find_way(
                self._run,
                self._target,
                held=point,
                streams=self._streams,
                cost=self._cost,
                avoid=self._avoid,
                trusted=self._trusted,
            )
        except (NotFoundError, IntegrityError, FormatError) as err:
            cause = self._cause
            if cause is None:
                raise
            raise self._lost(cause) from err

    def _take_all(self, way: Way) -> bool:
        for step in way.steps:
            try:
                self._take(step)
            except (NotFoundError, IntegrityError, FormatError) as err:
                if err.kind in {Kind.BUCKET_MISSING, Kind.RUN_MISSING}:
                    raise
                self._cause = self._cause or err
                if err.kind is Kind.FINGERPRINT and step.base is not None and not self._proved:
                    self._held = None  # the caller's state is not what it says: blame it first
                else:
                    self._avoid.add(step.edge)
                return False
            self._taken.append(step)
        return True

    def _take(self, step: Step) -> None:
        """Move to the step's version; a failure in the middle leaves nothing held."""
        if step.base is None:
            state = fetch_whole(self._run, step, streams=self._streams, progress=self._count)
            self._held, self._proved = Held(state, ActiveVersion.of(step.target)), True
            return
        if self._held is None:
            raise IntegrityError(
                "a way without a start", kind=Kind.BROKEN_CHAIN, run=self._run.name
            )
        application = Application(self._held.state)
        sizes = [segment.size_bytes for segment in _segments(step)]
        try:
            for number, blocks in enumerate(step_blocks(self._run, step, streams=self._streams)):
                application.add(blocks)
                self._count(sizes[number])
            application.finish()
        except DeltastoreError:
            if application.touched:
                self._held = None  # half of one version and half of another
            raise
        self._held = Held(self._held.state, ActiveVersion.of(step.target))

    def _count(self, size_bytes: int) -> None:
        self._read_bytes += size_bytes
        self._progress(size_bytes)

    def _lost(self, cause: DeltastoreError) -> DeltastoreError:
        """The first failure; as `gone` when retention explains it."""
        floor = read_floor(self._run)
        if cause.kind is not Kind.OBJECT_MISSING or floor is None or self._target >= floor.version:
            return cause
        return NotFoundError(
            f"version {self._target} can no longer be rebuilt: what it needs was deleted by"
            f" retention (the floor is {floor.version})",
            kind=Kind.GONE,
            run=self._run.name,
            version=self._target,
            key=cause.key,
            hint=f"ask for version {floor.version} or newer",
        )


def fetch_whole(
    run: Run, step: Step, *, streams: int, progress: Callable[[int], None] | None = None
) -> BitState:
    """The state of a step that is an anchor or a full version."""
    if step.kind == FULL:
        return fetch_full_state(run, step.target, streams=streams, progress=progress)
    if not isinstance(step.shortcut, AnchorManifest):
        raise IntegrityError("this step is no whole state", kind=Kind.BROKEN_CHAIN, run=run.name)
    core = step.shortcut.core
    return fetch_state(
        run,
        core.files,
        version=core.target.version,
        fingerprint=core.target.fingerprint,
        streams=streams,
        progress=progress,
    )


def step_blocks(run: Run, step: Step, *, streams: int) -> Iterator[list[Block]]:
    """The verified blocks of a step that is a delta or a composite; see `fetch_blocks`."""
    if isinstance(step.shortcut, CompositeManifest):
        return fetch_composite_blocks(run, step.shortcut, streams=streams)
    return fetch_blocks(run, step.target, streams=streams)


def _segments(step: Step) -> tuple[SegmentRef, ...]:
    if isinstance(step.shortcut, CompositeManifest):
        return step.shortcut.core.segments
    return step.target.core.segments


def _ignore(size_bytes: int) -> None:
    """A progress that nobody watches."""
