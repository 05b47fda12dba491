"""A shortcut that names an absent object sends every joiner astray: bodies first, then one put.

Write order, and what a crash leaves after each step:
  1. bodies under a random attempt of their own    orphans: nothing names them, the janitor's
  2. the manifest, create-only: THE COMMIT POINT   of several workers one wins, the others' bodies
                                                   are orphans (and are deleted by who lost)
Bodies that are older than `deadline_s` when the manifest could be written are given up: the janitor
takes what is older than twice that, so it never takes what a manifest is about to name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.errors import ConflictError, Kind, NotFoundError, StorageError
from deltastore.storage.store import PutMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltastore.clock import Clock
    from deltastore.repository.run import Run


def commit_shortcut(
    run: Run,
    key: str,
    text: bytes,
    bodies: Sequence[str],
    *,
    started_s: float,
    deadline_s: float,
    clock: Clock,
) -> bool:
    """Make a shortcut exist; False when another worker's is there already.

    Args:
        bodies: keys that the manifest names, all confirmed, none put before `started_s`.

    Raises StorageError(timeout) when the bodies are too old to be named.
    """
    if clock.monotonic_s() - started_s > deadline_s:
        run.store.delete(bodies)
        raise _too_slow(key, deadline_s)
    try:
        run.store.put(key, text, mode=PutMode.CREATE)
    except ConflictError:
        run.store.delete(bodies)
        return False
    if clock.monotonic_s() - started_s > deadline_s and not _all_there(run, bodies):
        run.store.delete([key])  # this process stood still before the put, and the janitor came by
        raise _too_slow(key, deadline_s)
    return True


def is_there(run: Run, key: str) -> bool:
    """Whether an object exists."""
    try:
        run.store.head(key)
    except NotFoundError as err:
        if err.kind is not Kind.OBJECT_MISSING:
            raise
        return False
    return True


def _all_there(run: Run, bodies: Sequence[str]) -> bool:
    return all(is_there(run, key) for key in bodies)


def _too_slow(key: str, deadline_s: float) -> StorageError:
    return StorageError(
        f"the shortcut was not ready within {deadline_s:.0f} s and was given up",
        kind=Kind.TIMEOUT,
        key=key,
        hint="raise commit_deadline_s here, and the janitor's grace_s to at least twice that",
    )
