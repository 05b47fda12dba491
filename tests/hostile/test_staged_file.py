"""A staged update is mapped into engines: nothing in it is believed before it is checked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.chain.apply import apply_blocks
from deltastore.chain.diff import dense_block, diff_box, diff_tensor
from deltastore.errors import FormatError, IntegrityError, Kind
from deltastore.format.box import Box
from deltastore.format.dtypes import DType
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.staged_file import (
    ALIGNMENT,
    HEADER,
    StagedContent,
    read_staged,
    staged_bytes,
    staged_parts,
)

LAYOUT = Layout.build(
    [
        TensorEntry("a", DType.BF16, (40, 30)),
        TensorEntry("b", DType.F32, (50,)),
        TensorEntry("c", DType.U8, (8, 8)),
        TensorEntry("scalar", DType.I64, ()),
    ]
)
ABOUT = {"base": [1], "target": [2]}


def _states(seed):
    rng = np.random.default_rng(seed)
    old, new = BitState.zeros(LAYOUT), BitState.zeros(LAYOUT)
    for before, after in zip(old.arrays, new.arrays, strict=True):
        before[:] = rng.integers(0, 256, before.size)
        after[:] = before
        moved = rng.random(after.size) < 0.2
        after[moved] += np.ones(int(moved.sum()), after.dtype)
    return old, new


def _content(seed=1):
    old, new = _states(seed)
    blocks = list(diff_tensor(LAYOUT, 0, old.arrays[0], new.arrays[0]))
    blocks.append(dense_block(LAYOUT, 1, Box.run(0, 50), new.arrays[1], old.arrays[1]))
    box = Box((2, 1), (4, 5), flat=False)
    offsets = box.offsets_of(None, (8, 8))
    block = diff_box(LAYOUT, 2, box, old.arrays[2][offsets], new.arrays[2][offsets])
    blocks += [block] if block is not None else []
    return old, StagedContent(ABOUT, blocks)


def _file(content):
    return bytearray(b"".join(staged_parts(LAYOUT, content)))


@given(st.integers(0, 1 << 32))
def test_round_trip(seed):
    """What is read does exactly what was written, from read-only views that are aligned."""
    old, content = _content(seed)
    data = _file(content)
    assert len(data) <= staged_bytes(content)
    found = read_staged(LAYOUT, memoryview(data))
    assert found.about == ABOUT
    ours, theirs = old.copy(), old.copy()
    assert apply_blocks(ours, content.blocks) == apply_blocks(theirs, found.blocks)
    assert ours.equals(theirs)
    for block in found.blocks:
        assert not block.values.flags.writeable
        assert block.values.ctypes.data % block.values.itemsize == 0


def test_whole_state():
    """A whole state comes back in every bit, empty tensors among them."""
    _old, new = _states(3)
    found = read_staged(LAYOUT, memoryview(_file(StagedContent(ABOUT, [], new))))
    assert found.state.equals(new)
    assert found.blocks == []


def test_no_changes():
    """An update without a change is a file too."""
    assert read_staged(LAYOUT, memoryview(_file(StagedContent(ABOUT, [])))).blocks == []


@given(st.data())
def test_any_damage_is_an_error_or_harmless(data):
    """Whatever bytes are changed, reading raises a named error or yields blocks within bounds."""
    _old, content = _content()
    file = _file(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(file) - 1))
        file[at] = data.draw(st.integers(0, 255))
    try:
        found = read_staged(LAYOUT, memoryview(file))
    except (FormatError, IntegrityError):
        return
    for block in found.blocks:
        assert block.box.fits(LAYOUT.tensors[block.tensor].element_shape)
        if block.indices is not None:
            assert (np.diff(block.indices.astype(np.int64)) > 0).all()
            assert block.indices[-1] < block.box.elements


@given(st.integers(0, 4000))
def test_cut_short(size):
    """A file without its end is truncated, wherever it was cut."""
    file = _file(_content()[1])
    with pytest.raises(FormatError) as err:
        read_staged(LAYOUT, memoryview(file[: min(size, len(file) - 1)]))
    assert err.value.kind is Kind.TRUNCATED


def _patched(at, new):
    file = _file(_content()[1])
    file[at : at + len(new)] = new
    return file


@pytest.mark.parametrize(
    ("at", "new", "kind"),
    [
        (0, b"x", Kind.MAGIC),
        (8, b"\xfe\xff", Kind.MAGIC),
        (10, b"\x02", Kind.FORMAT_VERSION),
        (12, b"\x01", Kind.FIELD),
        (16, b"\xff" * 8, Kind.LIMIT),
        (24, b"\xff" * 8, Kind.LIMIT),
        (32, b"\xff" * 8, Kind.LIMIT),
        (40, b"\xff" * 8, Kind.TRUNCATED),
        (40, b"\x00" * 8, Kind.TRAILING),
        (HEADER.size, b"\x01", Kind.FIELD),
        (ALIGNMENT, b"[", Kind.NOT_CANONICAL),
    ],
)
def test_header_fields(at, new, kind):
    """Each field of the header has an error of its own."""
    with pytest.raises(FormatError) as err:
        read_staged(LAYOUT, memoryview(_patched(at, new)))
    assert err.value.kind is kind


@pytest.mark.parametrize(
    ("field", "new", "kind"),
    [
        (0, b"\xff\xff\xff\xff", Kind.FIELD),  # tensor
        (4, b"\x03", Kind.FIELD),  # kind
        (5, b"\x02", Kind.FIELD),  # flat
        (6, b"\xff\xff", Kind.FIELD),  # rank
        (8, b"\xff" * 8, Kind.LIMIT),  # changes
        (8, b"\x00" * 8, Kind.LIMIT),
    ],
)
def test_table_fields(field, new, kind):
    """Each field of a block's row has an error of its own."""
    core_bytes = HEADER.unpack_from(_file(_content()[1]))[4]
    row = ALIGNMENT + -(-core_bytes // ALIGNMENT) * ALIGNMENT
    with pytest.raises(FormatError) as err:
        read_staged(LAYOUT, memoryview(_patched(row + field, new)))
    assert err.value.kind is kind


def test_file_of_another_layout():
    """A staged update of another model is refused by its layout."""
    other = Layout.build([TensorEntry("a", DType.BF16, (40, 30))])
    with pytest.raises(IntegrityError) as err:
        read_staged(other, memoryview(_file(_content()[1])))
    assert err.value.kind is Kind.LAYOUT_MISMATCH
