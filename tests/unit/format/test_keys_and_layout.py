"""Keys and layouts have one form, and it reads back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import FormatError, InvalidInputError, Kind
from deltastore.format.canonical import canonical_json
from deltastore.format.dtypes import DType
from deltastore.format.keys import Hint, KeyKind, RunKeys, parse_key
from deltastore.format.layout import MAX_ELEMENTS, Layout, TensorEntry
from deltastore.ids import MAX_VERSION

SHA = "0f" * 32
names = st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True).filter(lambda n: n.strip("."))
versions = st.integers(0, MAX_VERSION)


@given(run=names, version=versions, base=versions, name=names, token=names)
def test_keys_parse_back(run, version, base, name, token):
    """Formatting and parsing are inverse for every kind of key."""
    keys = RunKeys(run)
    made = {
        keys.run_json: (KeyKind.RUN, None, None),
        keys.layout(SHA): (KeyKind.LAYOUT, None, None),
        keys.segment(version, 3, SHA): (KeyKind.SEGMENT, version, None),
        keys.version(version): (KeyKind.VERSION, version, None),
        keys.anchor(version): (KeyKind.ANCHOR, version, None),
        keys.anchor_file(version, token, name): (KeyKind.ANCHOR_FILE, version, None),
        keys.composite(base, version): (KeyKind.COMPOSITE, version, base),
        keys.composite_segment(base, version, token, 0, SHA): (
            KeyKind.COMPOSITE_SEGMENT,
            version,
            base,
        ),
        keys.rollout(version, name, token, SHA): (KeyKind.ROLLOUT, version, None),
        keys.hint(Hint.FLOOR): (KeyKind.HINT, None, None),
    }
    for key, expected in made.items():
        parsed = parse_key(key)
        assert (parsed.kind, parsed.version, parsed.base_version) == expected
        assert parsed.run == run
        assert key.startswith(keys.root)


@given(a=versions, b=versions)
def test_lexical_order_is_version_order(a, b):
    """Sorting keys sorts versions."""
    keys = RunKeys("r")
    assert (keys.version(a) < keys.version(b)) == (a < b)


@pytest.mark.parametrize(
    "key",
    ["", "r", "r/", "/run.json", "r/versions/1.json", "r/versions/00000000011.json", "r/x/run.json",
     "r/hints/other", "r/deltas/0000000001/0-ab.seg", "r/../run.json/x"],
)  # fmt: skip
def test_other_keys_are_refused(key):
    """A key that no rule makes is a FormatError(key)."""
    with pytest.raises(FormatError) as err:
        parse_key(key)
    assert err.value.kind is Kind.KEY


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ü", "x" * 129, "a\n"])
def test_bad_run_names(name):
    """A run name that could leave its prefix is refused."""
    with pytest.raises(InvalidInputError):
        RunKeys(name)


entries = st.lists(
    st.builds(
        TensorEntry,
        name=st.from_regex(r"[a-z.]{1,12}", fullmatch=True),
        dtype=st.sampled_from(list(DType)),
        shape=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    ),
    unique_by=lambda entry: entry.name,
    max_size=6,
)


@given(rows=entries)
def test_layout_round_trip(rows):
    """A layout reads back equal; offsets are contiguous; complex items are two elements."""
    layout = Layout.build(rows)
    again = Layout.from_bytes(layout.canonical_bytes())
    assert again == layout
    assert [t.first_element for t in again.tensors] == [t.first_element for t in layout.tensors]
    at = 0
    for spec in layout.tensors:
        assert spec.first_element == at
        at += spec.elements
        assert spec.size_bytes == spec.dtype.item_bytes * (
            spec.elements // spec.dtype.elements_per_item
        )
    assert layout.elements == at


def test_alias_resolves_to_the_stored_tensor():
    """CASE R6: both names of a tied tensor stand for one place."""
    layout = Layout.build([TensorEntry("embed", DType.BF16, (4, 2), ("lm_head",))])
    assert layout.position("embed") == layout.position("lm_head") == 0
    assert layout.position("other") is None


@pytest.mark.parametrize(
    "rows",
    [
        [TensorEntry("a", DType.BF16, (1,)), TensorEntry("a", DType.BF16, (1,))],
        [TensorEntry("a", DType.BF16, (1,)), TensorEntry("b", DType.BF16, (1,), ("a",))],
        [TensorEntry("", DType.BF16, (1,))],
        [TensorEntry("a\x00", DType.BF16, (1,))],
        [TensorEntry("a" * 513, DType.BF16, (1,))],
        [TensorEntry("a", DType.BF16, (-1,))],
        [TensorEntry("a", DType.BF16, (1,) * 17)],
        [TensorEntry("a", DType.BF16, (1 << 47, 4))],
    ],
)
def test_impossible_layouts_are_refused(rows):
    """Duplicate names, bad names, bad shapes and too many elements are refused."""
    with pytest.raises(InvalidInputError):
        Layout.build(rows)


def _document(**change):
    return canonical_json(
        {"format": "deltastore-layout/1", "tensors": [["a", "BF16", [2], []]], **change}
    )


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{}", _document(format="deltastore-layout/2"), _document(tensors={}),
        _document(tensors=[["a", "BF17", [2], []]]), _document(tensors=[["a", "BF16", [True], []]]),
        _document(tensors=[["a", "BF16", [-1], []]]), _document(tensors=[["a", "BF16", 2, []]]),
        _document(tensors=[["a", "BF16", [2], ["c", "b"]]]), _document(tensors=[["a", "BF16"]]),
        _document(tensors=[["a", "BF16", [2], []]] * 2), _document(more=1),
        _document().replace(b",", b", "), _document()[:-1], _document() + b"\n",
    ],
)  # fmt: skip
def test_hostile_layouts(text):
    """Whatever is wrong with a layout table, it is a FormatError."""
    with pytest.raises(FormatError):
        Layout.from_bytes(text)


def test_huge_shape_product_does_not_wrap():
    """A shape whose product overflows 64 bits is a limit, not a small tensor."""
    with pytest.raises(FormatError):
        Layout.from_bytes(_document(tensors=[["a", "BF16", [1 << 40, 1 << 40], []]]))


def test_every_layout_that_can_be_made_can_be_read():
    """A dimension no reader takes is refused where the layout is made, also of an empty tensor."""
    widest = Layout.build([TensorEntry("t", DType.U8, (0, MAX_ELEMENTS))])
    assert Layout.from_bytes(widest.canonical_bytes()) == widest
    with pytest.raises(InvalidInputError) as caught:
        Layout.build([TensorEntry("t", DType.U8, (0, MAX_ELEMENTS + 1))])
    assert caught.value.kind is Kind.TENSOR_SHAPE
