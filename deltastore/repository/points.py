"""A version number alone names nothing, two histories share it: a point carries its hash."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.errors import IntegrityError, Kind

if TYPE_CHECKING:
    from deltastore.format.fingerprint import Fingerprint
    from deltastore.format.manifest import VersionManifest


@dataclass(frozen=True, slots=True)
class ActiveVersion:
    """The version that weights are at: number, history, state and the generation of its writer."""

    version: int
    policy_hash: str
    fingerprint: Fingerprint
    generation: int

    @classmethod
    def of(cls, manifest: VersionManifest) -> ActiveVersion:
        """The point that a manifest makes exist."""
        core = manifest.core
        return cls(core.version, manifest.policy_hash, core.fingerprint_after, core.generation)


def check_link(base: ActiveVersion, manifest: VersionManifest) -> None:
    """Check that `manifest` continues the history of `base`.

    Raises IntegrityError: `wrong_base` (another history, or not the next version), `fingerprint`
    (its base state is another one), `generation` (an older writer than the base's).
    """
    core = manifest.core
    if core.base_version != base.version or core.base_policy_hash != base.policy_hash:
        raise IntegrityError(
            f"version {core.version} is based on {core.base_version}"
            f" ({str(core.base_policy_hash)[:12]}), not on {base.version}"
            f" ({base.policy_hash[:12]})",
            kind=Kind.WRONG_BASE,
            run=core.run,
            version=core.version,
            hint="this is another history: start again from a full version of this run",
        )
    if core.fingerprint_before != base.fingerprint:
        raise IntegrityError(
            f"version {core.version} expects state {core.fingerprint_before}"
            f" before it, not {base.fingerprint}",
            kind=Kind.FINGERPRINT,
            run=core.run,
            version=core.version,
        )
    if core.generation < base.generation:
        raise IntegrityError(
            f"version {core.version} is of generation {core.generation}, its base of"
            f" {base.generation}: a writer that had lost its right",
            kind=Kind.GENERATION,
            run=core.run,
            version=core.version,
        )
