"""A manifest is believed only in the one form that its writer gives it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import FormatError, InvalidInputError, Kind
from deltastore.format.canonical import canonical_json
from deltastore.format.fingerprint import Fingerprint
from deltastore.format.keys import RunKeys
from deltastore.format.manifest import (
    CORE_PREFIX,
    FileRef,
    RunRecord,
    SegmentRef,
    Signature,
    VersionCore,
    VersionKind,
    VersionManifest,
)

SHA = "ab" * 32
DELTA = VersionCore(
    run="r1",
    run_id="0" * 32,
    version=5,
    kind=VersionKind.DELTA,
    base_version=4,
    base_policy_hash=SHA,
    layout_digest=SHA,
    segments=(SegmentRef(RunKeys("r1").segment(5, 0, SHA), 10, SHA, 7),),
    files=(),
    nnz=7,
    fingerprint_before=Fingerprint(1, 2),
    fingerprint_after=Fingerprint((1 << 64) - 1, 3),
    encodings=("rice", "ulp"),
    step_first=4,
    step_last=5,
    generation=2,
    writer_nonce="1" * 32,
    created_ms=1_700_000_000_000,
)
FULL = replace(
    DELTA,
    kind=VersionKind.FULL,
    segments=(),
    files=(FileRef("model.safetensors", None, 3, SHA),),
    nnz=0,
    encodings=(),
)
ZERO = replace(FULL, version=0, base_version=None, base_policy_hash=None, fingerprint_before=None)


@pytest.mark.parametrize("core", [DELTA, FULL, ZERO])
def test_round_trip(core):
    """Each kind of manifest reads back equal, signatures included."""
    manifest = VersionManifest(core, (Signature("key-1", "ab" * 64),))
    assert VersionManifest.from_bytes(manifest.to_bytes()) == manifest


def test_policy_hash_is_over_prefix_and_stored_bytes():
    """The policy hash is SHA-256 of the prefix and the core's bytes exactly as stored."""
    stored = VersionManifest(DELTA).to_bytes().partition(b"\n")[0]
    assert DELTA.policy_hash == hashlib.sha256(CORE_PREFIX + stored).hexdigest()


def test_golden_core():
    """The canonical bytes of this core never change: they are what hashes are taken of."""
    assert DELTA.policy_hash == ("7d79a42b34204ebda0fd071acbd33139062e0f8c61211b7a072ee206a49bda7a")


@pytest.mark.parametrize(
    "change",
    [
        {"base_version": 3},
        {"base_version": None},
        {"base_policy_hash": None},
        {"fingerprint_before": None},
        {"nnz": 8},
        {"files": FULL.files},
        {"kind": VersionKind.FULL},
        {"step_first": 6},
        {"generation": 0},
        {"generation": 1 << 53},
        {"step_last": 1 << 53},
        {"created_ms": -1},
        {"version": 0},
        {"run": "a/b"},
    ],
)
def test_contradictions_are_refused(change):
    """A core that contradicts itself cannot be made."""
    with pytest.raises(InvalidInputError):
        replace(DELTA, **change)


def _mangled(**change):
    document = json.loads(DELTA.canonical_bytes())
    document.update(change)
    return canonical_json(document) + b"\n[]"


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("version", [-1, 1 << 53, "5", None, True, 6, []]),
        ("base_version", [5, 9, "4", True]),
        ("kind", ["", "composite", 1, None]),
        ("run", ["", "..", "a/b", 3, "x" * 200]),
        ("run_id", ["", "0" * 31, "G" * 32, None]),
        ("layout_digest", ["", "0" * 63, None]),
        ("segments", [None, {}, [[]], [["k", 1, "zz", 1]], [["k", -1, SHA, 1]], [[1, 1, SHA, 7]]]),
        ("files", [None, [["../x", None, 1, SHA]], [["a", 5, 1, SHA]], [["a", None, True, SHA]]]),
        ("nnz", [-1, 8, None, "7"]),
        ("fingerprint_before", ["", "0" * 31, 5, None]),
        ("fingerprint_after", ["", "0" * 33, None]),
        ("encodings", [None, ["b", "a"], ["a", "a"], [1]]),
        ("step_first", [9, -1, None]),
        ("generation", [0, -1, None]),
        ("writer_nonce", ["", None]),
        ("format", ["", "deltastore-version/2", None]),
        ("unknown", [1]),
    ],
)
def test_every_field_out_of_range_is_a_format_error(field, values):
    """Whatever stands in a field that may not, the reader says FormatError and nothing else."""
    for value in values:
        with pytest.raises((FormatError, InvalidInputError)):
            VersionManifest.from_bytes(_mangled(**{field: value}))


def test_truncated_at_every_byte():
    """A manifest cut anywhere is a FormatError."""
    text = VersionManifest(DELTA).to_bytes()
    for end in range(len(text)):
        with pytest.raises(FormatError):
            VersionManifest.from_bytes(text[:end])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t.replace(b'":', b'": ', 1),
        lambda t: t + b"\n",
        lambda t: b" " + t,
        lambda t: t.replace(b'"nnz":7', b'"nnz":7.0'),
        lambda t: t.replace(b'"nnz":7', b'"nnz":7,"nnz":7'),
        lambda t: t.replace(b'"nnz":7', b'"nnz":NaN'),
        lambda t: t.replace(b'"nnz":7', b'"nnz":07'),
        lambda t: t.replace(b"r1", b"\\u00721", 1),
        lambda t: b"\xef\xbb\xbf" + t,
        lambda t: t.replace(b"[]", b'[["k","00"]]'),
    ],
    ids=[f"spelling{n}" for n in range(10)],
)
def test_other_spellings_are_refused(spoil):
    """A text that says the same in another way is not canonical and is refused."""
    with pytest.raises(FormatError):
        VersionManifest.from_bytes(spoil(VersionManifest(DELTA).to_bytes()))


def test_deep_and_long_documents_are_refused_before_work():
    """Deep nesting and oversized files are limits, not crashes."""
    deep = b"[" * 100_000 + b"]" * 100_000
    with pytest.raises(FormatError):
        VersionManifest.from_bytes(deep + b"\n[]")
    with pytest.raises(FormatError) as err:
        VersionManifest.from_bytes(b"x" * ((8 << 20) + 1))
    assert err.value.kind is Kind.LIMIT


@given(st.binary(max_size=300))
def test_noise_is_a_format_error(data):
    """Arbitrary bytes are refused as such."""
    with pytest.raises(FormatError):
        VersionManifest.from_bytes(data)


def test_run_record_round_trip():
    """run.json reads back equal and refuses other fields."""
    record = RunRecord("r1", "0" * 32, SHA, "home", 5)
    assert RunRecord.from_bytes(record.to_bytes()) == record
    document = json.loads(record.to_bytes())
    with pytest.raises(FormatError):
        RunRecord.from_bytes(canonical_json({**document, "more": 1}))


@pytest.mark.parametrize(("field", "value"), [("run", "../x"), ("home", "a/b"), ("run_id", "7")])
def test_run_record_with_an_impossible_field(field, value):
    """A run.json whose names cannot be names is a FormatError, not the caller's mistake."""
    document = json.loads(RunRecord("r1", "0" * 32, SHA, "home", 5).to_bytes())
    with pytest.raises(FormatError) as err:
        RunRecord.from_bytes(canonical_json({**document, field: value}))
    assert err.value.kind is Kind.FIELD
