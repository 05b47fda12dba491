"""A shortcut's manifest is believed only in the one form that its writer gives it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from deltastore.errors import FormatError, InvalidInputError
from deltastore.format.canonical import canonical_json
from deltastore.format.fields import FileRef, SegmentRef, Signature
from deltastore.format.fingerprint import Fingerprint
from deltastore.format.shortcut import (
    AnchorCore,
    AnchorManifest,
    CompositeCore,
    CompositeManifest,
    Point,
)

SHA = "ab" * 32
ANCHOR = AnchorCore(
    run="r1",
    run_id="0" * 32,
    layout_digest=SHA,
    target=Point(64, SHA, Fingerprint(3, 4)),
    files=(FileRef("model.safetensors", "r1/anchors/0000000064/a/model.safetensors", 9, SHA),),
    tensor_fingerprints=(Fingerprint(1, 2), Fingerprint(2, 2)),
    attempt="a" * 32,
    created_ms=5,
)
COMPOSITE = CompositeCore(
    run="r1",
    run_id="0" * 32,
    layout_digest=SHA,
    base=Point(0, SHA, Fingerprint(1, 1)),
    target=Point(8, SHA, Fingerprint(3, 4)),
    segments=(SegmentRef("k", 5, SHA, 7),),
    nnz=7,
    encodings=("rice", "ulp"),
    attempt="a" * 32,
    created_ms=5,
)
MANIFESTS = [
    AnchorManifest(ANCHOR, (Signature("k", "ab" * 64),)),
    CompositeManifest(COMPOSITE, (Signature("k", "ab" * 64),)),
]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=["anchor", "composite"])
def test_round_trip(manifest):
    """Both kinds read back equal, signatures included."""
    assert type(manifest).from_bytes(manifest.to_bytes()) == manifest


@pytest.mark.parametrize("manifest", MANIFESTS, ids=["anchor", "composite"])
def test_truncated_at_every_byte(manifest):
    """A shortcut cut anywhere is a FormatError."""
    text = manifest.to_bytes()
    for end in range(len(text)):
        with pytest.raises(FormatError):
            type(manifest).from_bytes(text[:end])


@pytest.mark.parametrize(
    ("core", "change"),
    [
        (ANCHOR, {"files": ()}),
        (ANCHOR, {"tensor_fingerprints": (Fingerprint(1, 2),)}),
        (ANCHOR, {"attempt": "../x"}),
        (COMPOSITE, {"base": Point(8, SHA, Fingerprint(1, 1))}),
        (COMPOSITE, {"nnz": 8}),
    ],
)
def test_contradictions_are_refused(core, change):
    """A core that contradicts itself cannot be made."""
    with pytest.raises(InvalidInputError):
        replace(core, **change)


@pytest.mark.parametrize(
    ("manifest", "change"),
    [
        (MANIFESTS[0], {"target": [64, SHA]}),
        (MANIFESTS[0], {"target": [True, SHA, "0" * 32]}),
        (MANIFESTS[0], {"tensor_fingerprints": [5]}),
        (MANIFESTS[0], {"tensor_fingerprints": ["0" * 32]}),
        (MANIFESTS[0], {"format": "deltastore-composite/1"}),
        (MANIFESTS[1], {"base": [9, SHA, "0" * 32]}),
        (MANIFESTS[1], {"segments": [["k", 5, SHA]]}),
        (MANIFESTS[1], {"encodings": ["b", "a"]}),
        (MANIFESTS[1], {"more": 1}),
    ],
)
def test_malformed_fields_are_format_errors(manifest, change):
    """Whatever stands in a field that may not, the reader says FormatError."""
    document = json.loads(manifest.core.canonical_bytes())
    document.update(change)
    with pytest.raises(FormatError):
        type(manifest).from_bytes(canonical_json(document) + b"\n[]")
