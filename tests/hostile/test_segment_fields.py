"""Every field of a segment out of its range: the exact error, before anything of that size."""

from __future__ import annotations

import tracemalloc

import pytest

from deltastore.chain.apply import apply_blocks
from deltastore.errors import FormatError, IntegrityError, Kind
from deltastore.format.dtypes import DType
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.segment import DecodeLimits, SegmentIdentity, decode_segment
from tests import second_reader
from tests.hostile.segment_parts import (
    BITS_LEB,
    BOXED,
    DENSE,
    ULP_GAP16,
    ULP_LEB,
    ULP_RICE,
    Parts,
    leb128,
    rice_bits,
    sparse,
    zstd,
)

LAYOUT = Layout.build(
    [
        TensorEntry("a", DType.BF16, (64,)),
        TensorEntry("m", DType.BF16, (8, 8)),
        TensorEntry("big", DType.U8, (1 << 22, 3)),
        TensorEntry("wide", DType.F64, (1 << 22, 64)),
    ]
)
DIGEST = LAYOUT.digest
GOOD = sparse(DIGEST, leb128(0, 5, 40), 3)
RICE = GOOD.but(
    forms=[ULP_RICE],
    parameters=[2],
    streams=[(0x01, rice_bits((0, 3, 2), (1, 0, 2), (2, 1, 2))), *GOOD.streams[1:]],
)
GAP16 = GOOD.but(
    forms=[ULP_GAP16],
    frames=[1, 4],
    streams=[(0x03, bytes([0, 5, 40])), (0x04, bytes(3)), *GOOD.streams[1:]],
)
DENSE_A = Parts(
    DIGEST,
    forms=[DENSE],
    tensors=[0],
    skips=[0],
    sizes=[64],
    frames=[1, 2],
    streams=[(0x68, bytes(64)), (0x69, bytes(64))],
    nnz=64,
)
BOXES = Parts(
    DIGEST,
    forms=[ULP_LEB | BOXED] * 2,
    tensors=[1, 0],
    counts=[1, 1],
    boxes=[0, 0, 4, 8, 4, 0, 4, 8],
    frames=[2, 3],
    streams=[(0x02, bytes(2)), (0x11, bytes(2)), (0x15, bytes(2))],
)
TWO_RUNS = BOXES.but(forms=[ULP_LEB] * 2, tensors=[0, 0], skips=[0, 0], sizes=[32, 32], boxes=[])


def frames_of(parts: Parts, *rows: tuple[int, int]) -> Parts:
    """The same with other frames."""
    return parts.but(frames=[n for row in rows for n in row])


def streams_of(parts: Parts, *streams: tuple[int, bytes]) -> Parts:
    """The same with other streams in its one frame."""
    return parts.but(streams=list(streams), frames=[len(parts.forms), len(streams)])


def with_steps(directions: bytes, mores: bytes, *magnitudes: int) -> Parts:
    """GOOD with those step streams."""
    planes = [bytes(m >> 8 * p & 255 for m in magnitudes) for p in (0, 1)]
    extra = [(0x28 + p, plane) for p, plane in enumerate(planes) if plane]
    return streams_of(GOOD, GOOD.streams[0], (0x11, directions), (0x15, mores), *extra)


GAPS, UP, ONE = GOOD.streams
HUGE = (1 << 63) - 1
LIAR = b"".join([zstd(bytes(65))[:5], b"\x40", zstd(bytes(65))[6:]])
"""A zstd frame of 65 bytes whose header says 64."""
LAST = rice_bits((0, 3, 2), (0, 0, 2), (0, 0, 2))

CASES: list[tuple[str, Parts, Kind]] = [
    # header
    ("magic", GOOD.but(header={"magic": b"PK\3\4abcd"}), Kind.MAGIC),
    ("byte-swapped, CASE N12", GOOD.but(header={"order": 0xFFFE}), Kind.MAGIC),
    ("format version 2", GOOD.but(header={"format": 2}), Kind.FORMAT_VERSION),
    ("format version 0", GOOD.but(header={"format": 0}), Kind.FORMAT_VERSION),
    ("flags", GOOD.but(header={"flags": 1}), Kind.FIELD),
    ("base is version", GOOD.but(header={"base": 7}), Kind.FIELD),
    ("version too large", GOOD.but(header={"version": 10_000_000_000}), Kind.FIELD),
    ("too many blocks", GOOD.but(header={"blocks": 131_073}), Kind.LIMIT),
    ("block count off", GOOD.but(header={"blocks": 2, "frames": 1}), Kind.TRUNCATED),
    ("more frames than blocks", GOOD.but(header={"frames": 2}), Kind.LIMIT),
    ("no frame", GOOD.but(header={"frames": 0}), Kind.FIELD),
    ("nnz", GOOD.but(header={"nnz": 4}), Kind.FIELD),
    ("huge nnz", GOOD.but(header={"nnz": (1 << 64) - 1}), Kind.FIELD),
    ("table bomb", GOOD.but(header={"table_raw": (1 << 32) - 1}), Kind.LIMIT),
    ("table raw size", GOOD.but(header={"table_raw": 30}), Kind.ENCODING),
    ("table stored larger", GOOD.but(header={"table_raw": 2}), Kind.LIMIT),
    ("body size", GOOD.but(header={"body": 6}), Kind.TRUNCATED),
    ("huge body", GOOD.but(header={"body": (1 << 64) - 1}), Kind.TRUNCATED),
    ("bytes behind", GOOD.but(trailing=b"\0"), Kind.TRAILING),
    ("body with a gap", GOOD.but(trailing=b"\0", header={"body": 6}), Kind.FIELD),
    # table
    ("bytes behind the table", GOOD.but(table_tail=b"\0"), Kind.TRAILING),
    ("reserved form bits", GOOD.but(forms=[ULP_LEB | 0x40]), Kind.FIELD),
    ("value kind 3", GOOD.but(forms=[0x07]), Kind.ENCODING),
    ("index encoding 4", GOOD.but(forms=[0x10]), Kind.ENCODING),
    ("sparse without indices", GOOD.but(forms=[0x00]), Kind.ENCODING),
    ("dense with indices", GOOD.but(forms=[0x06]), Kind.ENCODING),
    ("tensor beyond", GOOD.but(tensors=[4]), Kind.FIELD),
    ("huge tensor", GOOD.but(tensors=[HUGE]), Kind.FIELD),
    ("tensor sum beyond", TWO_RUNS.but(tensors=[3, 3]), Kind.FIELD),
    ("Rice parameter", RICE.but(parameters=[23]), Kind.LIMIT),
    ("Rice parameter 255", RICE.but(parameters=[255]), Kind.LIMIT),
    ("no change", GOOD.but(counts=[0]), Kind.LIMIT),
    ("more changes than elements", GOOD.but(counts=[65]), Kind.LIMIT),
    ("huge count", GOOD.but(counts=[HUGE]), Kind.LIMIT),
    ("run leaves its tensor", GOOD.but(sizes=[65]), Kind.BOX),
    ("run starts outside", GOOD.but(skips=[1]), Kind.BOX),
    ("huge skip", GOOD.but(skips=[HUGE], sizes=[HUGE]), Kind.BOX),
    ("runs leave together", TWO_RUNS.but(skips=[0, 1]), Kind.BOX),
    ("empty run", GOOD.but(sizes=[0]), Kind.LIMIT),
    ("run too large", GOOD.but(tensors=[2], sizes=[(1 << 22) + 1]), Kind.LIMIT),
    ("box leaves its tensor", BOXES.but(boxes=[0, 0, 4, 8, 4, 0, 5, 8]), Kind.BOX),
    ("box starts outside", BOXES.but(boxes=[0, 0, 4, 8, 4, 9, 4, 0]), Kind.BOX),
    ("huge box", BOXES.but(boxes=[0, 0, 4, 8, HUGE, HUGE, HUGE, HUGE]), Kind.BOX),
    ("empty box", BOXES.but(boxes=[0, 0, 4, 0, 4, 0, 4, 8]), Kind.LIMIT),
    ("boxes overlap", BOXES.but(boxes=[0, 0, 5, 8, 4, 0, 4, 8]), Kind.BOX),
    ("boxes cross", BOXES.but(boxes=[0, 3, 8, 2, 3, 0, 2, 8]), Kind.BOX),
    ("boxes reordered", BOXES.but(boxes=[4, 0, 4, 8, 0, 0, 4, 8]), Kind.ORDER),
    ("box twice", BOXES.but(boxes=[0, 0, 4, 8] * 2), Kind.ORDER),
    (
        "run and box",
        BOXES.but(forms=[ULP_LEB, ULP_LEB | BOXED], skips=[0], sizes=[8], boxes=[4, 0, 4, 8]),
        Kind.BOX,
    ),
    ("box too large", GOOD.but(forms=[0x24], tensors=[2], skips=[], sizes=[],
                               boxes=[0, 0, 1 << 22, 2]), Kind.LIMIT),
    ("frame without blocks", frames_of(GOOD, (0, 3)), Kind.FIELD),
    ("frame of too many blocks", frames_of(GOOD, (2, 3)), Kind.FIELD),
    ("huge frame", frames_of(GOOD, (HUGE, 3)), Kind.FIELD),
    ("frames that wrap", frames_of(TWO_RUNS, (HUGE, 1), (HUGE, 2)), Kind.FIELD),
    ("frame without streams", frames_of(GOOD, (1, 0)), Kind.LIMIT),
    ("frame of too many streams", frames_of(GOOD, (1, HUGE)), Kind.LIMIT),
    ("non-minimal number in the table", GOOD.but(frames=[], table_tail=b"\x81\0\3"),
     Kind.FIELD),
    # streams of a frame
    ("streams reordered", streams_of(GOOD, UP, GAPS, ONE), Kind.ORDER),
    ("stream twice", streams_of(GOOD, GAPS, UP, UP, ONE), Kind.ORDER),
    ("stream 0", streams_of(GOOD, (0, b"x"), GAPS, UP, ONE), Kind.ORDER),
    ("stream missing", streams_of(GOOD, GAPS, UP), Kind.FIELD),
    ("unknown stream", streams_of(GOOD, GAPS, UP, ONE, (0x7F, b"x")), Kind.LIMIT),
    ("stream of another width", streams_of(GOOD, GAPS, (0x12, b"\0"), ONE), Kind.LIMIT),
    ("empty stream", streams_of(GOOD, (0x02, b""), UP, ONE), Kind.LIMIT),
    ("bits stream too long", streams_of(GOOD, GAPS, (0x11, bytes(2)), ONE), Kind.LIMIT),
    ("gap stream too short", streams_of(GOOD, (0x02, bytes(2)), UP, ONE), Kind.LIMIT),
    ("gap stream too long", streams_of(GOOD, (0x02, bytes(13)), UP, ONE), Kind.LIMIT),
    ("Rice too short", streams_of(RICE, (0x01, bytes(1)), UP, ONE), Kind.LIMIT),
    ("Rice too long", streams_of(RICE, (0x01, bytes(10)), UP, ONE), Kind.LIMIT),
    ("stored larger than raw", GOOD.but(raw_sizes=[2, 1, 1]), Kind.LIMIT),
    ("magnitude plane alone", streams_of(GOOD, *GOOD.streams, (0x29, b"\0")), Kind.ENCODING),
    ("dense plane missing", streams_of(DENSE_A, DENSE_A.streams[0]), Kind.FIELD),
    ("dense plane short", streams_of(DENSE_A, (0x68, bytes(63)), (0x69, bytes(64))), Kind.LIMIT),
    ("not zstd", DENSE_A.but(streams=[(0x68, bytes(63)), (0x69, bytes(64))],
                             raw_sizes=[64, 64]), Kind.ENCODING),
    ("zstd of another size", DENSE_A.but(streams=[(0x68, zstd(bytes(65))), (0x69, bytes(64))],
                                         raw_sizes=[64, 64]), Kind.LIMIT),
    ("zstd bomb", DENSE_A.but(streams=[(0x68, zstd(bytes(1 << 26))[:60]), (0x69, bytes(64))],
                              raw_sizes=[64, 64]), Kind.LIMIT),
    ("zstd that holds more than it says", DENSE_A.but(streams=[(0x68, LIAR), (0x69, bytes(64))],
                                                      raw_sizes=[64, 64]), Kind.ENCODING),
    ("zstd without size",
     DENSE_A.but(streams=[(0x68, zstd(bytes(64), write_content_size=False)), (0x69, bytes(64))],
                 raw_sizes=[64, 64]), Kind.LIMIT),
    ("zstd with checksum",
     DENSE_A.but(streams=[(0x68, zstd(bytes(64), write_checksum=True)), (0x69, bytes(64))],
                 raw_sizes=[64, 64]), Kind.LIMIT),
    ("zstd truncated", DENSE_A.but(streams=[(0x68, zstd(bytes(64))[:-1]), (0x69, bytes(64))],
                                   raw_sizes=[64, 64]), Kind.ENCODING),
    ("bytes behind zstd", DENSE_A.but(streams=[(0x68, zstd(bytes(64)) + b"x"),
                                               (0x69, bytes(64))],
                                      raw_sizes=[64, 64]), Kind.ENCODING),
    # indices, CASES R29 and N11
    ("index beyond", sparse(DIGEST, leb128(0, 5, 57), 3), Kind.ORDER),
    ("first index beyond", sparse(DIGEST, leb128(64, 0, 0), 3), Kind.ORDER),
    ("huge gap", sparse(DIGEST, leb128(0, (1 << 62) + 5), 3), Kind.ORDER),
    ("LEB128 of 10 bytes", sparse(DIGEST, b"\0" + b"\x80" * 9 + b"\1", 3), Kind.ENCODING),
    ("LEB128 of 11 bytes", sparse(DIGEST, b"\0" + b"\xff" * 10 + b"\1", 3), Kind.ENCODING),
    ("LEB128 not minimal", sparse(DIGEST, b"\x80\0\0\0", 3), Kind.ENCODING),
    ("LEB128 truncated", sparse(DIGEST, b"\0\0\x80", 3), Kind.TRUNCATED),
    ("LEB128 behind", sparse(DIGEST, bytes(4), 3), Kind.TRAILING),
    ("Rice index beyond", streams_of(RICE, (0x01, rice_bits((0, 3, 2), (15, 3, 2), (0, 0, 2))),
                                     UP, ONE), Kind.ORDER),
    ("Rice without end", streams_of(RICE, (0x01, b"\7\0"), UP, ONE), Kind.TRUNCATED),
    ("Rice rest truncated", streams_of(RICE, (0x01, b"\x09\x80"), UP, ONE), Kind.TRUNCATED),
    ("Rice padding", streams_of(RICE, (0x01, rice_bits((0, 3, 2), (0, 0, 2), (0, 0, 2), (0, 0, 2))),
                                UP, ONE), Kind.ENCODING),
    ("Rice byte behind", streams_of(RICE, (0x01, LAST + b"\0"),
                                    UP, ONE), Kind.TRAILING),
    ("gap16 index beyond", streams_of(GAP16, (0x03, bytes([0, 5, 57])), *GAP16.streams[1:]),
     Kind.ORDER),
    ("gap16 wide missing",
     streams_of(GAP16, (0x03, b"\xff\0\0"), (0x04, b"\xff\0\0"), UP, ONE), Kind.TRUNCATED),
    ("gap16 wide beyond",
     streams_of(GAP16, (0x03, b"\xff\0\0"), (0x04, b"\xff\0\0"), (0x05, leb128(1 << 60)[:9]),
                UP, ONE), Kind.ORDER),
    ("gap16 wide behind",
     streams_of(GAP16, *GAP16.streams[:2], (0x05, b"\0"), UP, ONE), Kind.TRAILING),
    # values
    ("direction padding", with_steps(b"\x08", b"\0"), Kind.ENCODING),
    ("more padding", with_steps(b"\0", b"\x88", 0, 0), Kind.ENCODING),
    ("magnitudes missing", with_steps(b"\0", b"\1"), Kind.ENCODING),
    ("magnitudes too many", with_steps(b"\0", b"\1", 0, 0), Kind.ENCODING),
    ("magnitude up beyond", with_steps(b"\0", b"\1", 0x7FFE), Kind.ENCODING),
    ("magnitude down beyond", with_steps(b"\1", b"\1", 0x7FFF), Kind.ENCODING),
    ("step of 0, magnitude wraps", with_steps(b"\0", b"\1", 0xFFFE), Kind.ENCODING),
    ("step of 1 as magnitude", with_steps(b"\0", b"\1", 0xFFFF), Kind.ENCODING),
]  # fmt: skip


@pytest.mark.parametrize("parts", [GOOD, RICE, GAP16, DENSE_A, BOXES, TWO_RUNS])
def test_the_parts_are_legal_before_they_are_broken(parts: Parts):
    """Each starting point decodes, in both readers: what fails below fails for its one fault."""
    decoded = decode_segment(LAYOUT, parts.encode(), expect=SegmentIdentity(DIGEST, 6, 7))
    assert decoded.blocks
    second_reader.read_segment(LAYOUT.canonical_bytes(), parts.encode())


@pytest.mark.parametrize(("name", "parts", "kind"), CASES, ids=[name for name, *_ in CASES])
def test_a_broken_field_is_the_exact_error(name: str, parts: Parts, kind: Kind):
    """CASE R29, N11, N12: refused with the kind that says why, within little memory."""
    data = parts.encode()
    tracemalloc.start()
    try:
        with pytest.raises(FormatError) as caught:
            decode_segment(LAYOUT, data)
        _now, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.kind is kind, caught.value
    assert peak_bytes < 2 << 20


@pytest.mark.parametrize(("name", "parts", "_kind"), CASES, ids=[name for name, *_ in CASES])
def test_the_second_reader_refuses_it_too(name: str, parts: Parts, _kind: Kind):
    """The document forbids what the library refuses."""
    with pytest.raises((second_reader.RefusedError, second_reader.zstandard.ZstdError)):
        second_reader.read_segment(LAYOUT.canonical_bytes(), parts.encode())


def test_boxes_of_a_sharded_matrix_pass():
    """The four quarters of a 2 x 2 sharded matrix are legal boxes."""
    quarters = [0, 0, 4, 4, 0, 4, 4, 4, 4, 0, 4, 4, 4, 4, 4, 4]
    parts = BOXES.but(
        forms=[ULP_LEB | BOXED] * 4,
        tensors=[1, 0, 0, 0],
        counts=[1] * 4,
        boxes=quarters,
        frames=[4, 3],
        streams=[(0x02, bytes(4)), (0x11, bytes(4)), (0x15, bytes(4))],
    )
    starts = [b.box.start for b in decode_segment(LAYOUT, parts.encode()).blocks]
    assert starts == [(0, 0), (0, 4), (4, 0), (4, 4)]


def test_a_bomb_within_the_format_is_held_by_the_readers_limit():
    """A small object that would decode to gigabytes is refused before a stream is touched."""
    blocks = 64
    elements = 1 << 22
    frame = zstd(bytes(elements))
    parts = Parts(
        DIGEST,
        forms=[DENSE] * blocks,
        tensors=[3] + [0] * (blocks - 1),
        skips=[0] * blocks,
        sizes=[elements] * blocks,
        frames=[1, 8] * blocks,
        streams=[(0x78 + p, frame) for _ in range(blocks) for p in range(8)],
        raw_sizes=[elements] * 8 * blocks,
        nnz=elements * blocks,
    )
    data = parts.encode()
    assert len(data) < 1 << 20
    tracemalloc.start()
    try:
        for limits in (DecodeLimits(), DecodeLimits(max_decoded_bytes=1 << 20)):
            with pytest.raises(FormatError) as caught:
                decode_segment(LAYOUT, data, limits=limits)
            assert caught.value.kind is Kind.LIMIT
        with pytest.raises(second_reader.RefusedError, match="decoded indices and values"):
            second_reader.read_segment(LAYOUT.canonical_bytes(), data)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_beyond_its_limit_is_refused():
    """Streams of more than 64 MiB in one frame are refused though each block is legal."""
    elements = 1 << 22
    frame = zstd(bytes(3 * elements))
    parts = Parts(
        DIGEST,
        forms=[DENSE] * 3,
        tensors=[3, 0, 0],
        skips=[0] * 3,
        sizes=[elements] * 3,
        frames=[3, 8],
        streams=[(0x78 + p, frame) for p in range(8)],
        raw_sizes=[3 * elements] * 8,
        nnz=3 * elements,
    )
    with pytest.raises(FormatError) as caught:
        decode_segment(LAYOUT, parts.encode())
    assert caught.value.kind is Kind.LIMIT
    with pytest.raises(second_reader.RefusedError, match="streams of a frame"):
        second_reader.read_segment(LAYOUT.canonical_bytes(), parts.encode())


def test_another_layout_or_version_is_an_integrity_error():
    """A sound segment of something else is told apart from damage."""
    other = Layout.build([TensorEntry("x", DType.BF16, (64,))])
    with pytest.raises(IntegrityError) as caught:
        decode_segment(other, GOOD.encode())
    assert caught.value.kind is Kind.LAYOUT_MISMATCH
    with pytest.raises(IntegrityError) as caught:
        decode_segment(LAYOUT, GOOD.encode(), expect=SegmentIdentity(DIGEST, 7, 8))
    assert caught.value.kind is Kind.WRONG_BASE


def test_the_largest_step_down_has_one_coding():
    """-2^15 is a step down; the same pattern as a step up is refused (see above)."""
    decoded = decode_segment(LAYOUT, with_steps(b"\1", b"\1", 0x7FFE).encode())
    assert decoded.blocks[0].values.tolist() == [0x8000, 1, 1]


def test_bits_blocks_are_read():
    """A sparse block of patterns with LEB128 gaps decodes to them."""
    parts = GOOD.but(
        forms=[BITS_LEB],
        streams=[GAPS, (0x48, bytes([1, 2, 3])), (0x49, bytes([4, 5, 6]))],
    )
    (block,) = decode_segment(LAYOUT, parts.encode()).blocks
    assert block.values.tolist() == [0x401, 0x502, 0x603]


def test_a_declared_change_that_is_not_true_writes_nothing():
    """A sound segment with a false fingerprint change leaves the state as it was."""
    decoded = decode_segment(LAYOUT, GOOD.encode())
    small = Layout.build([TensorEntry("a", DType.BF16, (64,))])
    state = BitState.zeros(small)
    with pytest.raises(IntegrityError) as caught:
        apply_blocks(state, decoded.blocks)
    assert caught.value.kind is Kind.FINGERPRINT
    assert not state.arrays[0].any()
