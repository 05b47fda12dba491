"""A chain read upward can be fed a forged start: it is read downward, each hash naming the next.

The manifests from a version down to a point that is held, or to a whole state. One digest at the
top vouches for everything below it: with trusted keys only the top must be signed.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from deltastore.errors import Kind, NotFoundError
from deltastore.format.signing import MaySign, TrustedKeys
from deltastore.repository.fetch import load_manifest
from deltastore.repository.points import ActiveVersion, check_link

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.format.fingerprint import Fingerprint
    from deltastore.format.manifest import VersionManifest
    from deltastore.repository.run import Run


def require_signed(run: Run, manifest: VersionManifest, trusted: TrustedKeys | None) -> None:
    """Raise IntegrityError(signature) unless a trusted key signed the version; None trusts all."""
    if trusted is not None:
        core = manifest.core
        trusted.require(
            core.canonical_bytes(),
            manifest.signatures,
            MaySign.VERSIONS,
            what=f"version {core.version}",
            key=run.keys.version(core.version),
        )


def walk_down(
    run: Run, version: int, *, streams: int, trusted: TrustedKeys | None = None
) -> Iterator[VersionManifest]:
    """Manifests from `version` downward, each checked to be the base of the one before it.

    Fetched ahead by `streams` requests. Ends after version 0. Raises NotFoundError
    (version_missing) or IntegrityError (broken_chain, wrong_base, fingerprint, generation,
    signature) at the first manifest that does not fit.
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
                manifest = _named(run, ahead.popleft(), above)
                if above is None:
                    require_signed(run, manifest, trusted)
                else:
                    check_link(ActiveVersion.of(manifest), above)
                yield manifest
                above = manifest
        finally:
            for future in ahead:
                future.cancel()


def _named(
    run: Run, loading: Future[VersionManifest], above: VersionManifest | None
) -> VersionManifest:
    """What was loaded; a link that is missing is called that, not a version nobody made."""
    try:
        return loading.result()
    except NotFoundError as err:
        if err.kind is not Kind.VERSION_MISSING or above is None:
            raise
        raise NotFoundError(
            f"the chain has a hole: version {err.version} is missing below {above.core.version}",
            kind=Kind.VERSION_MISSING,
            run=run.name,
            version=err.version,
            key=err.key,
            hint="restore its manifest from another region; `deltastore verify` lists what is gone",
        ) from err


def locate(
    run: Run,
    fingerprint: Fingerprint,
    *,
    newest: int,
    streams: int,
    trusted: TrustedKeys | None = None,
) -> ActiveVersion | None:
    """Which version a state with that fingerprint is at: 0 is tried first, then newest first.

    With trusted keys a match at 0 is still only as good as the first signed version that builds
    on it: whoever follows from there checks that one.
    """
    try:
        zero = load_manifest(run, 0)
    except NotFoundError as err:
        if err.kind is not Kind.VERSION_MISSING:
            raise
        zero = None  # a region's chain may begin at an anchor
    if zero is not None and zero.core.fingerprint_after == fingerprint:
        return ActiveVersion.of(zero)
    for manifest in walk_down(run, newest, streams=streams, trusted=trusted):
        if manifest.core.fingerprint_after == fingerprint:
            return ActiveVersion.of(manifest)
    return None
