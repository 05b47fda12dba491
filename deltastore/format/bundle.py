"""A delta mailed without its identity is applied to the wrong model: a bundle carries it.

One file for use without a run: magic, the length of the core (uint32, little-endian), the core
(canonical JSON), then the segments, one after the other. The core names the layout, the state
before and after, and every segment by size and SHA-256.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from deltastore.errors import FormatError, IntegrityError, Kind
from deltastore.format.block import total_change
from deltastore.format.canonical import canonical_json, parse_canonical_json
from deltastore.format.disjoint import check_disjoint
from deltastore.format.fingerprint import Fingerprint
from deltastore.format.layout import require_same_layout
from deltastore.format.segment import SegmentIdentity, decode_segment, encode_segment
from deltastore.ids import is_sha256

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deltastore.format.block import Block
    from deltastore.format.layout import Layout

MAGIC = b"DSBUNDL1"
BUNDLE_FORMAT = "deltastore-bundle/1"
MAX_CORE_BYTES = 8 << 20
_HEAD_BYTES = 12
IDENTITY_VERSIONS = (0, 1)  # base and target of the segments: a bundle has no run to number them


@dataclass(frozen=True, slots=True)
class Bundle:
    """A delta in one file.

    Args:
        layout_digest: of both states.
        before, after: their fingerprints.
        segments: the encoded segments.
        nnz: changed elements.
    """

    layout_digest: str
    before: Fingerprint
    after: Fingerprint
    segments: tuple[bytes, ...]
    nnz: int

    @classmethod
    def of(
        cls,
        layout: Layout,
        before: Fingerprint,
        groups: Iterator[Sequence[Block]],
    ) -> Bundle:
        """Encode groups of blocks, one segment each; groups are drawn one at a time."""
        identity = SegmentIdentity(layout.digest, *IDENTITY_VERSIONS)
        segments = []
        after, nnz = before, 0
        for blocks in groups:
            segments.append(encode_segment(layout, identity, blocks))
            after = after + total_change(blocks)
            nnz += sum(block.nnz for block in blocks)
        return cls(layout.digest, before, after, tuple(segments), nnz)

    def blocks(self, layout: Layout) -> list[Block]:
        """The decoded, checked blocks.

        Raises IntegrityError (layout_mismatch, fingerprint), FormatError.
        """
        require_same_layout(layout.digest, self.layout_digest, what="the bundle")
        identity = SegmentIdentity(layout.digest, *IDENTITY_VERSIONS)
        blocks: list[Block] = []
        for segment in self.segments:
            blocks.extend(decode_segment(layout, segment, expect=identity).blocks)
        check_disjoint(layout, ((block.tensor, block.box) for block in blocks))
        changed = sum(block.nnz for block in blocks)
        if self.before + total_change(blocks) != self.after or changed != self.nnz:
            raise IntegrityError(
                "the bundle's blocks do not add up to what its core declares",
                kind=Kind.FINGERPRINT,
            )
        return blocks

    def to_bytes(self) -> bytes:
        """The bundle file."""
        core = canonical_json(
            {
                "format": BUNDLE_FORMAT,
                "layout_digest": self.layout_digest,
                "fingerprint_before": str(self.before),
                "fingerprint_after": str(self.after),
                "nnz": self.nnz,
                "segments": [
                    [len(segment), hashlib.sha256(segment).hexdigest()] for segment in self.segments
                ],
            }
        )
        return b"".join([MAGIC, len(core).to_bytes(4, "little"), core, *self.segments])

    @classmethod
    def from_bytes(cls, data: bytes) -> Bundle:
        """Read a bundle file; FormatError or IntegrityError(digest) on anything else."""
        return cls.read(io.BytesIO(data), len(data))

    @classmethod
    def read(cls, file: BinaryIO, size_bytes: int) -> Bundle:
        """Read a bundle from a file of that size, from where it stands, as `from_bytes` does.

        Nothing after the core is read unless the core's own sum is the size of the file, and no
        segment after one that is damaged: a file as large as a disk costs `MAX_CORE_BYTES`.
        """
        head = file.read(_HEAD_BYTES)
        if head[:8] != MAGIC:
            raise FormatError(
                "this is not a deltastore bundle", kind=Kind.MAGIC, hint="make one with `diff`"
            )
        core_bytes = int.from_bytes(head[8:], "little")
        if core_bytes > MAX_CORE_BYTES:
            raise FormatError(f"the bundle's core claims {core_bytes} bytes", kind=Kind.LIMIT)
        core = file.read(core_bytes)
        if len(core) < core_bytes:
            raise FormatError("the bundle ends inside its core", kind=Kind.TRUNCATED)
        fields = _read_core(core)
        more_bytes = size_bytes - _HEAD_BYTES - core_bytes - sum(n for n, _ in fields["segments"])
        if more_bytes < 0:
            raise FormatError("the bundle ends inside a segment", kind=Kind.TRUNCATED)
        if more_bytes > 0:
            raise FormatError(f"{more_bytes} bytes follow the bundle", kind=Kind.TRAILING)
        segments = []
        for length, digest in fields["segments"]:
            segment = file.read(length)
            if hashlib.sha256(segment).hexdigest() != digest:
                raise IntegrityError("a segment of the bundle is damaged", kind=Kind.DIGEST)
            segments.append(segment)
        return cls(
            fields["layout_digest"],
            Fingerprint.parse(fields["fingerprint_before"]),
            Fingerprint.parse(fields["fingerprint_after"]),
            tuple(segments),
            fields["nnz"],
        )


def _read_core(text: bytes) -> dict[str, Any]:
    document = parse_canonical_json(text, what="bundle core")
    match document:
        case {
            "format": str(fmt),
            "layout_digest": str(digest),
            "fingerprint_before": str(),
            "fingerprint_after": str(),
            "nnz": int(nnz),
            "segments": list(rows),
            **rest,
        } if not rest and is_sha256(digest) and not isinstance(nnz, bool) and nnz >= 0:
            if fmt != BUNDLE_FORMAT:
                raise FormatError(
                    f"bundle format {fmt[:40]!r} is not {BUNDLE_FORMAT!r}",
                    kind=Kind.FORMAT_VERSION,
                    hint="upgrade deltastore",
                )
            for row in rows:
                _check_row(row)
            return dict(document)
    raise FormatError("the bundle's core has other fields", kind=Kind.FIELD)


def _check_row(row: Any) -> None:
    match row:
        case [int(length), str(digest)] if is_sha256(digest):
            if not isinstance(length, bool) and length >= 0:
                return
    raise FormatError("a bundle segment is not [bytes, sha256]", kind=Kind.FIELD)
