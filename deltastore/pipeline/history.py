"""A chain read upward can be fed a forged start: it is read downward, each hash naming the next.

The manifests from a version down to a point that is held, or to a full version. One digest at the
top vouches for everything below it.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from deltastore.chain.plan import Link, cheapest_plan
from deltastore.errors import FormatError, IntegrityError, NotFoundError
from deltastore.format.manifest import VersionKind, VersionManifest
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion, check_link

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.format.fingerprint import Fingerprint
    from deltastore.repository.run import Run


def walk_down(run: Run, version: int, *, streams: int) -> Iterator[VersionManifest]:
    """Manifests from `version` downward, each checked to be the base of the one before it.

    Fetched ahead by `streams` requests. Ends after version 0. Raises NotFoundError
    (version_missing) or IntegrityError (broken_chain, wrong_base, fingerprint, generation) at the
    first manifest that does not fit.
    """
    above: VersionManifest | None = None
    with ThreadPoolExecutor(streams, thread_name_prefix="history") as pool:
        ahead: deque[Future[VersionManifest]] = deque()
        following = version
        try:
            while ahead or following >= 0:
                while following >= 0 and len(ahead) < streams:
                    ahead.append(pool.submit(load_manifest, run, following))
                    following -= 1
                manifest = ahead.popleft().result()
                if above is not None:
                    check_link(ActiveVersion.of(manifest), above)
                yield manifest
                above = manifest
        finally:
            for future in ahead:
                future.cancel()


def links_to(
    run: Run,
    version: int,
    *,
    held: ActiveVersion | None,
    streams: int,
    avoid: frozenset[int] = frozenset(),
) -> list[VersionManifest]:
    """The manifests to apply, ascending: the cheapest way by bytes from `held` or from a full one.

    Args:
        held: what the caller has; used only if the version's history passes through it.
        avoid: versions whose bodies were found unreadable.

    Raises NotFoundError(version_missing) for a missing link, or what `walk_down` raises.
    """
    manifests: dict[int, VersionManifest] = {}
    start: int | None = None
    has_full = False
    try:
        for manifest in walk_down(run, version, streams=streams):
            if held is not None and ActiveVersion.of(manifest) == held:
                start = held.version
                break
            core = manifest.core
            manifests[core.version] = manifest
            has_full |= core.kind is VersionKind.FULL and core.version not in avoid
            if has_full and (held is None or core.version <= held.version):
                break
    except (NotFoundError, IntegrityError, FormatError):
        if not has_full:
            raise
        # What lies below a usable full version is only a chance of a cheaper way.
    links = [
        Link(
            None if m.core.kind is VersionKind.FULL else m.core.base_version,
            m.core.version,
            float(m.core.delta_bytes),
        )
        for m in manifests.values()
        if m.core.version not in avoid
    ]
    plan = cheapest_plan(start, version, links)
    return [manifests[link.version] for link in plan.links]


def locate(
    run: Run, fingerprint: Fingerprint, *, newest: int, streams: int
) -> ActiveVersion | None:
    """Which version a state with that fingerprint is at: 0 is tried first, then newest first."""
    zero = load_manifest(run, 0)
    if zero.core.fingerprint_after == fingerprint:
        return ActiveVersion.of(zero)
    for manifest in walk_down(run, newest, streams=streams):
        if manifest.core.fingerprint_after == fingerprint:
            return ActiveVersion.of(manifest)
    return None
