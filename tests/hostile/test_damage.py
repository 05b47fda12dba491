"""Damage anywhere: a segment is refused, or its effect is refused, or it was not changed at all.

The SHA-256 in the manifest catches all of this first; these tests look at what is behind it.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deltastore.chain.apply import apply_blocks
from deltastore.chain.diff import dense_block, diff_tensor
from deltastore.errors import FormatError, IntegrityError
from deltastore.format.block import Block, ValueKind
from deltastore.format.box import Box
from deltastore.format.dtypes import DType
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.segment import (
    SegmentIdentity,
    decode_segment,
    encode_segment,
    segment_encodings,
)
from deltastore.testing.strategies import random_bits
from tests.golden.make_golden import FOLDER
from tests.golden.test_golden import NAMES, load

LAYOUT = Layout.build(
    [
        TensorEntry("scattered", DType.BF16, (3000,)),
        TensorEntry("clustered", DType.BF16, (200_000,)),
        TensorEntry("few", DType.F32, (1 << 19,)),
        TensorEntry("dense", DType.U8, (16, 40)),
    ]
)
IDENTITY = SegmentIdentity(LAYOUT.digest, 1, 2)


def sample() -> tuple[BitState, BitState, bytes]:
    """A base, a target, and a segment between them with every index and value encoding."""
    base = BitState(
        LAYOUT,
        [random_bits(s.elements, s.dtype.bits_dtype, i) for i, s in enumerate(LAYOUT.tensors)],
    )
    new = base.copy()
    generator = np.random.default_rng(7)
    where = np.flatnonzero(generator.random(3000) < 0.03)
    new.arrays[0][where] += generator.choice(np.array([1, 65535, 3, 700], np.uint16), where.size)
    rows = np.concatenate([np.arange(900), 70_000 + np.arange(900), 150_000 + np.arange(900)])
    new.arrays[1][rows] += np.uint16(1)
    gaps = np.array([0, 127, 120, 16383, 3, 100, 16384, 90, 400_000, 64, 127, 110])
    new.arrays[2][np.cumsum(gaps + 1) - 1] += np.uint32(70_000)
    new.arrays[3].reshape(16, 40)[3:9, 4:] = 9
    blocks = [
        block for t in range(3) for block in diff_tensor(LAYOUT, t, base.arrays[t], new.arrays[t])
    ]
    some = blocks[0]
    values = base.arrays[0][some.indices] + some.values
    blocks[0] = Block(0, some.box, ValueKind.BITS, some.indices, values, some.fingerprint_change)
    box = Box((3, 4), (6, 36), flat=False)
    part = (slice(3, 9), slice(4, 40))
    views = (state.arrays[3].reshape(16, 40)[part] for state in (new, base))
    blocks.append(dense_block(LAYOUT, 3, box, *views))
    return base, new, encode_segment(LAYOUT, IDENTITY, blocks)


BASE, NEW, DATA = sample()


def refused_or_true(data: bytes) -> bool:
    """True when the bytes are refused by reading or applying; else the state must be the target."""
    try:
        decoded = decode_segment(LAYOUT, data, expect=IDENTITY)
        state = BASE.copy()
        apply_blocks(state, decoded.blocks)
    except (FormatError, IntegrityError):
        return True
    assert state.equals(NEW)
    return False


def test_the_sample_has_every_encoding():
    """What is damaged below covers every stream."""
    assert not refused_or_true(DATA)
    assert segment_encodings(DATA) == {"ulp", "bits", "dense", "rice", "leb128", "gap16"}


def test_every_truncation_is_a_format_error():
    """Cut at every byte: FormatError."""
    for size in range(len(DATA)):
        with pytest.raises(FormatError):
            decode_segment(LAYOUT, DATA[:size])


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_flipped_byte_is_caught(flip: int):
    """A byte changed anywhere never leads to another state: it is refused, or it meant nothing.

    Only zstd frames have bytes that mean nothing, a handful in their headers.
    """
    harmless = 0
    for at in range(len(DATA)):
        damaged = bytearray(DATA)
        damaged[at] ^= flip
        harmless += not refused_or_true(bytes(damaged))
    assert harmless <= 8


@given(st.randoms(use_true_random=False), st.integers(1, 4))
@example(random.Random(0), 1)
def test_cut_doubled_and_swapped_ranges_are_caught(generator: random.Random, edits: int):
    """Ranges removed, repeated or moved: refused."""
    data = bytearray(DATA)
    for _ in range(edits):
        start, size = generator.randrange(len(data)), generator.randrange(1, 40)
        part = data[start : start + size]
        if generator.random() < 0.5:
            del data[start : start + size]
        if generator.random() < 0.7:
            where = generator.randrange(len(data) + 1)
            data[where:where] = part
    assert bytes(data) == DATA or refused_or_true(bytes(data))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_a_format_error(data: bytes):
    """No bytes but a segment's are read as one."""
    for candidate in (data, DATA[:96] + data):
        with pytest.raises(FormatError):
            decode_segment(LAYOUT, candidate)


@pytest.mark.parametrize("name", NAMES)
def test_golden_segments_of_another_layout_are_refused(name: str):
    """A golden segment on a layout that is not its own is told by the digest."""
    data, _document, layout = load(name)
    with pytest.raises(IntegrityError):
        decode_segment(LAYOUT, data)
    assert layout != LAYOUT
    assert (FOLDER / f"{name}.seg").exists()
