"""Taking the newest listed version for HEAD hides a hole below it and a version above it.

HEAD is found from the listing (once, at a start), the head hint (a guess that is checked) and
probes upward to the first absent number. A hole inside is an error, not an end.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from deltastore.errors import FormatError, IntegrityError, Kind, NotFoundError
from deltastore.format.canonical import parse_canonical_json
from deltastore.format.keys import Hint, KeyKind, parse_key
from deltastore.ids import MAX_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltastore.repository.run import Run

MAX_HINT_BYTES = 4096


def version_exists(run: Run, version: int) -> bool:
    """Whether the version's manifest is in this store."""
    try:
        run.store.head(run.keys.version(version))
    except NotFoundError as err:
        if err.kind is not Kind.OBJECT_MISSING:
            raise
        return False
    return True


def list_versions(run: Run) -> list[int]:
    """Every listed version, ascending. For a start and for fsck: listings may be stale."""
    versions: list[int] = []
    for info in run.store.list(run.keys.versions):
        try:
            parsed = parse_key(info.key)
        except FormatError:
            continue  # a stray object is fsck's business; it is no version by any reading
        if parsed.kind is KeyKind.VERSION and parsed.version is not None:
            versions.append(parsed.version)
    return versions


def read_head_hint(run: Run) -> int | None:
    """The advertised version: a guess, to be checked. None when missing or garbage."""
    try:
        text = run.store.get(run.keys.hint(Hint.HEAD))
        document = parse_canonical_json(text, what="head hint", max_bytes=MAX_HINT_BYTES)
    except (NotFoundError, FormatError):
        return None
    version = document.get("version") if isinstance(document, dict) else None
    if isinstance(version, bool) or not isinstance(version, int):
        return None
    return version if 0 <= version <= MAX_VERSION else None


def find_head(run: Run) -> int:
    """The newest committed version.

    Raises NotFoundError(version_missing) when the run has no version at all, and
    IntegrityError(broken_chain) naming the numbers that are missing inside.
    """
    listed = list_versions(run)
    head = listed[-1] if listed else -1
    hinted = read_head_hint(run)
    if hinted is not None and hinted > head and version_exists(run, hinted):
        listed.append(hinted)
        head = hinted
    while head < MAX_VERSION and version_exists(run, head + 1):
        head += 1
        listed.append(head)
    if head < 0:
        raise NotFoundError(
            f"run {run.name!r} has no version 0: its creation was cut short",
            kind=Kind.VERSION_MISSING,
            run=run.name,
            version=0,
            hint="run the same `deltastore init` again to finish it",
        )
    _require_contiguous(run, listed)
    return head


def _require_contiguous(run: Run, listed: Sequence[int]) -> None:
    # A region's chain may start at an anchor above 0; home's always starts at 0.
    for below, above in pairwise(sorted(set(listed))):
        for version in range(below + 1, above):
            if version_exists(run, version):
                continue  # the listing was stale
            raise IntegrityError(
                f"the chain has a hole: version {version} is missing below {above}",
                kind=Kind.BROKEN_CHAIN,
                run=run.name,
                version=version,
                hint="restore the manifests from another region; `deltastore verify` lists them",
            )
