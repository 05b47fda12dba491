"""Every field of a document from a bucket is hostile until it was read by its own check.

What version manifests, run records and shortcut manifests share: references to objects, signature
lines, and a reader that refuses missing, unknown and malformed fields by name.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, TypeVar

from deltastore.errors import FormatError, InvalidInputError, Kind
from deltastore.format.canonical import MAX_JSON_INTEGER, canonical_json, parse_canonical_json
from deltastore.format.fingerprint import Fingerprint
from deltastore.ids import check_name, is_sha256, is_token

CORE_PREFIX = b"deltastore-core-v1\0"
MAX_MANIFEST_BYTES = 8 << 20
MAX_SIGNATURES = 16

_T = TypeVar("_T")


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
class Signature:
    """An Ed25519 signature by the key of that id over the core's hash input."""

    key_id: str
    signature_hex: str


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


def join_manifest(core_text: bytes, signatures: tuple[Signature, ...], *, what: str) -> bytes:
    """A manifest file: core, newline, signatures; InvalidInputError(limit) if it is too long."""
    rows = [[s.key_id, s.signature_hex] for s in signatures]
    text = core_text + b"\n" + canonical_json(rows)
    if len(text) > MAX_MANIFEST_BYTES:
        raise InvalidInputError(
            f"{what} has {len(text)} bytes",
            kind=Kind.LIMIT,
            hint=f"raise the segment size: at most {MAX_MANIFEST_BYTES} bytes are allowed",
        )
    return text


def _signature_of_row(row: Any) -> Signature:
    match row:
        case [str(key_id), str(signature)] if len(signature) == 128 and _is_hex(signature):
            return Signature(check_name(key_id, "key id"), signature)
    raise FormatError("signature is not [key id, 128 hex digits]", kind=Kind.FIELD)


def _is_hex(text: str) -> bool:
    return not text.strip("0123456789abcdef")


def plain_value(value: Any) -> Any:
    """A field as JSON has it."""
    if isinstance(value, Fingerprint):
        return str(value)
    if isinstance(value, tuple):
        return [plain_value(item) for item in value]
    return value.to_row() if hasattr(value, "to_row") else value


class FieldReader:
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

    def names(self, name: str) -> tuple[str, ...]:
        """A sorted list of different texts."""
        names = self.rows(name)
        if not all(isinstance(text, str) for text in names) or names != sorted(set(names)):
            raise FormatError(f"{name} is not a sorted list of names", kind=Kind.FIELD)
        return tuple(names)

    def is_null(self, name: str) -> bool:
        """Whether the field is null."""
        return self._document[name] is None

    def _typed(self, name: str, kind: type[_T]) -> _T:
        value = self._document[name]
        if not isinstance(value, kind):
            raise FormatError(f"{name} is not a {kind.__name__}", kind=Kind.FIELD)
        return value


def segment_of_row(row: Any) -> SegmentRef:
    """Read what `SegmentRef.to_row` writes."""
    match row:
        case [str(key), int(size), str(digest), int(nnz)]:
            if is_sha256(digest) and _is_count(size) and _is_count(nnz):
                return SegmentRef(key, size, digest, nnz)
    raise FormatError("segment is not [key, bytes, sha256, nnz]", kind=Kind.FIELD)


def file_of_row(row: Any) -> FileRef:
    """Read what `FileRef.to_row` writes."""
    match row:
        case [str(name), str() | None as key, int(size), str(digest)]:
            if is_sha256(digest) and _is_count(size):
                return FileRef(check_name(name, "file name"), key, size, digest)
    raise FormatError("file is not [name, key, bytes, sha256]", kind=Kind.FIELD)


def _is_count(value: int) -> bool:
    return not isinstance(value, bool) and 0 <= value <= MAX_JSON_INTEGER
