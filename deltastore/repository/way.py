"""A joiner that replays a thousand deltas pays for all of history: it takes the cheapest way.

The way from what is held (nothing, a checkpoint, version u) to a version: whole states, composites
and deltas. Version manifests are always walked, from the target downward, each hash naming the
next: they are small and stay for ever. Only bodies come from shortcuts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from deltastore.chain.plan import Link, TransferCost, cheapest_plan
from deltastore.errors import FormatError, IntegrityError, Kind, NotFoundError
from deltastore.format.manifest import VersionKind, VersionManifest
from deltastore.format.shortcut import AnchorManifest, CompositeManifest, Point
from deltastore.repository.floor import read_floor
from deltastore.repository.full import WEIGHTS_SUFFIX
from deltastore.repository.history import walk_down
from deltastore.repository.points import ActiveVersion
from deltastore.repository.shortcuts import (
    Listed,
    list_anchors,
    list_composites,
    load_anchor,
    load_composite,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deltastore.format.signing import TrustedKeys
    from deltastore.repository.run import Run

Edge: TypeAlias = tuple[int | None, int, str]
"""Base, version and kind of something that leads to a version: what a plan can avoid."""

DELTA, FULL, ANCHOR, COMPOSITE = "delta", "full", "anchor", "composite"
DEFAULT_COST = TransferCost()
MAX_WALK_VERSIONS = 4096
"""How far down a held version is looked for while a whole state is nearer: walks cost requests."""
_BELOW_FLOOR_COST = 1e12
"""Bodies below the floor are probably gone: they are the last thing to try."""
_OF_THE_RUN = (NotFoundError, IntegrityError, FormatError)


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to fetch: `shortcut` is None for the version's own segments or files."""

    target: VersionManifest
    shortcut: AnchorManifest | CompositeManifest | None = None

    @property
    def version(self) -> int:
        """Where it leads."""
        return self.target.core.version

    @property
    def base(self) -> int | None:
        """What it builds on; None for a whole state."""
        if isinstance(self.shortcut, CompositeManifest):
            return self.shortcut.core.base.version
        if self.shortcut is not None or self.target.core.kind is VersionKind.FULL:
            return None
        return self.target.core.base_version

    @property
    def kind(self) -> str:
        """One of delta, full, anchor, composite."""
        if isinstance(self.shortcut, CompositeManifest):
            return COMPOSITE
        if self.shortcut is not None:
            return ANCHOR
        return FULL if self.target.core.kind is VersionKind.FULL else DELTA

    @property
    def edge(self) -> Edge:
        """What names this step in a set of things to avoid."""
        return (self.base, self.version, self.kind)

    @property
    def size_bytes(self) -> int:
        """Bytes to fetch."""
        if self.shortcut is not None:
            return self.shortcut.core.size_bytes
        return self.target.core.delta_bytes

    @property
    def parts(self) -> int:
        """Objects to fetch: segments, or files with weights."""
        if isinstance(self.shortcut, CompositeManifest):
            return len(self.shortcut.core.segments)
        if self.shortcut is None:
            files, segments = self.target.core.files, self.target.core.segments
        else:
            files, segments = self.shortcut.core.files, ()
        return len(segments) + sum(file.name.endswith(WEIGHTS_SUFFIX) for file in files)


@dataclass(frozen=True, slots=True)
class Way:
    """Steps in order. The first is a whole state, or builds on what is held."""

    steps: tuple[Step, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes to fetch in all."""
        return sum(step.size_bytes for step in self.steps)

    def describe(self, held: int | None) -> str:
        """For people: "anchor v960 + 1 composite + 3 deltas"."""
        parts = [f"held v{held}"] if held is not None else []
        counts = {COMPOSITE: 0, DELTA: 0}
        for step in self.steps:
            if step.base is None:
                parts = [f"{step.kind} v{step.version}"]
                counts = {COMPOSITE: 0, DELTA: 0}
            else:
                counts[step.kind] += 1
        if counts[COMPOSITE]:
            parts.append(f"{counts[COMPOSITE]} composite{'s' * (counts[COMPOSITE] > 1)}")
        if counts[DELTA]:
            parts.append(f"{counts[DELTA]} deltas")
        return " + ".join(parts)


@dataclass(slots=True)
class Survey:
    """What a region offers below a version.

    Args:
        version: the newest one surveyed.
        manifests: of the versions from there down, linked by hash.
        held: the caller's own version, if the history passes through it.
        shortcuts: those that a listing shows, both ends known or not.
        floor: bodies at or below it may be gone.
    """

    version: int
    manifests: dict[int, VersionManifest]
    held: ActiveVersion | None
    shortcuts: list[Listed]
    floor: int = 0
    avoid: set[Edge] = field(default_factory=set)

    def whole_states(self) -> list[int]:
        """The versions that are there as whole states: with an anchor, or full ones."""
        anchors = [one.version for one in self.shortcuts if one.base is None]
        full = [v for v, m in self.manifests.items() if m.core.kind is VersionKind.FULL]
        return anchors + full

    def links(self, cost: TransferCost, *, starts: bool) -> Iterator[Link]:
        """Everything that leads anywhere, with its price; without `starts` no whole states."""
        for manifest in self.manifests.values():
            core = manifest.core
            full = core.kind is VersionKind.FULL
            if full and not starts:
                continue
            base = None if full else core.base_version
            version, kind = core.version, FULL if full else DELTA
            gone = version < self.floor if full else version <= self.floor
            if (base, version, kind) not in self.avoid:
                price = cost.of(core.delta_bytes) + _BELOW_FLOOR_COST * gone
                yield Link(base, version, price, kind)
        for listed in self.shortcuts:
            kind = ANCHOR if listed.base is None else COMPOSITE
            edge = (listed.base, listed.version, kind)
            if edge in self.avoid or listed.version not in self.manifests:
                continue
            if listed.base is None and not starts:
                continue
            if listed.base is not None and not self._knows(listed.base):
                continue
            at = listed.version if listed.base is None else listed.base
            price = cost.of(listed.size_bytes) + _BELOW_FLOOR_COST * (at < self.floor)
            yield Link(listed.base, listed.version, price, kind)

    def choose(
        self,
        run: Run,
        *,
        base: int | None,
        version: int,
        cost: TransferCost = DEFAULT_COST,
        starts: bool = True,
        trusted: TrustedKeys | None = None,
    ) -> Way:
        """The cheapest way whose shortcuts have been read and checked.

        A shortcut that does not hold is added to `avoid` and planned around. Raises
        NotFoundError(version_missing) when no way is left.
        """
        while True:
            plan = cheapest_plan(base, version, self.links(cost, starts=starts))
            steps: list[Step] = []
            for link in plan.links:
                edge = (link.base, link.version, link.name)
                try:
                    steps.append(self._step(run, link, trusted))
                except _OF_THE_RUN as err:
                    if err.kind in {Kind.BUCKET_MISSING, Kind.RUN_MISSING}:
                        raise
                    self.avoid.add(edge)
                    break
            else:
                return Way(tuple(steps))

    def point(self, version: int) -> ActiveVersion:
        """A surveyed version, or the held one, as a point."""
        if self.held is not None and version == self.held.version:
            return self.held
        return ActiveVersion.of(self.manifests[version])

    def _knows(self, version: int) -> bool:
        return version in self.manifests or (self.held is not None and version == self.held.version)

    def _step(self, run: Run, link: Link, trusted: TrustedKeys | None) -> Step:
        target = self.manifests[link.version]
        if link.name == ANCHOR:
            return Step(target, load_anchor(run, target, trusted=trusted))
        if link.name == COMPOSITE and link.base is not None:
            at = self.point(link.base)
            base = Point(at.version, at.policy_hash, at.fingerprint)
            return Step(target, load_composite(run, base, target, trusted=trusted))
        return Step(target)


def survey(
    run: Run,
    version: int,
    *,
    held: ActiveVersion | None = None,
    lowest: int | None = None,
    streams: int = 8,
    avoid: Iterable[Edge] = (),
    trusted: TrustedKeys | None = None,
) -> Survey:
    """Look at what leads to `version`.

    Args:
        held: what the caller has; used only if the version's history passes through it.
        lowest: walk down to this version (maintenance); otherwise down to what is held, or to the
            newest whole state, whichever a plan can need.
        avoid: what was found unreadable or gone.

    Raises what `walk_down` raises, unless a whole state above the trouble can be used.
    """
    avoided = set(avoid)
    first = 0 if held is None else held.version
    anchors = [one for one in list_anchors(run) if (None, one.version, ANCHOR) not in avoided]
    composites = list_composites(run, first=first if lowest is None else lowest)
    floor = read_floor(run)
    found = Survey(version, {}, None, [*anchors, *composites], avoid=avoided)
    if floor is not None and floor.version <= version:
        found.floor = floor.version
    whole = {one.version for one in anchors}
    started = False
    try:
        for manifest in walk_down(run, version, streams=streams, trusted=trusted):
            core = manifest.core
            if held is not None and ActiveVersion.of(manifest) == held:
                found.held = held
                break
            found.manifests[core.version] = manifest
            full = core.kind is VersionKind.FULL and (None, core.version, FULL) not in avoided
            started = started or full or core.version in whole
            if lowest is not None:
                if core.version <= lowest:
                    break
            elif started and _low_enough(core.version, version, held):
                break
    except _OF_THE_RUN:
        if not started:
            raise
        # What lies below a usable whole state is only a chance of a cheaper way.
    return found


def _low_enough(at: int, version: int, held: ActiveVersion | None) -> bool:
    return held is None or at <= held.version or version - at >= MAX_WALK_VERSIONS


def find_way(
    run: Run,
    version: int,
    *,
    held: ActiveVersion | None = None,
    streams: int = 8,
    cost: TransferCost = DEFAULT_COST,
    avoid: Iterable[Edge] = (),
    trusted: TrustedKeys | None = None,
) -> Way:
    """The cheapest way from `held` (None: nothing) to `version`, its shortcuts read and checked.

    Raises NotFoundError(version_missing) when none is left, or what `walk_down` raises.
    """
    avoided = set(avoid)
    while True:
        found = survey(run, version, held=held, streams=streams, avoid=avoided, trusted=trusted)
        base = None if found.held is None else found.held.version
        try:
            return found.choose(run, base=base, version=version, cost=cost, trusted=trusted)
        except NotFoundError as err:
            # A listed anchor that does not hold ended the survey too early: look further down.
            if err.kind is not Kind.VERSION_MISSING or found.avoid == avoided:
                raise
            avoided = found.avoid
