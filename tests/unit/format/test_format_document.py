"""FORMAT.md is executed: its example, its vectors and its limits are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import deltastore.format
from deltastore.chain.diff import dense_block, diff_tensor
from deltastore.format import segment, segment_table, streams
from deltastore.format.block import ValueKind
from deltastore.format.box import MAX_BOX_ELEMENTS, MAX_RANK, Box
from deltastore.format.disjoint import MAX_BOXES_PER_TENSOR
from deltastore.format.dtypes import DType
from deltastore.format.fingerprint import Fingerprint
from deltastore.format.kernels_fingerprint import HIGH_KEYS, HIGH_SHIFTS, LOW_KEYS, LOW_SHIFTS
from deltastore.format.layout import MAX_ELEMENTS, Layout
from deltastore.format.mixing import fingerprint_run
from deltastore.format.segment import SegmentIdentity, decode_segment, encode_segment
from tests import second_reader

TEXT = (Path(deltastore.format.__file__).parent / "FORMAT.md").read_text()


def fenced(label: str) -> str:
    """The one code block of that label."""
    (body,) = re.findall(rf"^```{label}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return body


def example_layout() -> Layout:
    """The layout of the worked example."""
    return Layout.from_bytes(fenced("json layout").strip().encode())


def example_bytes() -> bytes:
    """The segment of the worked example."""
    return bytes.fromhex(re.sub(r"#.*", "", fenced("hex segment")))


def example_states() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The tensors before and after, as the document words them."""
    old = [np.full(40, 0x3F80, np.uint16), np.arange(8, dtype=np.uint8)]
    new = [bits.copy() for bits in old]
    new[0][[3, 4, 20]] += np.array([1, 0xFFFF, 3], np.uint16)
    new[1].reshape(2, 4)[:, 1:3] = [[128, 129], [130, 131]]
    return old, new


def test_the_worked_example_is_what_the_writer_writes():
    """Encoding the change the document describes gives its bytes, to the last one."""
    layout = example_layout()
    old, new = example_states()
    part = (slice(None), slice(1, 3))
    box = Box((0, 1), (2, 2), flat=False)
    views = (new[1].reshape(2, 4)[part], old[1].reshape(2, 4)[part])
    blocks = [*diff_tensor(layout, 0, old[0], new[0]), dense_block(layout, 1, box, *views)]
    data = encode_segment(layout, SegmentIdentity(layout.digest, 41, 42), blocks)
    assert data == example_bytes()
    assert f"The segment is {len(data)} bytes" in TEXT


def test_both_readers_read_the_worked_example():
    """The library and the second reader take the example to the state the document states."""
    layout = example_layout()
    old, new = example_states()
    decoded = decode_segment(layout, example_bytes())
    assert [block.kind for block in decoded.blocks] == [ValueKind.STEPS, ValueKind.DENSE]
    text = layout.canonical_bytes()
    base, version, blocks = second_reader.read_segment(text, example_bytes())
    assert (base, version) == (41, 42)
    state = [bits.tolist() for bits in old]
    second_reader.apply(text, state, blocks)
    assert state == [bits.tolist() for bits in new]


def test_the_digest_in_the_document_is_that_of_its_layout():
    """The abbreviated digest names the layout that is printed."""
    first, last = re.search(r"digest `(\w+)\.\.\.(\w+)`", TEXT).groups()
    digest = example_layout().digest
    assert digest.startswith(first)
    assert digest.endswith(last)


@pytest.mark.parametrize(
    ("element", "pattern", "text"),
    [
        (0, 0, "159e6afbb6524e84316fa0687d889f8e"),
        (0, 1, "500e2e293efe7ddcdbaa926ef04fc9b5"),
        (1, 0, "a9816f8e2e809484c990dc599a65998c"),
        ((1 << 48) - 1, 0xFFFF, "c95b0e945eeeed8bb4d85b1fa2b457c2"),
        (12345, (1 << 64) - 1, "4e9b8203d9b841b2e64abf271101fcf1"),
    ],
)
def test_fingerprint_vectors(element: int, pattern: int, text: str):
    """Every vector stands in the document and comes out of the kernel and of plain integers."""
    assert text in TEXT
    width = np.uint64 if pattern > 0xFFFF else np.uint16
    assert str(fingerprint_run(np.array([pattern], width), element)) == text
    assert str(Fingerprint(*second_reader.mix(element, pattern))) == text


def test_constants_in_the_document_are_those_of_the_code():
    """Keys, shifts and limits are printed as they are compiled."""
    for name, keys, shifts in (("low", LOW_KEYS, LOW_SHIFTS), ("high", HIGH_KEYS, HIGH_SHIFTS)):
        row = " | ".join([name, *(f"{key:016X}" for key in keys), *map(str, shifts)])
        assert f"| {row} |" in TEXT
    assert segment.HEADER_BYTES == 96
    assert segment_table.MAX_BLOCKS == 131_072
    assert (MAX_ELEMENTS, MAX_BOX_ELEMENTS, MAX_RANK) == (1 << 48, 1 << 22, 16)
    assert MAX_BOXES_PER_TENSOR == 8192
    assert streams.MAX_FRAME_BYTES == 64 << 20
    assert segment.DecodeLimits(32 << 20, 1 << 30) == segment.DEFAULT_LIMITS
    assert all(dtype.value in TEXT for dtype in DType)
