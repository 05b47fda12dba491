"""Frozen bytes: what was written once is read for ever, by the library and by the second reader."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltastore.chain.apply import apply_blocks
from deltastore.format.dtypes import DType
from deltastore.format.layout import Layout
from deltastore.format.segment import SegmentIdentity, decode_segment, segment_encodings
from tests import second_reader
from tests.golden.make_golden import FOLDER, base_state

NAMES = sorted(path.stem for path in FOLDER.glob("*.seg"))


def load(name: str) -> tuple[bytes, dict[str, Any], Layout]:
    """A case: its bytes, what they hold, and its layout."""
    document = json.loads((FOLDER / f"{name}.json").read_text())
    layout = Layout.from_bytes(document["layout"].encode())
    return (FOLDER / f"{name}.seg").read_bytes(), document, layout


def test_there_is_a_case_for_every_dtype_and_encoding():
    """All dtypes as steps, and every index and value encoding, are among the golden files."""
    assert {f"ulp-{dtype.value.lower()}" for dtype in DType} <= set(NAMES)
    used = {encoding for name in NAMES for encoding in load(name)[1]["encodings"]}
    assert used == {"ulp", "bits", "dense", "rice", "leb128", "gap16"}


@pytest.mark.parametrize("name", NAMES)
def test_the_library_reads_golden_segments(name: str):
    """Blocks, encodings, and the state after them are those of the day the file was written."""
    data, document, layout = load(name)
    expect = SegmentIdentity(layout.digest, 6, 7)
    decoded = decode_segment(layout, data, expect=expect)
    assert sorted(segment_encodings(data)) == document["encodings"]
    found = [
        {
            "tensor": b.tensor,
            "start": list(b.box.start),
            "shape": list(b.box.shape),
            "boxed": not b.box.flat,
            "kind": b.kind.value,
            "indices": None if b.indices is None else b.indices.tolist(),
            "values_sha256": hashlib.sha256(b.values.tobytes()).hexdigest(),
            "change": str(b.fingerprint_change),
        }
        for b in decoded.blocks
    ]
    assert found == document["blocks"]
    state = base_state(layout)
    apply_blocks(state, decoded.blocks)
    after = [hashlib.sha256(bits.tobytes()).hexdigest() for bits in state.arrays]
    assert after == document["after_sha256"]


@pytest.mark.parametrize("name", NAMES)
def test_the_second_reader_reads_golden_segments(name: str):
    """A reader written from FORMAT.md alone finds the same blocks and rebuilds the same state."""
    data, document, layout = load(name)
    text = document["layout"].encode()
    base, version, blocks = second_reader.read_segment(text, data)
    assert (base, version) == (6, 7)
    for block, expected in zip(blocks, document["blocks"], strict=True):
        width = layout.tensors[block.tensor].dtype.element_bits // 8
        values = b"".join(value.to_bytes(width, "little") for value in block.values)
        assert {
            "tensor": block.tensor,
            "start": block.start,
            "shape": block.sizes,
            "boxed": block.boxed,
            "kind": block.kind,
            "indices": block.indices,
            "values_sha256": hashlib.sha256(values).hexdigest(),
            "change": f"{block.change[0]:016x}{block.change[1]:016x}",
        } == expected
    if name == "frames":
        return  # half a million patterns: the library's test covers the state
    state = [bits.tolist() for bits in base_state(layout).arrays]
    second_reader.apply(text, state, blocks)
    after = [
        hashlib.sha256(np.array(bits, spec.dtype.bits_dtype).tobytes()).hexdigest()
        for bits, spec in zip(state, layout.tensors, strict=True)
    ]
    assert after == document["after_sha256"]


def test_golden_files_are_small():
    """Golden files stay a few hundred kilobytes in all, so that they can stay for ever."""
    assert sum(path.stat().st_size for path in Path(FOLDER).iterdir()) < 400_000
