"""Whether strided views share bytes, against the set of the bytes of each."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from deltastore.adapters.memory_overlap import MemoryView, find_overlap, overlaps_itself


def bytes_of(view: MemoryView) -> list[int]:
    """Every byte of every element, with repetitions."""
    steps = [
        [i * stride for i in range(size)]
        for size, stride in zip(view.shape, view.strides_bytes, strict=True)
    ]
    return [
        view.address + sum(offsets) + byte
        for offsets in itertools.product(*steps)
        for byte in range(view.item_bytes)
    ]


@st.composite
def views(draw: st.DrawFn) -> MemoryView:
    """A view of up to three dimensions near the start of one of two devices."""
    item = draw(st.sampled_from([1, 2, 4]))
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(2, 4)) for _ in range(rank))
    strides = tuple(draw(st.integers(0, 12)) * item for _ in range(rank))
    return MemoryView(
        draw(st.sampled_from(["cpu", "cpu", "gpu"])),
        1000 + item * draw(st.integers(0, 60)),
        shape,
        strides,
        item,
    )


@given(views())
def test_self_overlap_is_found_exactly(view: MemoryView) -> None:
    """CASE N4: a view overlaps itself iff two of its elements are in one place."""
    strides = [stride // view.item_bytes for stride in view.strides_bytes]
    elements = bytes_of(view)[:: view.item_bytes]
    assert overlaps_itself(view.shape, strides) is (len(set(elements)) < len(elements))


@given(
    st.lists(
        views().filter(lambda v: not overlaps_itself(v.shape, v.strides_bytes)),
        max_size=6,
    )
)
def test_overlap_is_found_exactly(found: list[MemoryView]) -> None:
    """CASE N5: two views are named iff they share a byte of one device, and then those two do."""
    places = [{(view.device, byte) for byte in bytes_of(view)} for view in found]
    touching = {
        (a, b) for a, b in itertools.permutations(range(len(found)), 2) if places[a] & places[b]
    }
    pair = find_overlap(found)
    assert (pair in touching) if touching else (pair is None)
