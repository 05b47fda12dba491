"""Every kernel against a slow oracle in numpy or plain integers: the fast path may not differ."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import FormatError, InvalidInputError, Kind
from deltastore.format import kernels_apply, kernels_merge
from deltastore.format.block import Block, ValueKind
from deltastore.format.box import Box
from deltastore.format.disjoint import check_disjoint, run_boxes
from deltastore.format.dtypes import DType
from deltastore.format.fingerprint import ZERO, Fingerprint
from deltastore.format.indices import (
    IndexEncoding,
    IndexPlan,
    decode_gaps,
    encode_gaps,
    gap_stream_limits,
    plan_indices,
)
from deltastore.format.kernels_base import frozen
from deltastore.format.kernels_cost import COST_COLUMNS, index_costs, log2_fixed
from deltastore.format.kernels_diff import scan_changes
from deltastore.format.kernels_index import PADDING_BYTES
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.mixing import (
    fingerprint_change,
    fingerprint_elements,
    fingerprint_run,
    fingerprint_state,
)
from deltastore.format.segment import SegmentIdentity, decode_segment, encode_segment
from deltastore.format.streams import RICE_CODES, Packer, unpack
from deltastore.format.values import ENCODINGS, StepValues, from_planes, to_planes
from deltastore.testing.strategies import boxes, change_bits, random_bits, seeds
from tests import second_reader

WIDTHS = [DType.U8, DType.BF16, DType.F32, DType.F64]
BOX_ELEMENTS = 1 << 22


@pytest.mark.parametrize("dtype", WIDTHS)
@given(seed=seeds(), size=st.sampled_from([0, 1, 63, 64, 65, 200, 32_767, 32_768, 40_000]))
def test_scan_equals_numpy(dtype: DType, seed: int, size: int):
    """The scan finds what != and flatnonzero find, their steps, and the change of the mixes."""
    old = random_bits(size, dtype.bits_dtype, seed)
    new = old.copy()
    change_bits(new, [0.001, 0.1, 1.0][seed % 3], "any", seed)
    indices, steps = np.empty(size + 1, np.uint32), np.empty(size + 1, old.dtype)
    _end, count, low, high = scan_changes(frozen(old), frozen(new), 0, 1000, indices, steps, 0)
    where = np.flatnonzero(old != new)
    np.testing.assert_array_equal(indices[:count], where)
    np.testing.assert_array_equal(steps[:count], (new - old)[where])
    expected = fingerprint_change(where + 1000, old[where], new[where])
    assert Fingerprint(int(low), int(high)) == expected


def test_scan_stops_when_full_and_goes_on():
    """A scan without room for a chunk says where it stopped; going on from there misses nothing."""
    old = np.zeros(100_000, np.uint16)
    new = np.ones(100_000, np.uint16)
    indices, steps = np.empty(40_000, np.uint32), np.empty(40_000, np.uint16)
    position, count, *_ = scan_changes(frozen(old), frozen(new), 0, 0, indices, steps, 0)
    assert (position, count) == (32_768, 32_768)
    position, count, *_ = scan_changes(frozen(old), frozen(new), position, 0, indices, steps, 0)
    assert indices[0] == 32_768
    assert (position, count) == (65_536, 32_768)


@pytest.mark.parametrize("dtype", WIDTHS)
@given(seed=seeds())
def test_fingerprints_equal_plain_integers(dtype: DType, seed: int):
    """Run, elements and change are sums of the mix as Python integers compute it."""
    bits = random_bits(20, dtype.bits_dtype, seed)
    first = seed << 15
    lanes = [second_reader.mix(first + i, int(b)) for i, b in enumerate(bits)]
    mask = (1 << 64) - 1
    expected = Fingerprint(*(sum(lane) & mask for lane in zip(*lanes, strict=True)))
    assert fingerprint_run(bits, first) == expected
    assert fingerprint_elements(np.arange(first, first + 20), bits) == expected
    other = random_bits(20, dtype.bits_dtype, seed + 1)
    change = fingerprint_change(np.arange(first, first + 20), bits, other)
    assert expected + change == fingerprint_run(other, first)


def test_swapped_and_moved_patterns_have_other_fingerprints():
    """No cheap cancellation: swaps, moves and opposite steps of all near neighbours are seen."""
    bits = np.arange(0, 6000, 3, dtype=np.uint16)
    seen = {fingerprint_run(bits, 0)}
    for i in range(1, 2000):
        swapped, opposite = bits.copy(), bits.copy()
        swapped[[0, i]] = swapped[[i, 0]]
        opposite[[0, i]] += np.array([1, 65535], np.uint16)
        seen |= {fingerprint_run(swapped, 0), fingerprint_run(opposite, 0)}
        seen.add(fingerprint_run(np.roll(bits, i), 0))
    assert len(seen) == 1 + 3 * 1999
    assert len({fp.low for fp in seen}) == len({fp.high for fp in seen}) == len(seen)


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=300))
def test_costs_equal_what_the_encodings_take(gaps: list[int]):
    """Rice bits and LEB128 bytes are counted exactly, before anything is written."""
    indices = (np.cumsum(np.array(gaps) + 1) - 1).astype(np.uint32)
    elements = np.array([BOX_ELEMENTS])
    costs = np.zeros((1, COST_COLUMNS), np.int64)
    ends = frozen(np.array([indices.size]))
    assert index_costs(frozen(indices), ends, frozen(elements), costs) == -1
    k, rice_bits, leb_bytes = costs[0, :3].tolist()
    assert rice_bits == sum((gap >> k) + 1 + k for gap in gaps)
    assert leb_bytes == sum(max((gap.bit_length() + 6) // 7, 1) for gap in gaps)


@given(st.integers(1, 2**40))
def test_integer_logarithm(value: int):
    """log2 in 1/256 is below the true one by at most two units."""
    exact = 256 * float(np.log2(float(value)))
    assert exact - 2 <= log2_fixed(value) <= exact + 1e-6


INDEX_LISTS = st.lists(
    st.one_of(st.integers(0, 300), st.integers(0, 70_000), st.sampled_from([65534, 65535, 65536])),
    min_size=1,
    max_size=60,
)


@pytest.mark.parametrize(
    "encoding", [IndexEncoding.LEB128, IndexEncoding.GAP16, IndexEncoding.RICE]
)
@given(lists=st.lists(INDEX_LISTS, min_size=1, max_size=3), parameter=st.integers(0, 22))
def test_gaps_survive_every_encoding(
    encoding: IndexEncoding, lists: list[list[int]], parameter: int
):
    """CASE R30: any gaps, with any Rice parameter, come back; streams stay within their limits."""
    parts = [np.cumsum(np.array(gaps) + 1) - 1 for gaps in lists]
    parts = [part[part < BOX_ELEMENTS].astype(np.uint32) for part in parts]
    counts = np.array([part.size for part in parts])
    check_gaps(np.concatenate(parts), counts, encoding, parameter)


@pytest.mark.parametrize(
    "encoding", [IndexEncoding.LEB128, IndexEncoding.GAP16, IndexEncoding.RICE]
)
@pytest.mark.parametrize(
    "gap", [0, 127, 128, 16383, 16384, 65534, 65535, 65536, (1 << 21) - 1, 1 << 21, (1 << 21) + 1]
)
def test_gaps_at_the_edges_of_codings(encoding: IndexEncoding, gap: int):
    """CASE R30: gaps at every boundary of every coding, alone and after another."""
    for indices in ([gap], [3, gap + 4], [gap, gap + 1, BOX_ELEMENTS - 1]):
        for k in (0, 1, 7, 16, 22):
            check_gaps(np.array(indices, np.uint32), np.array([len(indices)]), encoding, k)


def check_gaps(
    indices: np.ndarray, counts: np.ndarray, encoding: IndexEncoding, parameter: int
) -> None:
    """Encode and decode with a given encoding, the sizes measured and checked."""
    ends = np.cumsum(counts)
    kinds = np.full(counts.size, int(encoding))
    rice = encoding is IndexEncoding.RICE
    parameters = np.full(counts.size, parameter if rice else 0)
    gaps = np.concatenate(
        [np.diff(part.astype(np.int64), prepend=-1) - 1 for part in np.split(indices, ends[:-1])]
    )
    rice_bytes = 0
    for part in np.split(gaps, ends[:-1]):
        rice_bytes += (int((part >> parameter).sum()) + part.size * (1 + parameter) + 7) // 8
    leb = sum(max((int(g).bit_length() + 6) // 7, 1) for g in gaps)
    wide = sum(max(((int(g) - 65535).bit_length() + 6) // 7, 1) for g in gaps if g >= 65535)
    planes = encoding is IndexEncoding.GAP16
    plan = IndexPlan(
        kinds,
        parameters,
        rice_bytes if rice else 0,
        leb if encoding is IndexEncoding.LEB128 else 0,
        indices.size if planes else 0,
        wide if planes else 0,
    )
    streams = dict(encode_gaps(indices, ends, plan))
    elements = np.full(counts.size, BOX_ELEMENTS)
    limits = gap_stream_limits(counts, elements, kinds, parameters)
    assert all(limits[s][0] <= content.size <= limits[s][1] for s, content in streams.items())
    if RICE_CODES in streams:
        streams[RICE_CODES] = np.append(streams[RICE_CODES], np.zeros(PADDING_BYTES, np.uint8))
    decoded = decode_gaps(streams, counts, elements, kinds, parameters)
    np.testing.assert_array_equal(decoded, indices)


def test_gaps_beyond_a_block_are_found_in_its_neighbour():
    """CASE R30: a gap of 2^28 or 2^32 + 5 lies between blocks, whose starts are 64 bits."""
    layout = Layout.build([TensorEntry("t", DType.U8, ((1 << 32) + (1 << 23),))])
    places = [0, 1 << 28, (1 << 32) + 6]
    blocks = [
        Block(0, Box.run(place, 1), ValueKind.STEPS, np.zeros(1, "u4"), np.ones(1, "u1"), ZERO)
        for place in places
    ]
    data = encode_segment(layout, SegmentIdentity(layout.digest, 0, 1), blocks)
    decoded = decode_segment(layout, data).blocks
    assert [block.box.start[0] for block in decoded] == places


@pytest.mark.parametrize("indices", [[5, 5], [5, 4], [0, 64], [64]])
def test_a_writer_refuses_indices_that_do_not_increase_inside_the_box(indices: list[int]):
    """CASE N11: duplicates, decreasing and outside indices never reach a segment."""
    ends = np.array([len(indices)])
    with pytest.raises(InvalidInputError) as caught:
        plan_indices(np.array(indices, np.uint32), ends, np.array([64]))
    assert caught.value.kind is Kind.ORDER


@pytest.mark.parametrize("dtype", WIDTHS)
@given(seed=seeds(), counts=st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_values_survive_every_encoding(dtype: DType, seed: int, counts: list[int]):
    """Steps and patterns of every width come back, streams within their limits."""
    total = sum(counts)
    values = random_bits(total, dtype.bits_dtype, seed)
    top = 1 << (dtype.element_bits - 1)
    edge = np.array([1, 2 * top - 1, 2, 2 * top - 2, top - 1, top, top + 1], values.dtype)
    values = np.where(random_bits(total, np.dtype("u1"), seed) & 1, values, np.resize(edge, total))
    values[values == 0] = 1
    sizes = np.array(counts)
    for encoding in ENCODINGS.values():
        streams = dict(encoding.encode(values, sizes))
        limits = encoding.limits(dtype.element_bits, sizes)
        assert all(limits[s][0] <= raw.size <= limits[s][1] for s, raw in streams.items())
        decoded = encoding.decode(streams, dtype.element_bits, sizes)
        np.testing.assert_array_equal(decoded, values)


def test_a_step_of_zero_is_refused_by_the_writer():
    """A sparse block that changes nothing somewhere is the caller's mistake."""
    with pytest.raises(InvalidInputError) as caught:
        StepValues().encode(np.array([1, 0], np.uint16), np.array([2]))
    assert caught.value.kind is Kind.ENCODING


@pytest.mark.parametrize("dtype", WIDTHS)
def test_planes_are_bytes_of_little_endian_patterns(dtype: DType):
    """CASE N12: plane p is byte p, least significant first, whatever the machine."""
    values = random_bits(9, dtype.bits_dtype, 3)
    planes = to_planes(values)
    raw = [int(v).to_bytes(dtype.element_bits // 8, "little") for v in values]
    assert [bytes(plane) for plane in planes] == [
        bytes(column) for column in zip(*raw, strict=True)
    ]
    np.testing.assert_array_equal(from_planes(planes), values)


@given(st.data())
def test_locating_equals_numpy(data: st.DataObject):
    """The offsets of a box's indices are those of unravel_index, for any rank."""
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5).map(tuple))
    box = data.draw(boxes(shape))
    indices = np.arange(box.elements, dtype=np.uint32)
    out = np.empty(indices.size, np.int64)
    rows = [frozen(np.array(row, np.int64)) for row in (box.start, box.shape, shape)]
    kernels_apply.locate(frozen(indices), *rows, out)
    np.testing.assert_array_equal(out, box.tensor_offsets(indices, shape))
    grid = np.arange(int(np.prod(shape))).reshape(shape)
    part = tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))
    np.testing.assert_array_equal(out, grid[part].reshape(-1))


@pytest.mark.parametrize("dtype", WIDTHS)
@given(seed=seeds(), absolute=st.booleans())
def test_gather_change_and_scatter_equal_numpy(dtype: DType, seed: int, absolute: bool):
    """Old, new and fingerprint change are numpy's; scatter writes the places named and no other."""
    weights = random_bits(500, dtype.bits_dtype, seed)
    at = np.flatnonzero(random_bits(400, np.dtype("u1"), seed) < 60).astype(np.uint32)
    values = random_bits(at.size, dtype.bits_dtype, seed + 1)
    old, new = np.empty_like(values), np.empty_like(values)
    low, high = kernels_apply.gather_change(
        weights, frozen(at), 50, 7, frozen(values), absolute, old, new
    )
    places = at.astype(np.int64) + 50
    np.testing.assert_array_equal(old, weights[places])
    np.testing.assert_array_equal(new, values if absolute else old + values)
    assert Fingerprint(int(low), int(high)) == fingerprint_change(places + 7, old, new)
    expected = weights.copy()
    expected[places] = new
    kernels_apply.scatter(weights, frozen(at), 50, frozen(new))
    np.testing.assert_array_equal(weights, expected)
    out = np.empty_like(new)
    kernels_apply.gather(weights, frozen(at), 50, out)
    np.testing.assert_array_equal(out, new)


@given(seeds())
def test_merging_equals_a_dictionary(seed: int):
    """Merged changes are what two passes over a dictionary leave."""
    generator = np.random.default_rng(seed)
    sides, model = [], {}
    for _ in range(2):
        at = np.unique(generator.integers(0, 30, 20))
        values = generator.choice(np.array([1, 65535, 9], np.uint16), at.size)
        kinds = generator.integers(0, 3, at.size).astype(np.uint8)
        sides += [at, values, kinds]
        for place, value, kind in zip(at.tolist(), values.tolist(), kinds.tolist(), strict=True):
            before, was = model.get(place, (0, 0))
            value = (before + value) % 65536 if kind == kernels_merge.STEPS else value
            model[place] = (value, max(kind, was) if place in model else kind)
            if model[place] == (0, kernels_merge.STEPS):
                del model[place]
    room = sides[0].size + sides[3].size
    out = np.empty(room, np.int64), np.empty(room, np.uint16), np.empty(room, np.uint8)
    count = kernels_merge.merge_changes(*(frozen(side) for side in sides), *out)
    found = [column[:count].tolist() for column in out]
    assert list(zip(*found, strict=True)) == [(k, *v) for k, v in sorted(model.items())]


@given(st.data())
def test_a_run_is_the_boxes_it_consists_of(data: st.DataObject):
    """The boxes of a run cover its elements once, and are few."""
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))
    total = int(np.prod(shape))
    start = data.draw(st.integers(0, total - 1))
    size = data.draw(st.integers(1, total - start))
    parts = list(run_boxes(Box.run(start, size), shape))
    covered = [
        np.arange(total)
        .reshape(shape)[tuple(slice(s, s + n) for s, n in zip(box.start, box.shape, strict=True))]
        .reshape(-1)
        for box in parts
    ]
    assert np.concatenate(covered).tolist() == list(range(start, start + size))
    assert len(parts) <= max(2 * len(shape) - 1, 1)


def test_overlap_across_segments_is_found():
    """A run and a box of one tensor that share an element are refused, touching ones pass."""
    layout = Layout.build([TensorEntry("t", DType.U8, (6, 6))])
    box = Box((2, 2), (2, 2), flat=False)
    check_disjoint(layout, [(0, box), (0, Box.run(0, 14)), (0, Box.run(22, 4))])
    for run in (Box.run(0, 15), Box.run(21, 1), box):
        with pytest.raises(FormatError) as caught:
            check_disjoint(layout, [(0, box), (0, run)])
        assert caught.value.kind is Kind.BOX


@given(st.binary(min_size=1, max_size=5000), st.integers(1, 9))
def test_stored_forms_come_back(raw: bytes, level: int):
    """What is packed unpacks, never larger than it was."""
    packed = Packer(level).pack(raw * 3)
    assert len(packed) <= 3 * len(raw)
    plain = unpack(memoryview(packed), 3 * len(raw), what="test", padding_bytes=4)
    assert bytes(plain) == raw * 3 + bytes(4)


def test_a_state_of_read_only_and_odd_arrays_has_a_fingerprint():
    """Read-only, mapped or misaligned arrays give the fingerprint of their content."""
    layout = Layout.build([TensorEntry("t", DType.BF16, (33,))])
    bits = random_bits(33, np.dtype("<u2"), 1)
    expected = fingerprint_state(BitState(layout, [bits]))
    odd = np.frombuffer(b"x" + bits.tobytes(), "<u2", offset=1)
    assert not odd.flags.aligned
    assert fingerprint_run(odd, 0) == expected
    strided = np.repeat(bits, 2)[::2]
    assert fingerprint_run(strided, 0) == expected


WARM_THEN_LIST = """
import importlib, pkgutil
import deltastore.format
from deltastore.format import kernels
kernels.warm_up()
for info in pkgutil.iter_modules(deltastore.format.__path__):
    module = importlib.import_module(f"deltastore.format.{info.name}")
    for name, function in vars(module).items():
        py_func = getattr(function, "py_func", None)
        cached = getattr(function, "targetoptions", {}).get("inline") != "always"
        if py_func is not None and cached and py_func.__module__ == module.__name__:
            print(info.name, name, len(function.signatures))
"""


def test_warming_up_compiles_every_kernel():
    """After warm_up, in a fresh process, no kernel is left to compile but inside of others."""
    command = [sys.executable, "-c", WARM_THEN_LIST]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    rows = [line.split() for line in listed]
    assert len(rows) > 20
    inner = {"log2_fixed", "count_gaps", "sampled_planes", "put_leb128", "get_leb128"}
    inner.add("encode_rice")
    assert {name for _module, name, compiled in rows if compiled == "0"} <= inner
