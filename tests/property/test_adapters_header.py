"""Whatever a header says, it is refused or means what the safetensors library says it means."""

from __future__ import annotations

import safetensors
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import FormatError
from deltastore.format.checkpoint_file import build_header, parse_header
from deltastore.format.dtypes import DType
from deltastore.format.layout import TensorEntry

ENTRIES = st.lists(
    st.builds(
        TensorEntry,
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6),
        st.sampled_from(DType),
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
    ),
    max_size=4,
    unique_by=lambda e: e.name,
).filter(lambda entries: all(e.name != "__metadata__" for e in entries))
METADATA = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.text("ab\n"))


def body_of(entries: list[TensorEntry], metadata: dict[str, str]) -> bytes:
    """A whole file with recognisable data."""
    header = build_header(entries, metadata)
    size = header.file_bytes - header.data_start
    return header.raw + bytes(i % 251 for i in range(size))


@given(ENTRIES, METADATA)
def test_built_headers_read_back(entries: list[TensorEntry], metadata: dict[str, str]) -> None:
    """Building and parsing are inverses, and the library sees the same tensors."""
    body = body_of(entries, metadata)
    header = parse_header(body)
    assert header == build_header(entries, metadata)
    assert [(t.name, t.dtype, t.shape) for t in header.tensors.values()] == [
        (e.name, e.dtype, e.shape) for e in entries
    ]
    require_same_meaning(body)


@given(ENTRIES, st.data())
def test_damaged_files_are_refused_or_mean_the_same(
    entries: list[TensorEntry], data: st.DataObject
) -> None:
    """Any few bytes changed, dropped or added: FormatError, or the library agrees."""
    body = bytearray(body_of(entries, {"format": "pt"}))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        cut = data.draw(st.integers(0, 2))
        body[at : at + cut] = data.draw(st.binary(max_size=2) | st.sampled_from([b"0", b"]", b" "]))
    try:
        parse_header(bytes(body))
    except FormatError:
        return
    require_same_meaning(bytes(body))


def require_same_meaning(body: bytes) -> None:
    """Ours and the library's reading of one file are equal."""
    header = parse_header(body)
    ours = {
        name: (t.dtype.value, list(t.shape), body[slice(*header.file_range(name))])
        for name, t in header.tensors.items()
    }
    theirs = {
        name: (value["dtype"], value["shape"], bytes(value["data"]))
        for name, value in safetensors.deserialize(body)
    }
    assert ours == theirs
