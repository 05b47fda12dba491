"""A second reader of runs and bundles, written from FORMAT.md alone, on top of that of segments.

It takes a run as a folder of objects and knows nothing of stores. It shares no code with the
library. Where the two disagree, one of them or the document is wrong.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.second_reader import (
    MASK,
    Block,
    Tensor,
    apply,
    check_disjoint,
    mix,
    must,
    read_layout,
    read_segment,
)

if TYPE_CHECKING:
    from pathlib import Path

CORE_PREFIX = b"deltastore-core-v1\0"
FIELDS = {
    "run": "run run_id layout_digest home created_ms",
    "version": "run run_id version kind base_version base_policy_hash layout_digest segments files"
    " nnz fingerprint_before fingerprint_after encodings step_first step_last generation"
    " writer_nonce created_ms",
    "anchor": "run run_id layout_digest target files tensor_fingerprints attempt created_ms",
    "composite": "run run_id layout_digest base target segments nnz encodings attempt created_ms",
    "bundle": "layout_digest fingerprint_before fingerprint_after nnz segments",
}
Lanes = tuple[int, int]
State = list[list[int]]


def canonical(text: bytes) -> Any:
    """A document that is its own canonical form."""
    try:
        document = json.loads(text.decode("ascii"))
    except ValueError:
        must(False, "no JSON in ASCII")
    again = json.dumps(document, sort_keys=True, separators=(",", ":"))
    must(again.encode() == text, "not canonical")
    must("." not in re.sub(r'"[^"]*"', "", again), "a float")
    return document


def fields_of(text: bytes, kind: str) -> dict[str, Any]:
    """A document with exactly the fields of its kind."""
    document = canonical(text)
    must(isinstance(document, dict), "no object")
    must(document.get("format") == f"deltastore-{kind}/1", f"no {kind}")
    must(set(document) == {"format", *FIELDS[kind].split()}, f"other fields than a {kind}'s")
    return document


def lanes(text: str) -> Lanes:
    """A fingerprint's two lanes."""
    must(re.fullmatch("[0-9a-f]{32}", text) is not None, "no fingerprint")
    return int(text[:16], 16), int(text[16:], 16)


def less(after: Lanes, before: Lanes) -> Lanes:
    """The change of a fingerprint."""
    return (after[0] - before[0]) & MASK, (after[1] - before[1]) & MASK


def total(changes: list[Lanes]) -> Lanes:
    """The sum of changes."""
    return sum(low for low, _ in changes) & MASK, sum(high for _, high in changes) & MASK


def state_fingerprint(tensors: list[Tensor], state: State) -> Lanes:
    """The fingerprint of a whole state."""
    return total(
        [
            mix(tensor.first_element + at, bits)
            for tensor, patterns in zip(tensors, state, strict=True)
            for at, bits in enumerate(patterns)
        ]
    )


@dataclass
class Manifest:
    """A core, its policy hash, its signatures."""

    core: dict[str, Any]
    policy_hash: str
    signatures: list[list[str]]


def read_manifest(text: bytes, kind: str) -> Manifest:
    """A version, anchor or composite manifest."""
    must(len(text) <= 8 << 20, "too long")
    core, newline, rest = text.partition(b"\n")
    must(newline == b"\n", "no signature line")
    signatures = canonical(rest)
    must(isinstance(signatures, list) and len(signatures) <= 16, "signatures")
    hashed = hashlib.sha256(CORE_PREFIX + core).hexdigest()
    return Manifest(fields_of(core, kind), hashed, signatures)


def whole_segments(layout: bytes, bodies: list[bytes], ends: Lanes, nnz: int, sums: Lanes) -> Any:
    """The blocks of a version's segments, which must be disjoint and add up."""
    blocks: list[Block] = []
    for body in bodies:
        base, version, found = read_segment(layout, body)
        must((base, version) == ends, "a segment of other versions")
        blocks += found
    rows = [
        {"tensor": b.tensor, "boxed": b.boxed, "start": b.start, "sizes": b.sizes} for b in blocks
    ]
    check_disjoint(sorted(rows, key=lambda row: (row["tensor"], row["start"])))
    must(sum(len(b.values) for b in blocks) == nnz, "another number of changes")
    must(total([b.change for b in blocks]) == sums, "changes do not add up")
    return blocks


@dataclass
class Run:
    """A run in a folder."""

    folder: Path
    record: dict[str, Any] = field(init=False)
    layout: bytes = field(init=False)
    tensors: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.record = fields_of(self.read("run.json"), "run")
        digest = self.record["layout_digest"]
        self.layout = self.read(f"layout/{digest}.json")
        must(hashlib.sha256(self.layout).hexdigest() == digest, "another layout")
        _, self.tensors = read_layout(self.layout)

    def read(self, key: str) -> bytes:
        """An object, by its key below the run."""
        return (self.folder / key).read_bytes()

    def body(self, key: str, size: int, sha256: str) -> bytes:
        """A named object that is what its manifest says."""
        must(key.startswith(f"{self.record['run']}/"), "an object of another run")
        data = self.read(key.partition("/")[2])
        must(len(data) == size and hashlib.sha256(data).hexdigest() == sha256, "another object")
        return data

    def own(self, manifest: Manifest) -> Manifest:
        """A manifest that is of this run."""
        for name in ("run", "run_id", "layout_digest"):
            must(manifest.core[name] == self.record[name], f"another {name}")
        return manifest

    def version(self, version: int) -> Manifest:
        """A version's manifest."""
        found = self.own(read_manifest(self.read(f"versions/{version:010d}.json"), "version"))
        must(found.core["version"] == version, "another version")
        return found

    def head(self) -> int:
        """The highest version there is."""
        return max(int(path.stem) for path in (self.folder / "versions").iterdir())

    def files(self, rows: list[Any]) -> State:
        """A whole state from safetensors files."""
        found: dict[str, list[int]] = {}
        names = [row[0] for row in json.loads(self.layout)["tensors"]]
        for name, key, size, sha256 in rows:
            if not name.endswith(".safetensors"):
                continue
            data = self.body(key, size, sha256)
            length = int.from_bytes(data[:8], "little")
            for tensor, about in json.loads(data[8 : 8 + length]).items():
                if tensor in names:
                    width = self.tensors[names.index(tensor)].bits // 8
                    begin, end = (8 + length + at for at in about["data_offsets"])
                    found[tensor] = [
                        int.from_bytes(data[at : at + width], "little")
                        for at in range(begin, end, width)
                    ]
        return [found[name] for name in names]

    def step(self, state: State, manifest: Manifest, ends: Lanes, sums: Lanes) -> None:
        """Apply a delta or a composite."""
        bodies = []
        for number, (key, size, sha256, _nnz) in enumerate(manifest.core["segments"]):
            must(key.endswith(f"/{number:05d}-{sha256}.seg"), "a segment's key")
            bodies.append(self.body(key, size, sha256))
        nnz = manifest.core["nnz"]
        apply(self.layout, state, whole_segments(self.layout, bodies, ends, nnz, sums))

    def rebuilt(self, version: int, composites: dict[int, int] | None = None) -> State:
        """The state of a version, from version 0, by composites {base: target} where given."""
        before = self.version(0)
        must(before.core["kind"] == "full" and before.core["base_version"] is None, "no start")
        state = self.files(before.core["files"])
        at = 0
        while at < version:
            here = lanes(before.core["fingerprint_after"])
            target = (composites or {}).get(at, at + 1)
            for number in range(at + 1, target + 1):
                after = self.version(number)
                must(after.core["base_policy_hash"] == before.policy_hash, "a broken chain")
                before_print, previous = after.core["fingerprint_before"], before
                must(before_print == previous.core["fingerprint_after"], "another base")
                must(after.core["generation"] >= previous.core["generation"], "an older writer")
                before = after
            there = lanes(before.core["fingerprint_after"])
            if target == at + 1:
                self.step(state, before, (at, target), less(there, here))
            else:
                key = f"composites/{at:010d}-{target:010d}.json"
                way = self.own(read_manifest(self.read(key), "composite"))
                point = [target, before.policy_hash, before.core["fingerprint_after"]]
                must(way.core["target"] == point, "a composite to elsewhere")
                must(way.core["base"][1] == self.version(at).policy_hash, "from elsewhere")
                self.step(state, way, (at, target), less(there, here))
            at = target
            must(state_fingerprint(self.tensors, state) == there, "another state")
        return state

    def anchored(self, version: int) -> State:
        """The state of a version from its anchor."""
        manifest = self.version(version)
        anchor = self.own(read_manifest(self.read(f"anchors/{version:010d}.json"), "anchor"))
        point = [version, manifest.policy_hash, manifest.core["fingerprint_after"]]
        must(anchor.core["target"] == point, "an anchor of another version")
        state = self.files(anchor.core["files"])
        for tensor, patterns, text in zip(
            self.tensors, state, anchor.core["tensor_fingerprints"], strict=True
        ):
            must(state_fingerprint([tensor], [patterns]) == lanes(text), "another tensor")
        return state


def read_bundle(layout: bytes, data: bytes) -> tuple[list[Block], str, str]:
    """A bundle's blocks, and the fingerprints before and after."""
    must(data[:8] == b"DSBUNDL1", "no bundle")
    size = int.from_bytes(data[8:12], "little")
    must(size <= 8 << 20, "too long")
    core = fields_of(data[12 : 12 + size], "bundle")
    must(hashlib.sha256(layout).hexdigest() == core["layout_digest"], "another layout")
    at, bodies = 12 + size, []
    for length, sha256 in core["segments"]:
        bodies.append(data[at : at + length])
        must(hashlib.sha256(bodies[-1]).hexdigest() == sha256, "a damaged segment")
        at += length
    must(at == len(data), "bytes after the bundle")
    before, after = core["fingerprint_before"], core["fingerprint_after"]
    sums = less(lanes(after), lanes(before))
    return whole_segments(layout, bodies, (0, 1), core["nnz"], sums), before, after
