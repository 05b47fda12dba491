"""Host weights are read and written by kernels without bounds checks: bounds are checked here."""

from __future__ import annotations

import numpy as np
import pytest

from deltastore.errors import InvalidInputError
from deltastore.format.box import Box
from deltastore.format.layout import Layout
from deltastore.pipeline.host import HostTarget
from tests.unit.pipeline.harness import ENTRIES, random_state

LAYOUT = Layout.build(ENTRIES)
BOXES = [Box.run(0, 1536), Box.run(100, 50), Box((3, 4), (5, 6), flat=False)]


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("whole", [True, False])
def test_gather_and_scatter_equal_plain_indexing(box, whole):
    """What the kernels read and write is what numpy's own indexing reads and writes."""
    state = random_state(LAYOUT, 4)
    target, tensor = HostTarget(state), 1
    rng = np.random.default_rng(1)
    chosen = np.flatnonzero(rng.random(box.elements) < 0.3).astype(np.uint32)
    indices = None if whole else chosen
    places = box.offsets_of(indices, LAYOUT.tensors[tensor].element_shape)
    expected = state.arrays[tensor].copy()
    assert np.array_equal(target.gather(tensor, box, indices), expected[places])
    new = rng.integers(0, 1 << 16, places.size).astype(np.uint16)
    expected[places] = new
    target.scatter(tensor, box, indices, new)
    assert np.array_equal(state.arrays[tensor], expected)


@pytest.mark.parametrize(
    ("box", "indices"),
    [
        (Box.run(1530, 7), [0]),
        (Box.run(0, 10), [3, 10]),
        (Box((47, 0), (2, 3), flat=False), [0]),
        (Box((0, 0), (2, 3), flat=False), [6]),
    ],
)
def test_places_beyond_a_tensor_are_refused(box, indices):
    """CASE R29: an index or a box outside its tensor is an error before anything is touched."""
    state = random_state(LAYOUT, 4)
    before = state.copy()
    at = np.array(indices, np.uint32)
    for call in (
        lambda: HostTarget(state).gather(1, box, at),
        lambda: HostTarget(state).scatter(1, box, at, np.zeros(at.size, np.uint16)),
    ):
        with pytest.raises(InvalidInputError):
            call()
    assert state.equals(before)


def test_patterns_of_another_width_are_refused():
    """Patterns that are not of the tensor's width, or too few, are not written."""
    target = HostTarget(random_state(LAYOUT, 4))
    at = np.array([1, 2], np.uint32)
    for bits in (np.zeros(2, np.uint32), np.zeros(1, np.uint16)):
        with pytest.raises(InvalidInputError):
            target.scatter(1, Box.run(0, 10), at, bits)
