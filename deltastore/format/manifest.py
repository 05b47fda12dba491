"""A bare marker file says that something exists, not what: a manifest names every byte by digest.

A manifest file is the core's canonical JSON, a newline, and the canonical JSON list of its
signatures. Hash and signatures are over `CORE_PREFIX` and the core's bytes as stored. The *policy
hash* of a version is that hash; the core holds its base's, so one hash names the whole history.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from deltastore.errors import FormatError, InvalidInputError, Kind
from deltastore.format.canonical import MAX_JSON_INTEGER, canonical_json, parse_canonical_json
from deltastore.format.fields import (
    CORE_PREFIX,
    MAX_MANIFEST_BYTES,
    FieldReader,
    FileRef,
    SegmentRef,
    Signature,
    core_hash,
    file_of_row,
    join_manifest,
    plain_value,
    segment_of_row,
    split_manifest,
)
from deltastore.ids import check_name, check_version

if TYPE_CHECKING:
    from deltastore.format.fingerprint import Fingerprint

__all__ = [
    "CORE_PREFIX",
    "MAX_MANIFEST_BYTES",
    "FileRef",
    "RunRecord",
    "SegmentRef",
    "Signature",
    "VersionCore",
    "VersionKind",
    "VersionManifest",
    "core_hash",
]

VERSION_FORMAT = "deltastore-version/1"
RUN_FORMAT = "deltastore-run/1"


class VersionKind(StrEnum):
    """How a version carries its state."""

    DELTA = "delta"
    """Segments on top of version - 1."""
    FULL = "full"
    """The whole state, as files of a Hugging Face checkpoint."""


@dataclass(frozen=True, slots=True)
class VersionCore:
    """What a version is. Every field is part of the policy hash.

    Args:
        run, run_id: name and random identity of the run.
        version: the published state number.
        kind: delta (base_version = version - 1) or full.
        base_version, base_policy_hash: what came before; None only at version 0. A full version
            names it too: that keeps the hash chain.
        layout_digest: SHA-256 of the layout.
        segments: of a delta, in upload order.
        files: of a full version.
        nnz: changed elements (full: 0).
        fingerprint_before: of the base; None only at version 0.
        fingerprint_after: of this version.
        encodings: names of the index and value encodings used, sorted.
        step_first, step_last: the optimizer steps this version covers.
        generation: of the writer; never lower than the base's.
        writer_nonce: 128 random bits of the writing process.
        created_ms: the writer's wall clock, for people.
    """

    run: str
    run_id: str
    version: int
    kind: VersionKind
    base_version: int | None
    base_policy_hash: str | None
    layout_digest: str
    segments: tuple[SegmentRef, ...]
    files: tuple[FileRef, ...]
    nnz: int
    fingerprint_before: Fingerprint | None
    fingerprint_after: Fingerprint
    encodings: tuple[str, ...]
    step_first: int
    step_last: int
    generation: int
    writer_nonce: str
    created_ms: int

    def __post_init__(self) -> None:
        """Refuse a core that contradicts itself; InvalidInputError(field) says where."""
        check_name(self.run, "run name")
        check_version(self.version)
        delta = self.kind is VersionKind.DELTA
        first = self.base_version is None
        if delta and (first or self.base_version != self.version - 1):
            _refuse(f"delta {self.version} is based on {self.base_version}, not {self.version - 1}")
        if (self.version == 0) != first:
            _refuse(f"version {self.version} has base {self.base_version}")
        if self.base_version is not None and self.base_version >= self.version:
            _refuse(f"version {self.version} has the later base {self.base_version}")
        if first != (self.base_policy_hash is None) or first != (self.fingerprint_before is None):
            _refuse("base version, base policy hash and fingerprint before belong together")
        if (delta and self.files) or (not delta and (self.segments or self.nnz)):
            _refuse(f"a {self.kind.value} version has the other kind's content")
        if not delta and not self.files:
            _refuse("a full version names no files")
        if delta and sum(segment.nnz for segment in self.segments) != self.nnz:
            _refuse("nnz is not the sum over the segments")
        if not 0 <= self.step_first <= self.step_last or self.generation < 1:
            _refuse(f"steps {self.step_first}..{self.step_last}, generation {self.generation}")
        for name in ("step_last", "generation", "nnz", "created_ms"):
            if not 0 <= getattr(self, name) <= MAX_JSON_INTEGER:  # committed, nobody could read it
                _refuse(f"{name} {getattr(self, name)} is not a count of at most 53 bits")

    def canonical_bytes(self) -> bytes:
        """The one text of this core."""
        document: dict[str, Any] = {"format": VERSION_FORMAT}
        for field in fields(self):
            document[field.name] = plain_value(getattr(self, field.name))
        return canonical_json(document)

    @property
    def policy_hash(self) -> str:
        """SHA-256 of the core, 64 hex digits: names this version and its whole history."""
        return core_hash(self.canonical_bytes())

    @property
    def delta_bytes(self) -> int:
        """Bytes of the segments, or of the files of a full version."""
        return sum(s.size_bytes for s in self.segments) + sum(f.size_bytes for f in self.files)


@dataclass(frozen=True, slots=True)
class VersionManifest:
    """A version's core, as stored, with its signatures."""

    core: VersionCore
    signatures: tuple[Signature, ...] = ()

    @property
    def policy_hash(self) -> str:
        """The core's policy hash."""
        return self.core.policy_hash

    def to_bytes(self) -> bytes:
        """The manifest file."""
        what = f"manifest of version {self.core.version}"
        return join_manifest(self.core.canonical_bytes(), self.signatures, what=what)

    @classmethod
    def from_bytes(cls, text: bytes) -> VersionManifest:
        """Read a manifest file; FormatError on anything `to_bytes` does not write."""
        core_text, signatures = split_manifest(text)
        document = parse_canonical_json(core_text, what="version manifest")
        reader = FieldReader(document, VERSION_FORMAT, {f.name for f in fields(VersionCore)})
        return cls(reader.build(_read_version_core), signatures)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What makes a run exist: `run.json`, create-only.

    Args:
        run, run_id: name and 128 random bits.
        layout_digest: the tensor table, fixed for the run's life.
        home: name of the region in which versions are committed.
        created_ms: wall clock, for people.
    """

    run: str
    run_id: str
    layout_digest: str
    home: str
    created_ms: int

    def to_bytes(self) -> bytes:
        """The canonical bytes of the record."""
        document: dict[str, Any] = {"format": RUN_FORMAT}
        for field in fields(self):
            document[field.name] = getattr(self, field.name)
        return canonical_json(document)

    @classmethod
    def from_bytes(cls, text: bytes) -> RunRecord:
        """Read a record; FormatError on anything `to_bytes` does not write."""
        document = parse_canonical_json(text, what="run.json", max_bytes=1 << 16)
        reader = FieldReader(document, RUN_FORMAT, {f.name for f in fields(cls)})
        record: RunRecord = reader.build(_read_run_record)
        return record


def _refuse(message: str) -> None:
    raise InvalidInputError(message, kind=Kind.FIELD)


def _read_run_record(reader: FieldReader) -> RunRecord:
    return RunRecord(
        run=check_name(reader.text("run"), "run name"),
        run_id=reader.token("run_id"),
        layout_digest=reader.sha256("layout_digest"),
        home=check_name(reader.text("home"), "region"),
        created_ms=reader.count("created_ms"),
    )


def _read_version_core(reader: FieldReader) -> VersionCore:
    kind = reader.text("kind")
    if kind not in set(VersionKind):
        raise FormatError(f"version kind {kind[:20]!r} is unknown", kind=Kind.FIELD)
    before = reader.is_null("fingerprint_before")
    return VersionCore(
        run=reader.text("run"),
        run_id=reader.token("run_id"),
        version=reader.count("version"),
        kind=VersionKind(kind),
        base_version=reader.count_or_none("base_version"),
        base_policy_hash=reader.sha256_or_none("base_policy_hash"),
        layout_digest=reader.sha256("layout_digest"),
        segments=tuple(segment_of_row(row) for row in reader.rows("segments")),
        files=tuple(file_of_row(row) for row in reader.rows("files")),
        nnz=reader.count("nnz"),
        fingerprint_before=None if before else reader.fingerprint("fingerprint_before"),
        fingerprint_after=reader.fingerprint("fingerprint_after"),
        encodings=reader.names("encodings"),
        step_first=reader.count("step_first"),
        step_last=reader.count("step_last"),
        generation=reader.count("generation"),
        writer_nonce=reader.token("writer_nonce"),
        created_ms=reader.count("created_ms"),
    )
