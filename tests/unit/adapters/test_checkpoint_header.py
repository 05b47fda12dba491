"""Headers of safetensors files: hostile bytes meet the exact error, honest ones the library."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from deltastore.errors import FormatError, Kind
from deltastore.format.checkpoint_file import (
    MAX_HEADER_BYTES,
    build_header,
    header_bytes,
    parse_header,
)
from deltastore.format.dtypes import DType
from deltastore.format.layout import TensorEntry

if TYPE_CHECKING:
    from pathlib import Path


def file_of(header: str | bytes, data: bytes = b"") -> bytes:
    """A file of that header text and data."""
    text = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(text)) + text + data


def row(dtype: str = "U8", shape: str = "[2]", offsets: str = "[0,2]") -> str:
    """One entry of a header."""
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


# name: (bytes, kind, whether the safetensors library refuses it as well)
HOSTILE: dict[str, tuple[bytes, Kind, bool]] = {
    "empty file": (b"", Kind.TRUNCATED, True),
    "seven bytes": (b"\x02\0\0\0\0\0\0", Kind.TRUNCATED, True),
    "length without header": (struct.pack("<Q", 2), Kind.TRUNCATED, True),
    "length above the limit": (
        struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}",
        Kind.LIMIT,
        True,
    ),
    "largest length": (b"\xff" * 8 + b"{}", Kind.LIMIT, True),
    "empty header": (file_of(""), Kind.MAGIC, True),
    "list": (file_of("[]"), Kind.MAGIC, True),
    "space before": (file_of(" {}"), Kind.MAGIC, False),
    "byte order mark": (file_of(b"\xef\xbb\xbf{}"), Kind.MAGIC, True),
    "cut JSON": (file_of("{"), Kind.FIELD, True),
    "two documents": (file_of("{}{}"), Kind.FIELD, True),
    "no UTF-8": (file_of(b'{"\xff":1}'), Kind.FIELD, True),
    "lone surrogate": (file_of('{"\\ud800":' + row() + "}", b"ab"), Kind.FIELD, True),
    "nested": (file_of('{"a":' * 100_000), Kind.FIELD, True),
    "null entry": (file_of('{"a":null}'), Kind.FIELD, True),
    "list entry": (file_of('{"a":["U8",[2],[0,2]]}', b"ab"), Kind.FIELD, False),
    "missing field": (file_of('{"a":{"dtype":"U8","shape":[2]}}', b"ab"), Kind.FIELD, True),
    "further field": (
        file_of('{"a":{"x":1,"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', b"ab"),
        Kind.FIELD,
        False,
    ),
    "name twice": (file_of(f'{{"a":{row()},"a":{row()}}}', b"ab"), Kind.FIELD, False),
    "metadata number": (file_of('{"__metadata__":{"a":1}}'), Kind.FIELD, True),
    "metadata list": (file_of('{"__metadata__":["a"]}'), Kind.FIELD, True),
    "shape of floats": (file_of(f'{{"a":{row(shape="[2.0]")}}}', b"ab"), Kind.FIELD, True),
    "shape of booleans": (
        file_of(f'{{"a":{row(shape="[true]", offsets="[0,1]")}}}', b"a"),
        Kind.FIELD,
        True,
    ),
    "shape not finite": (file_of(f'{{"a":{row(shape="[NaN]")}}}', b"ab"), Kind.FIELD, True),
    "shape negative": (file_of(f'{{"a":{row(shape="[-2]")}}}', b"ab"), Kind.FIELD, True),
    "shape above 64 bits": (
        file_of(f'{{"a":{row(shape="[18446744073709551616]")}}}', b"ab"),
        Kind.FIELD,
        True,
    ),
    "shape overflows": (
        file_of(f'{{"a":{row(shape="[9223372036854775808,4,0]", offsets="[0,0]")}}}'),
        Kind.LIMIT,
        True,
    ),
    "thousands of digits": (
        file_of(f'{{"a":{row(shape="[" + "9" * 5000 + "]")}}}', b"ab"),
        Kind.FIELD,
        True,
    ),
    "three offsets": (file_of(f'{{"a":{row(offsets="[0,1,2]")}}}', b"ab"), Kind.FIELD, True),
    "offsets reversed": (file_of(f'{{"a":{row(offsets="[2,0]")}}}', b"ab"), Kind.FIELD, True),
    "offsets too short": (file_of(f'{{"a":{row(offsets="[0,1]")}}}', b"a"), Kind.FIELD, True),
    "unknown dtype": (file_of(f'{{"a":{row("Q8")}}}', b"ab"), Kind.ENCODING, True),
    "four-bit dtype": (file_of(f'{{"a":{row("F4", "[4]")}}}', b"ab"), Kind.ENCODING, False),
    "hole at the start": (file_of(f'{{"a":{row(offsets="[1,3]")}}}', b"abc"), Kind.ORDER, True),
    "hole between": (
        file_of(f'{{"a":{row()},"b":{row(offsets="[3,5]")}}}', b"abcde"),
        Kind.ORDER,
        True,
    ),
    "overlap": (file_of(f'{{"a":{row()},"b":{row(offsets="[1,3]")}}}', b"abc"), Kind.ORDER, True),
    "same bytes twice": (file_of(f'{{"a":{row()},"b":{row()}}}', b"ab"), Kind.ORDER, True),
    "data cut": (file_of(f'{{"a":{row()}}}', b"a"), Kind.TRUNCATED, True),
    "byte after the data": (file_of(f'{{"a":{row()}}}', b"abc"), Kind.TRAILING, True),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(name: str) -> None:
    """Every way to be wrong is one FormatError kind, and never less strict than the library."""
    body, kind, library_refuses = HOSTILE[name]
    with pytest.raises(FormatError) as caught:
        parse_header(body)
    assert caught.value.kind is kind
    try:
        safetensors.deserialize(body)
        refused = False
    except safetensors.SafetensorError:
        refused = True
    assert refused is library_refuses


def test_literal_bytes() -> None:
    """The header of a known file reads to known places."""
    text = '{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2],"data_offsets":[2,6]}'
    body = file_of(text + ',"a":{"dtype":"I8","shape":[1,2],"data_offsets":[0,2]}}  ', b"xyzxyz")
    header = parse_header(body)
    assert list(header.tensors) == ["b", "a"]
    assert [t.name for t in header.data_order()] == ["a", "b"]
    assert header.metadata == {"format": "pt"}
    assert header.tensors["a"].shape == (1, 2)
    assert header.data_start == len(body) - 6
    assert header.file_bytes == len(body)
    start, end = header.file_range("b")
    assert body[start:end] == b"zxyz"


def test_header_is_enough() -> None:
    """A remote file is read by its first 8 bytes, header and size; the data is not needed."""
    body = file_of(f'{{"a":{row()}}}', b"ab")
    length = header_bytes(body[:8])
    header = parse_header(body[:length], file_bytes=len(body))
    assert header.file_range("a") == (length, length + 2)
    with pytest.raises(FormatError) as caught:
        parse_header(body[:length], file_bytes=len(body) - 1)
    assert caught.value.kind is Kind.TRUNCATED


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    """Names, dtypes, shapes and bytes of a file by the library, 0-d and empty tensors included."""
    arrays = {
        "scalar": np.array(1.5, np.float32),
        "empty": np.zeros((0, 3), np.float16),
        "buffer": np.arange(376, 390, dtype=np.int64),
        "flags": np.array([[True, False]]),
    }
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata={"who": "library"})
    body = path.read_bytes()
    header = parse_header(body)
    assert header.metadata == {"who": "library"}
    for name, array in arrays.items():
        start, end = header.file_range(name)
        assert header.tensors[name].shape == array.shape
        assert body[start:end] == array.tobytes()


def test_library_reads_what_is_built() -> None:
    """The library reads a built file; names keep their order and every tensor is aligned."""
    entries = [
        TensorEntry("odd", DType.I8, (3,)),
        TensorEntry("é", DType.BF16, (1,)),
        TensorEntry("long", DType.I64, (2,)),
        TensorEntry("pair", DType.C64, (1,)),
        TensorEntry("none", DType.F32, (0,)),
    ]
    header = build_header(entries, {"format": "pt"})
    data = {t.name: bytes([i + 1]) * t.size_bytes for i, t in enumerate(header.data_order())}
    body = header.raw + b"".join(data[t.name] for t in header.data_order())
    found = dict(safetensors.deserialize(body))
    assert {name: bytes(value["data"]) for name, value in found.items()} == data
    assert list(header.tensors) == [e.name for e in entries]
    assert parse_header(body) == header
    for tensor in header.tensors.values():
        width = tensor.dtype.element_bits // 8
        assert header.file_range(tensor.name)[0] % width == 0


@pytest.mark.parametrize("names", [["a", "a"], ["__metadata__"]])
def test_built_names_are_unique(names: list[str]) -> None:
    """A header that would hold a name twice, or the metadata's, is not built."""
    with pytest.raises(FormatError) as caught:
        build_header([TensorEntry(n, DType.U8, (1,)) for n in names])
    assert caught.value.kind is Kind.FIELD
