"""A joiner that replays everything from version 0 pays for history: it takes the cheapest way.

A plan is a start (what is held, or a full state to fetch) and the links to apply after it, in
order. Pure: costs come in, a plan goes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.errors import InvalidInputError, Kind, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class TransferCost:
    """What fetching costs, in expected seconds; with (0, 1) it counts bytes.

    Args:
        request_s: of one more thing to fetch: why one composite beats eight deltas of its size.
        bytes_per_s: of the line.
    """

    request_s: float = 0.05  # a round trip to an object store in the same region
    bytes_per_s: float = 125e6  # 1 Gbps

    def __post_init__(self) -> None:
        if self.request_s < 0 or not self.bytes_per_s > 0:
            raise InvalidInputError(
                f"a transfer cannot cost {self.request_s} s and {self.bytes_per_s} B/s",
                kind=Kind.SETTING,
                hint="request_s must not be negative, bytes_per_s must be above 0",
            )

    def of(self, size_bytes: int) -> float:
        """The cost of one object of that size."""
        return self.request_s + size_bytes / self.bytes_per_s


BY_BYTES = TransferCost(request_s=0.0, bytes_per_s=1.0)
"""Costs in bytes alone."""


@dataclass(frozen=True, slots=True)
class Link:
    """Something that turns `base` into `version` for `cost` (bytes, or seconds).

    `base` is None for a whole state: an anchor or a full version. `name` tells links with the same
    ends apart.
    """

    base: int | None
    version: int
    cost: float
    name: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """The links to fetch, in order, and what they cost together."""

    links: tuple[Link, ...]
    cost: float

    @property
    def starts_from_held(self) -> bool:
        """Whether the plan builds on what is held rather than on a fetched whole state."""
        return not self.links or self.links[0].base is not None


def cheapest_plan(held: int | None, target: int, links: Iterable[Link]) -> Plan:
    """The cheapest way from version `held` (None: nothing) to `target`; ties take fewer links.

    Raises NotFoundError(version_missing) when no way leads there, naming the first gap.
    """
    if held == target:
        return Plan((), 0.0)
    into: dict[int, list[Link]] = {}
    for link in links:
        if link.version <= target and (link.base is None or link.base < link.version):
            into.setdefault(link.version, []).append(link)
    best: dict[int, tuple[float, int, Link | None]] = {}
    if held is not None:
        best[held] = (0.0, 0, None)
    # Every link goes upward, so ascending versions are a topological order.
    for version in sorted(into):
        for link in into[version]:
            before = (0.0, 0, None) if link.base is None else best.get(link.base)
            if before is None:
                continue
            offer = (before[0] + link.cost, before[1] + 1, link)
            if version not in best or offer[:2] < best[version][:2]:
                best[version] = offer
    if target not in best:
        raise _gap(held, target, best)
    chosen: list[Link] = []
    at: int | None = target
    while at is not None and (last := best[at][2]) is not None:
        chosen.append(last)
        at = last.base
    return Plan(tuple(reversed(chosen)), best[target][0])


def _gap(
    held: int | None, target: int, best: dict[int, tuple[float, int, Link | None]]
) -> NotFoundError:
    reached = max(best, default=None)
    missing = target if reached is None else reached + 1
    return NotFoundError(
        f"no way leads to version {target}: version {missing} is missing or unreadable",
        kind=Kind.VERSION_MISSING,
        version=missing,
        hint=f"held: {'nothing' if held is None else held}; wait for a full version or an anchor",
    )
