"""FORMAT.md's limits are those of both readers: what one refuses for its size, the other does."""

from __future__ import annotations

import json

import pytest

from deltastore.errors import FormatError, Kind
from deltastore.format.dtypes import DType
from deltastore.format.layout import Layout, TensorEntry
from deltastore.format.segment import decode_segment
from tests import second_reader
from tests.hostile.segment_parts import BOXED, ULP_LEB, Parts

MOST_BOXES = 8192
ROWS = Layout.build([TensorEntry("m", DType.BF16, (MOST_BOXES + 1, 2))])


def boxes(count: int) -> bytes:
    """A segment of so many boxes, one row of the matrix each, one change each."""
    flags = bytes(count)
    return Parts(
        ROWS.digest,
        forms=[ULP_LEB | BOXED] * count,
        tensors=[0] * count,
        counts=[1] * count,
        boxes=[n for row in range(count) for n in (row, 0, 1, 2)],
        frames=[count, 3],
        streams=[(0x02, flags), (0x11, flags), (0x15, flags)],
    ).encode()


def test_more_boxes_of_a_tensor_than_the_limit_are_refused():
    """8,192 boxes of one tensor are read, one more is refused by both readers."""
    assert len(decode_segment(ROWS, boxes(MOST_BOXES)).blocks) == MOST_BOXES
    data = boxes(MOST_BOXES + 1)
    with pytest.raises(FormatError) as caught:
        decode_segment(ROWS, data)
    assert caught.value.kind is Kind.LIMIT
    with pytest.raises(second_reader.RefusedError, match="boxes of a tensor"):
        second_reader.read_segment(ROWS.canonical_bytes(), data)


def layout_text(dtype: str, shape: list[int]) -> bytes:
    """A layout of one tensor, canonical but for its limits."""
    rows = [["w", dtype, shape, []]]
    document = {"format": "deltastore-layout/1", "tensors": rows}
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


@pytest.mark.parametrize(
    ("dtype", "fits", "beyond"),
    [
        ("BF16", [1] * 16, [1] * 17),
        ("C64", [1] * 16, [1] * 17),
        ("U8", [1 << 24, 1 << 24], [1 << 24, (1 << 24) + 1]),
    ],
    ids=["dimensions", "of a complex tensor", "elements"],
)
def test_a_layout_beyond_the_limits_is_refused(dtype: str, fits: list[int], beyond: list[int]):
    """16 dimensions (17 with the pair of a complex item) and 2^48 elements, in both readers."""
    text = layout_text(dtype, fits)
    assert Layout.from_bytes(text).digest == second_reader.read_layout(text)[0]
    with pytest.raises(FormatError):
        Layout.from_bytes(layout_text(dtype, beyond))
    with pytest.raises(second_reader.RefusedError):
        second_reader.read_layout(layout_text(dtype, beyond))
