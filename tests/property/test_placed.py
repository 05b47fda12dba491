"""However an engine's ranks hold the weights, an update makes of them what it makes on the host."""

from __future__ import annotations

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from deltastore.adapters import live_memory, placed_target
from deltastore.chain.apply import apply_blocks
from deltastore.chain.compose import compose
from deltastore.testing.strategies import layouts, states, updates
from tests.property.test_composites import deltas
from tests.unit.adapters.placed_kit import SPLITS, STORAGES, Engine, Plan, point, update_of

SMALL_PIECE = 7
"""Elements of a piece in these tests: a tensor has many, of dense blocks and on devices."""


@st.composite
def plans(draw, layout):
    """How an engine holds the tensors of a layout."""
    count = len(layout)
    return Plan(
        draw(st.integers(1, 3)),
        draw(st.lists(st.sampled_from(SPLITS), min_size=count, max_size=count)),
        draw(st.lists(st.sampled_from(STORAGES), min_size=count, max_size=count)),
    )


def _in_order(parts):
    """Blocks of one tensor one after the other, as a segment has them."""
    return sorted((block for part in parts for block in part), key=lambda block: block.tensor)


class OnDevice(placed_target.PlacedTarget):
    """A target whose memory is all driven through torch, in small pieces."""

    def __init__(self, *args, **kwargs):
        with mock.patch.object(placed_target, "on_host", return_value=False):
            super().__init__(*args, **kwargs)
        for held in self._held:
            held.memory.piece_elements = SMALL_PIECE


@given(data=st.data())
def test_an_update_of_placed_weights_equals_one_on_the_host(data):
    """CASE R8, N4, LAW 1: random layouts, splits, storages and deltas of all kinds, composites
    whose blocks are right only in sum: the union of the ranks is the host's state, bit for bit;
    on kernels and through torch alike."""
    layout = data.draw(layouts(max_tensors=2))
    base = data.draw(states(layout))
    middle = data.draw(updates(base))
    new = data.draw(updates(middle))
    first = _in_order(data.draw(deltas(base, middle)))
    second = _in_order(data.draw(deltas(middle, new)))
    blocks = compose(layout, first, second) if data.draw(st.booleans()) else first
    expected = base.copy()
    apply_blocks(expected, blocks)
    plan = data.draw(plans(layout))
    make = data.draw(st.sampled_from([placed_target.PlacedTarget, OnDevice]))
    with (
        mock.patch.object(live_memory.HostMemory, "run_elements", SMALL_PIECE),
    ):
        engine = Engine.start(plan, base, make=make)
        found = engine.activate(update_of(base, expected, blocks))
        assert found == [point(1, expected)] * plan.ranks
        held = engine.held()
        for tensor in _unheld(plan, layout):
            held.arrays[tensor][:] = expected.arrays[tensor]
        assert held.equals(expected)
        assert engine.run(lambda rank: engine.appliers[rank].check_whole()) == [None] * plan.ranks


def _unheld(plan, layout):
    return set.intersection(*(set(plan.unused(layout, rank)) for rank in range(plan.ranks)))


@given(data=st.data())
def test_a_failure_anywhere_leaves_the_base(data):
    """CASE R2: any write of any part failing on any rank, before, after or half way through a
    piece: every rank is at the base, bit for bit, and the same update is then activated."""
    layout = data.draw(layouts(max_tensors=2))
    base = data.draw(states(layout))
    new = data.draw(updates(base))
    blocks = _in_order(data.draw(deltas(base, new)))
    expected = base.copy()
    apply_blocks(expected, blocks)
    plan = data.draw(plans(layout))
    make = data.draw(st.sampled_from([placed_target.PlacedTarget, OnDevice]))
    with (
        mock.patch.object(live_memory.HostMemory, "run_elements", SMALL_PIECE),
    ):
        engine = Engine.start(plan, base, make=make)
        update = update_of(base, expected, blocks)
        left = data.draw(st.integers(0, 12))
        rank = data.draw(st.integers(0, plan.ranks - 1))
        late = data.draw(st.booleans())
        count = [0]
        kinds = [live_memory.HostMemory, live_memory.DeviceMemory]
        originals = [kind.write for kind in kinds]

        def failing(original):
            def write(self, piece, journal):
                mine = any(held.memory is self for held in engine.targets[rank]._held)
                count[0] += mine
                if mine and count[0] == left + 1 and not late:
                    raise OSError("injected")
                original(self, piece, journal)
                if mine and count[0] == left + 1:
                    raise OSError("injected")

            return write

        with (
            mock.patch.object(kinds[0], "write", failing(originals[0])),
            mock.patch.object(kinds[1], "write", failing(originals[1])),
        ):
            outcomes = engine.activate(update)
        if count[0] <= left:
            assert outcomes == [point(1, expected)] * plan.ranks
            return
        assert {getattr(one, "kind", None) for one in outcomes} == {"rolled_back"}, outcomes
        assert engine.held().equals(base)
        assert not any(applier.poisoned for applier in engine.appliers)
        assert engine.activate(update) == [point(1, expected)] * plan.ranks
        held = engine.held()
        for tensor in _unheld(plan, layout):
            held.arrays[tensor][:] = expected.arrays[tensor]
        assert held.equals(expected)
