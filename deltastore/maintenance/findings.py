"""A check that answers yes or no starts a search: a finding names the object and the way out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from deltastore.errors import DeltastoreError, FormatError, Kind

RESTORE = "copy the object from another region"


class Severity(StrEnum):
    """What a finding means for the run. Append only."""

    ERROR = "error"
    """Something that was committed is lost, damaged or contradicts itself."""
    WARNING = "warning"
    """Every version can be rebuilt, but something here should not be as it is."""
    NOTE = "note"
    """Harmless, for example what an interrupted publish left behind."""


class Defect(StrEnum):
    """What is wrong, precisely. Append only: scripts match on these."""

    MISSING = "missing"
    """A committed version names an object that is not there."""
    SIZE = "size"
    """An object is shorter or longer than its manifest says."""
    DIGEST = "digest"
    """An object has the right size and other bytes."""
    FORMAT = "format"
    """An object cannot be read: its bytes are not what the format says."""
    FOREIGN = "foreign"
    """An object of another run, or under a key that this one never writes."""
    HOLE = "hole"
    """A version below HEAD has no manifest."""
    LINK = "link"
    """A version does not continue the history of the one before it."""
    FINGERPRINT = "fingerprint"
    """The replayed state is not the one that the manifest declares."""
    UNREACHABLE = "unreachable"
    """Versions that cannot be rebuilt from this bucket, because of another finding."""
    ORPHAN = "orphan"
    """An object that no committed version names."""
    HINT = "hint"
    """A hint is ahead of HEAD, or names another hash; nothing is decided by it."""
    EXTERNAL = "external"
    """Version 0 lies elsewhere: this bucket alone cannot rebuild the run."""
    UNCHECKED = "unchecked"
    """A shortcut that cannot be checked: the manifest of a version at its end is not there."""
    SIGNATURE = "signature"
    """A manifest that none of the trusted keys signed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    Args:
        severity: what it means for the run.
        defect: what is wrong, for scripts.
        key: the object, if it is about one.
        version: the version, or the first of several.
        message: what is wrong, for people.
        remedy: the way out, as an instruction to the reader.
    """

    severity: Severity
    defect: Defect
    key: str | None
    version: int | None
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a check of a run found.

    Args:
        findings: in the order of the chain, then of the keys.
        deep: whether every object was read and every version replayed.
        head: the newest committed version; None when the run has none.
        versions: committed versions whose manifests could be read.
        replayed: versions rebuilt and proved bit for bit (0 unless deep).
        objects, size_bytes: everything under the run's prefix.
        seconds: how long it took.
        floor: bodies at or below this version may be gone: retention says so.
        gone: versions that retention took the bodies of.
        shortcuts: anchors and composites that are whole.
        proved: of those, how many were compared with what replay gives (0 unless deep).
        lost: runs of versions, first and last, that cannot be rebuilt from this bucket.
    """

    findings: tuple[Finding, ...]
    deep: bool
    head: int | None
    versions: int
    replayed: int
    objects: int
    size_bytes: int
    seconds: float
    floor: int = 0
    gone: int = 0
    shortcuts: int = 0
    proved: int = 0
    lost: tuple[tuple[int, int], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every committed version is whole: no finding is an error."""
        return not any(finding.severity is Severity.ERROR for finding in self.findings)


_DEFECTS = {
    Kind.OBJECT_MISSING: Defect.MISSING,
    Kind.VERSION_MISSING: Defect.HOLE,
    Kind.RANGE: Defect.SIZE,
    Kind.DIGEST: Defect.DIGEST,
    Kind.FINGERPRINT: Defect.FINGERPRINT,
    Kind.WRONG_BASE: Defect.LINK,
    Kind.GENERATION: Defect.LINK,
    Kind.KEY: Defect.FOREIGN,
    Kind.LAYOUT_MISMATCH: Defect.FOREIGN,
    Kind.BROKEN_CHAIN: Defect.FOREIGN,
    Kind.SIGNATURE: Defect.SIGNATURE,
}


def finding_of(error: DeltastoreError, *, version: int | None, key: str | None) -> Finding:
    """The finding that an error of a verified read amounts to."""
    default = Defect.FORMAT if isinstance(error, FormatError) else Defect.FOREIGN
    return Finding(
        severity=Severity.ERROR,
        defect=_DEFECTS.get(error.kind, default),
        key=error.key or key,
        version=version,
        message=error.message,
        remedy=error.hint or RESTORE,
    )
