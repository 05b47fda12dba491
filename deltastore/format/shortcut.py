"""A faster way that leads somewhere else is worse than none: a shortcut names both its ends.

Anchors (a whole state) and composites (one delta that equals several) stand outside the hash chain.
They name their base and target by version, policy hash and fingerprint; whoever uses one must
compare the target with the version manifest, which alone makes a version exist.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from deltastore.errors import FormatError, InvalidInputError, Kind
from deltastore.format.canonical import canonical_json, parse_canonical_json
from deltastore.format.fields import (
    FieldReader,
    FileRef,
    SegmentRef,
    Signature,
    file_of_row,
    join_manifest,
    plain_value,
    segment_of_row,
    split_manifest,
)
from deltastore.format.fingerprint import Fingerprint
from deltastore.ids import check_name, check_version, is_sha256

ANCHOR_FORMAT = "deltastore-anchor/1"
COMPOSITE_FORMAT = "deltastore-composite/1"


@dataclass(frozen=True, slots=True)
class Point:
    """A version by number, history and state."""

    version: int
    policy_hash: str
    fingerprint: Fingerprint

    def to_row(self) -> list[Any]:
        """The JSON row of this point."""
        return [self.version, self.policy_hash, str(self.fingerprint)]


@dataclass(frozen=True, slots=True)
class AnchorCore:
    """The whole state of a version, as files of a Hugging Face checkpoint.

    Args:
        run, run_id, layout_digest: what it belongs to.
        target: the version it holds.
        files: safetensors shards, index, config and tokenizer files of one attempt.
        tensor_fingerprints: one per tensor of the layout, in order; they add up to the target's.
        attempt: names the folder of this attempt.
        created_ms: the writer's wall clock, for people.
    """

    run: str
    run_id: str
    layout_digest: str
    target: Point
    files: tuple[FileRef, ...]
    tensor_fingerprints: tuple[Fingerprint, ...]
    attempt: str
    created_ms: int

    def __post_init__(self) -> None:
        """Refuse a core that contradicts itself; InvalidInputError(field) says where."""
        check_name(self.run, "run name")
        check_name(self.attempt, "attempt")
        check_version(self.target.version)
        total = Fingerprint(0, 0)
        for one in self.tensor_fingerprints:
            total = total + one
        if not self.files or total != self.target.fingerprint:
            raise InvalidInputError(
                "an anchor names no files, or its tensors do not add up to its target",
                kind=Kind.FIELD,
            )

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    def canonical_bytes(self) -> bytes:
        """The one text of this core."""
        return _core_text(self, ANCHOR_FORMAT)


@dataclass(frozen=True, slots=True)
class CompositeCore:
    """One delta that equals the deltas from `base` (exclusive) to `target` (inclusive).

    Args:
        run, run_id, layout_digest: what it belongs to.
        base, target: where it starts and where it leads.
        segments: under the attempt's folder, in order.
        nnz: stored changes.
        encodings: names of the encodings used, sorted.
        attempt: names the folder of this attempt.
        created_ms: the writer's wall clock, for people.
    """

    run: str
    run_id: str
    layout_digest: str
    base: Point
    target: Point
    segments: tuple[SegmentRef, ...]
    nnz: int
    encodings: tuple[str, ...]
    attempt: str
    created_ms: int

    def __post_init__(self) -> None:
        """Refuse a core that contradicts itself; InvalidInputError(field) says where."""
        check_name(self.run, "run name")
        check_name(self.attempt, "attempt")
        check_version(self.base.version)
        check_version(self.target.version)
        if self.base.version >= self.target.version:
            raise InvalidInputError(
                f"a composite leads from {self.base.version} to {self.target.version}",
                kind=Kind.FIELD,
            )
        if sum(segment.nnz for segment in self.segments) != self.nnz:
            raise InvalidInputError("nnz is not the sum over the segments", kind=Kind.FIELD)

    @property
    def size_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size_bytes for segment in self.segments)

    def canonical_bytes(self) -> bytes:
        """The one text of this core."""
        return _core_text(self, COMPOSITE_FORMAT)


@dataclass(frozen=True, slots=True)
class AnchorManifest:
    """An anchor's core, as stored, with its signatures."""

    core: AnchorCore
    signatures: tuple[Signature, ...] = ()

    def to_bytes(self) -> bytes:
        """The manifest file."""
        what = f"manifest of anchor {self.core.target.version}"
        return join_manifest(self.core.canonical_bytes(), self.signatures, what=what)

    @classmethod
    def from_bytes(cls, text: bytes) -> AnchorManifest:
        """Read a manifest file; FormatError on anything `to_bytes` does not write."""
        core_text, signatures = split_manifest(text)
        document = parse_canonical_json(core_text, what="anchor manifest")
        reader = FieldReader(document, ANCHOR_FORMAT, {f.name for f in fields(AnchorCore)})
        return cls(reader.build(_read_anchor), signatures)


@dataclass(frozen=True, slots=True)
class CompositeManifest:
    """A composite's core, as stored, with its signatures."""

    core: CompositeCore
    signatures: tuple[Signature, ...] = ()

    def to_bytes(self) -> bytes:
        """The manifest file."""
        core = self.core
        what = f"manifest of composite {core.base.version}-{core.target.version}"
        return join_manifest(core.canonical_bytes(), self.signatures, what=what)

    @classmethod
    def from_bytes(cls, text: bytes) -> CompositeManifest:
        """Read a manifest file; FormatError on anything `to_bytes` does not write."""
        core_text, signatures = split_manifest(text)
        document = parse_canonical_json(core_text, what="composite manifest")
        reader = FieldReader(document, COMPOSITE_FORMAT, {f.name for f in fields(CompositeCore)})
        return cls(reader.build(_read_composite), signatures)


def _core_text(core: AnchorCore | CompositeCore, fmt: str) -> bytes:
    document: dict[str, Any] = {"format": fmt}
    for field in fields(core):
        document[field.name] = plain_value(getattr(core, field.name))
    return canonical_json(document)


def _read_anchor(reader: FieldReader) -> AnchorCore:
    prints = reader.rows("tensor_fingerprints")
    if not all(isinstance(text, str) for text in prints):
        raise FormatError("tensor_fingerprints are not texts", kind=Kind.FIELD)
    return AnchorCore(
        run=reader.text("run"),
        run_id=reader.token("run_id"),
        layout_digest=reader.sha256("layout_digest"),
        target=_point_of_row(reader.rows("target")),
        files=tuple(file_of_row(row) for row in reader.rows("files")),
        tensor_fingerprints=tuple(Fingerprint.parse(text) for text in prints),
        attempt=reader.text("attempt"),
        created_ms=reader.count("created_ms"),
    )


def _read_composite(reader: FieldReader) -> CompositeCore:
    return CompositeCore(
        run=reader.text("run"),
        run_id=reader.token("run_id"),
        layout_digest=reader.sha256("layout_digest"),
        base=_point_of_row(reader.rows("base")),
        target=_point_of_row(reader.rows("target")),
        segments=tuple(segment_of_row(row) for row in reader.rows("segments")),
        nnz=reader.count("nnz"),
        encodings=reader.names("encodings"),
        attempt=reader.text("attempt"),
        created_ms=reader.count("created_ms"),
    )


def _point_of_row(row: list[Any]) -> Point:
    match row:
        case [int(version), str(policy_hash), str(fingerprint)] if is_sha256(policy_hash):
            if not isinstance(version, bool):
                return Point(version, policy_hash, Fingerprint.parse(fingerprint))
    raise FormatError("point is not [version, policy hash, fingerprint]", kind=Kind.FIELD)
