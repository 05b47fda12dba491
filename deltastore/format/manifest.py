"""A bare marker file says that something exists, not what: a manifest names every byte by digest.

A manifest file is the core's canonical JSON, a newline, and the canonical JSON list of its
signatures. Hash and signatures are over `CORE_PREFIX` and the core's bytes as stored. The *policy
hash* of a version is that hash; the core holds its base's, so one hash names the whole history.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, TypeVar

from deltastore.errors import FormatError, InvalidInputError, Kind
from deltastore.format.canonical import MAX_JSON_INTEGER, canonical_json, parse_canonical_json
from deltastore.format.fingerprint import Fingerprint
from deltastore.ids import check_name, check_version, is_sha256, is_token

CORE_PREFIX = b"deltastore-core-v1\0"
MAX_MANIFEST_BYTES = 8 << 20
MAX_SIGNATURES = 16
VERSION_FORMAT = "deltastore-version/1"
RUN_FORMAT = "deltastore-run/1"

_T = TypeVar("_T")


class VersionKind(StrEnum):
    """How a version carries its state."""

    DELTA = "delta"
    """Segments on top of version - 1."""
    FULL = "full"
    """The whole state, as files of a Hugging Face checkpoint."""


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """One uploaded segment: where, how long, which bytes, how many changes."""

    key: str
    size_bytes: int
    sha256: str
    nnz: int

    def to_row(self) -> list[Any]:
        """The JSON row of this reference."""
        return [self.key, self.size_bytes, self.sha256, self.nnz]


@dataclass(frozen=True, slots=True)
class FileRef:
    """One file of a full state, under the name a Hugging Face tool looks for.

    `key` is None when the run does not hold the bytes (an external version 0).
    """

    name: str
    key: str | None
    size_bytes: int
    sha256: str

    def to_row(self) -> list[Any]:
        """The JSON row of this reference."""
        return [self.name, self.key, self.size_bytes, self.sha256]


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

    def canonical_bytes(self) -> bytes:
        """The one text of this core."""
        document: dict[str, Any] = {"format": VERSION_FORMAT}
        for field in fields(self):
            document[field.name] = _plain(getattr(self, field.name))
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
class Signature:
    """An Ed25519 signature by the key of that id over the core's hash input."""

    key_id: str
    signature_hex: str


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
        rows = [[s.key_id, s.signature_hex] for s in self.signatures]
        text = self.core.canonical_bytes() + b"\n" + canonical_json(rows)
        if len(text) > MAX_MANIFEST_BYTES:
            raise InvalidInputError(
                f"manifest of version {self.core.version} has {len(text)} bytes",
                kind=Kind.LIMIT,
                hint=f"raise the segment size: at most {MAX_MANIFEST_BYTES} bytes are allowed",
            )
        return text

    @classmethod
    def from_bytes(cls, text: bytes) -> VersionManifest:
        """Read a manifest file; FormatError on anything `to_bytes` does not write."""
        core_text, signatures = split_manifest(text)
        document = parse_canonical_json(core_text, what="version manifest")
        reader = _Reader(document, VERSION_FORMAT, {f.name for f in fields(VersionCore)})
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
        reader = _Reader(document, RUN_FORMAT, {f.name for f in fields(cls)})
        return cls(
            run=check_name(reader.text("run"), "run name"),
            run_id=reader.token("run_id"),
            layout_digest=reader.sha256("layout_digest"),
            home=check_name(reader.text("home"), "region"),
            created_ms=reader.count("created_ms"),
        )


def core_hash(core_text: bytes) -> str:
    """SHA-256 over the prefix and a core's bytes as stored."""
    return hashlib.sha256(CORE_PREFIX + core_text).hexdigest()


def split_manifest(text: bytes) -> tuple[bytes, tuple[Signature, ...]]:
    """A manifest file's core bytes and its signatures."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise FormatError(f"manifest has {len(text)} bytes", kind=Kind.LIMIT)
    core_text, newline, rest = text.partition(b"\n")
    if not newline:
        raise FormatError("manifest has no signature line: it is truncated", kind=Kind.TRUNCATED)
    rows = parse_canonical_json(rest, what="signatures")
    if not isinstance(rows, list) or len(rows) > MAX_SIGNATURES:
        raise FormatError(f"signatures are not a list of at most {MAX_SIGNATURES}", kind=Kind.FIELD)
    return core_text, tuple(_signature_of_row(row) for row in rows)


def _signature_of_row(row: Any) -> Signature:
    match row:
        case [str(key_id), str(signature)] if len(signature) == 128 and _is_hex(signature):
            return Signature(check_name(key_id, "key id"), signature)
    raise FormatError("signature is not [key id, 128 hex digits]", kind=Kind.FIELD)


def _is_hex(text: str) -> bool:
    return not text.strip("0123456789abcdef")


def _refuse(message: str) -> None:
    raise InvalidInputError(message, kind=Kind.FIELD)


def _plain(value: Any) -> Any:
    if isinstance(value, Fingerprint):
        return str(value)
    if isinstance(value, tuple):
        return [item.to_row() if hasattr(item, "to_row") else item for item in value]
    return value


class _Reader:
    """Fields of one JSON object, each with its own check."""

    def __init__(self, document: Any, fmt: str, names: set[str]) -> None:
        if not isinstance(document, dict):
            raise FormatError(f"{fmt} is not an object", kind=Kind.FIELD)
        if document.get("format") != fmt:
            raise FormatError(
                f"format {str(document.get('format'))[:40]!r} is not {fmt!r}",
                kind=Kind.FORMAT_VERSION,
                hint="upgrade deltastore, or this is not one of its files",
            )
        if set(document) != names | {"format"}:
            odd = sorted(set(document) ^ (names | {"format"}))
            raise FormatError(f"{fmt}: fields missing or unknown: {odd[:5]}", kind=Kind.FIELD)
        self._document = document

    def build(self, make: Any) -> Any:
        """Run a constructor, turning its refusals into FormatError."""
        try:
            return make(self)
        except InvalidInputError as err:
            raise FormatError(err.message, kind=Kind.FIELD) from err

    def text(self, name: str) -> str:
        """A string."""
        return self._typed(name, str)

    def count(self, name: str) -> int:
        """A whole number from 0 to 2^53 - 1."""
        value = self._typed(name, int)
        if isinstance(value, bool) or not 0 <= value <= MAX_JSON_INTEGER:
            raise FormatError(f"{name} {value!r} is not a count", kind=Kind.FIELD)
        return value

    def count_or_none(self, name: str) -> int | None:
        """A count, or null."""
        return None if self._document[name] is None else self.count(name)

    def sha256(self, name: str) -> str:
        """64 hex digits."""
        value = self.text(name)
        if not is_sha256(value):
            raise FormatError(f"{name} is not a SHA-256", kind=Kind.FIELD)
        return value

    def sha256_or_none(self, name: str) -> str | None:
        """64 hex digits, or null."""
        return None if self._document[name] is None else self.sha256(name)

    def token(self, name: str) -> str:
        """32 hex digits."""
        value = self.text(name)
        if not is_token(value):
            raise FormatError(f"{name} is not 32 hex digits", kind=Kind.FIELD)
        return value

    def fingerprint(self, name: str) -> Fingerprint:
        """32 hex digits as a fingerprint."""
        return Fingerprint.parse(self.text(name))

    def rows(self, name: str) -> list[Any]:
        """A list."""
        return self._typed(name, list)

    def is_null(self, name: str) -> bool:
        """Whether the field is null."""
        return self._document[name] is None

    def _typed(self, name: str, kind: type[_T]) -> _T:
        value = self._document[name]
        if not isinstance(value, kind):
            raise FormatError(f"{name} is not a {kind.__name__}", kind=Kind.FIELD)
        return value


def _read_version_core(reader: _Reader) -> VersionCore:
    encodings = reader.rows("encodings")
    if not all(isinstance(e, str) for e in encodings) or encodings != sorted(set(encodings)):
        raise FormatError("encodings are not a sorted list of names", kind=Kind.FIELD)
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
        segments=tuple(_segment_of_row(row) for row in reader.rows("segments")),
        files=tuple(_file_of_row(row) for row in reader.rows("files")),
        nnz=reader.count("nnz"),
        fingerprint_before=None if before else reader.fingerprint("fingerprint_before"),
        fingerprint_after=reader.fingerprint("fingerprint_after"),
        encodings=tuple(encodings),
        step_first=reader.count("step_first"),
        step_last=reader.count("step_last"),
        generation=reader.count("generation"),
        writer_nonce=reader.token("writer_nonce"),
        created_ms=reader.count("created_ms"),
    )


def _segment_of_row(row: Any) -> SegmentRef:
    match row:
        case [str(key), int(size), str(digest), int(nnz)]:
            if is_sha256(digest) and _is_count(size) and _is_count(nnz):
                return SegmentRef(key, size, digest, nnz)
    raise FormatError("segment is not [key, bytes, sha256, nnz]", kind=Kind.FIELD)


def _file_of_row(row: Any) -> FileRef:
    match row:
        case [str(name), str() | None as key, int(size), str(digest)]:
            if is_sha256(digest) and _is_count(size):
                return FileRef(check_name(name, "file name"), key, size, digest)
    raise FormatError("file is not [name, key, bytes, sha256]", kind=Kind.FIELD)


def _is_count(value: int) -> bool:
    return not isinstance(value, bool) and 0 <= value <= MAX_JSON_INTEGER
