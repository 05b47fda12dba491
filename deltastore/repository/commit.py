"""Two trainers that both think they publish version 8 fork the run: one create-only put decides.

Write order of a version, and what a crash leaves after each step:
  1. segment bodies in home          orphans under content names; a later attempt may reuse them
  2. `versions/<v>.json` in home     THE COMMIT POINT: create-only; before it nothing exists,
                                     after it the version exists for ever
  3. `hints/head`                    missing or stale: readers probe computed keys
  4. bodies, then the manifest, in every other region, in version order
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from deltastore.errors import ConflictError, DeltastoreError, Kind, LeaseError
from deltastore.format.canonical import canonical_json
from deltastore.format.keys import Hint
from deltastore.storage.retry import impatient
from deltastore.storage.store import PutMode

if TYPE_CHECKING:
    from deltastore.format.manifest import VersionManifest
    from deltastore.repository.run import Run

HINT_WITHIN_S = 2.0
"""After that a hint is not tried again: a version's own puts are, for a minute."""

_log = logging.getLogger(__name__)


def commit_version(run: Run, manifest: VersionManifest) -> None:
    """Make a version exist. Its bodies must be confirmed in this store.

    Repeating the same manifest is harmless. Raises LeaseError(foreign_writer) when another
    manifest has the number: this writer has lost the run and must stop.
    """
    key = run.keys.version(manifest.core.version)
    try:
        run.store.put(key, manifest.to_bytes(), mode=PutMode.CREATE)
    except ConflictError as err:
        raise LeaseError(
            f"version {manifest.core.version} was committed by another writer",
            kind=Kind.FOREIGN_WRITER,
            run=run.name,
            version=manifest.core.version,
            key=key,
            hint="another trainer publishes to this run: stop it, or start a run of your own",
        ) from err


def advertise(run: Run, manifest: VersionManifest) -> DeltastoreError | None:
    """Write the hint of a version that is committed, and what kept it from being written.

    That costs whoever reads it a few polls; it must not look as if the version had failed, nor keep
    the next one waiting: a store that says "slow down" is not asked again after `HINT_WITHIN_S`.
    """
    try:
        with impatient(HINT_WITHIN_S):
            write_head_hint(run, manifest)
    except DeltastoreError as err:
        _log.warning("version %d is not advertised: %s", manifest.core.version, err)
        return err
    return None


def write_head_hint(run: Run, manifest: VersionManifest) -> None:
    """Advertise a committed version. It may be lost or overtaken; nothing depends on it."""
    hint = canonical_json({"version": manifest.core.version, "policy_hash": manifest.policy_hash})
    run.store.put(run.keys.hint(Hint.HEAD), hint, mode=PutMode.OVERWRITE)
