"""Which entries serve which tensors, and what is refused by name."""

from __future__ import annotations

import pytest

from deltastore.errors import InvalidInputError, Kind
from deltastore.format.coverage import match_entries
from deltastore.format.dtypes import DType
from deltastore.format.layout import Layout, TensorEntry


def entry(name: str, *aliases: str, dtype: DType = DType.BF16, rows: int = 4) -> TensorEntry:
    """A matrix of that name."""
    return TensorEntry(name, dtype, (rows, 2), aliases)


TIED = Layout.build([entry("embed", "head"), entry("norm")])
APART = Layout.build([entry("embed"), entry("head"), entry("norm")])


def refusal(layout: Layout, entries: list[TensorEntry]) -> InvalidInputError:
    """What matching raises."""
    with pytest.raises(InvalidInputError) as caught:
        match_entries(layout, entries)
    return caught.value


def test_order_does_not_matter() -> None:
    """Entries are found by name, wherever they stand."""
    assert match_entries(APART, [entry("norm"), entry("head"), entry("embed")]) == [
        (2,),
        (1,),
        (0,),
    ]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([entry("embed"), entry("norm")], [(0,), (1,)]),
        ([entry("head"), entry("norm")], [(0,), (1,)]),
        ([entry("head", "embed"), entry("norm")], [(0,), (1,)]),
        ([entry("head"), entry("norm"), entry("embed")], [(0, 2), (1,)]),
    ],
    ids=["first name", "second name", "tied", "both names"],
)
def test_either_or_both_names_of_a_tied_tensor(
    entries: list[TensorEntry], expected: list[tuple[int, ...]]
) -> None:
    """CASE R6: a source may offer either name of a tied tensor, both as one, or both apart."""
    assert match_entries(TIED, entries) == expected


def test_a_tied_source_serves_an_untied_layout() -> None:
    """What a source ties has the same bits under both names, so it serves both tensors."""
    assert match_entries(APART, [entry("embed", "head"), entry("norm")]) == [(0,), (0,), (1,)]


def test_unmatched_names_are_listed() -> None:
    """CASE R9: missing and unknown names are errors that list them, never skipped."""
    error = refusal(APART, [entry("embed"), entry("model.head"), entry("norm")])
    assert error.kind is Kind.TENSOR_NAMES
    assert "1 missing: 'head'" in error.message
    assert "1 not in the layout: 'model.head'" in error.message


def test_many_names_are_counted() -> None:
    """A long list is cut, and says how many more there are."""
    layout = Layout.build([entry(f"layer.{i}") for i in range(20)])
    error = refusal(layout, [])
    assert "20 missing" in error.message
    assert "and 12 more" in error.message


def test_a_name_offered_twice_is_refused() -> None:
    """Two entries of one name would leave it to chance which of them travels."""
    error = refusal(TIED, [entry("embed", "head"), entry("head"), entry("norm")])
    assert error.kind is Kind.TENSOR_NAMES
    assert "offered twice: 'head'" in error.message


def test_reshaped_tensors_are_listed() -> None:
    """CASE R9: a tensor of another shape is refused with both shapes, even of equal size."""
    error = refusal(TIED, [TensorEntry("embed", DType.BF16, (2, 4)), entry("norm")])
    assert error.kind is Kind.TENSOR_SHAPE
    assert "embed [2, 4] instead of [4, 2]" in error.message


def test_recast_tensors_are_listed() -> None:
    """CASE R10: nothing is cast on the way; another dtype of the same width is refused too."""
    error = refusal(TIED, [entry("embed", dtype=DType.F16), entry("norm")])
    assert error.kind is Kind.TENSOR_DTYPE
    assert "embed F16 instead of BF16" in error.message
