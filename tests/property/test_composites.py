"""A composite of any deltas, cut in any way, leads where they lead one after the other."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltastore.chain import compose as compose_module
from deltastore.chain.diff import dense_block, diff_box
from deltastore.chain.lattice import Span, wanted_composites
from deltastore.format.block import Block, ValueKind
from deltastore.format.box import Box
from deltastore.maintenance import merge as merge_module
from deltastore.maintenance.composites import write_composite
from deltastore.maintenance.settings import MaintenanceSettings
from deltastore.repository.way import survey
from deltastore.testing.strategies import layouts, states, updates
from tests.unit.chain_life.kit import Chain

GRID = 32
"""Elements of a cell in this test: tensors of a thousand elements have many."""


@st.composite
def cuts(draw, shape):
    """Boxes that partition a tensor: whole, flat pieces, or slabs along one dimension."""
    elements = int(np.prod(shape, dtype=np.int64))
    style = draw(st.sampled_from(["whole", "grid", "flat", "slabs"]))
    if style == "slabs" and shape:
        d = draw(st.integers(0, len(shape) - 1))
        size = draw(st.integers(1, shape[d]))
        zero = (0,) * len(shape)
        return [
            Box(
                (*zero[:d], low, *zero[d + 1 :]),
                (*shape[:d], min(size, shape[d] - low), *shape[d + 1 :]),
                flat=False,
            )
            for low in range(0, shape[d], size)
        ]
    size = {"whole": elements, "grid": GRID}.get(style) or draw(st.integers(1, elements))
    return [Box.run(low, min(size, elements - low)) for low in range(0, elements, size)]


@st.composite
def deltas(draw, before, after):
    """Blocks between two states, of every kind, in up to three segments in any order."""
    blocks = []
    for tensor, spec in enumerate(before.layout.tensors):
        if not spec.elements:
            continue
        for box in draw(cuts(spec.element_shape)):
            places = box.offsets_of(None, spec.element_shape)
            old, new = before.arrays[tensor][places], after.arrays[tensor][places]
            kind = draw(st.sampled_from(["as found", "as found", "dense", "bits"]))
            block = diff_box(before.layout, tensor, box, old, new)
            if kind == "dense":
                block = dense_block(before.layout, tensor, box, new, old)
            elif kind == "bits" and block is not None and block.kind is ValueKind.STEPS:
                values = new[block.indices]
                change = block.fingerprint_change
                block = Block(tensor, box, ValueKind.BITS, block.indices, values, change)
            if block is not None:
                blocks.append(block)
    parts = draw(st.integers(1, 3))
    return [blocks[i::parts] for i in range(parts)]


@given(data=st.data())
def test_composite_of_any_deltas_equals_replay(data):
    """CASE C5, LAW 1: composites of deltas in any boxes, kinds and segments equal replay."""
    layout = data.draw(layouts(max_tensors=3))
    state = data.draw(states(layout))
    versions = data.draw(st.integers(2, 4))
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(compose_module, "MAX_BOX_ELEMENTS", GRID),
        mock.patch.object(merge_module, "MAX_BOX_ELEMENTS", GRID),
    ):
        chain = Chain(Path(folder), start=state)
        for _ in range(versions):
            before = chain.states[chain.head.core.version]
            chain.state = data.draw(updates(before))
            chain.commit(data.draw(deltas(before, chain.state)))
        found = survey(chain.run, versions, lowest=0)
        settings = MaintenanceSettings(segment_bytes=data.draw(st.sampled_from([1, 200, 1 << 20])))
        made = write_composite(
            chain.run, found, Span(0, versions), clock=chain.clock, settings=settings
        )
        assert made is not None
        report = chain.replay(versions).report
        assert (report.composites, report.plans) == (1, 1)


@given(
    head=st.integers(0, 400),
    anchors=st.sets(st.integers(0, 6).map(lambda n: n * 64), max_size=3),
    full=st.sets(st.integers(1, 400), max_size=3),
)
def test_every_join_is_bounded_by_the_lattice(head, anchors, full):
    """With the wanted composites any HEAD is one whole state, two composites, seven deltas away."""
    starts = {0, *(v for v in anchors | full if v <= head)}
    spans = wanted_composites(head, lowest=0, anchors=anchors, full={0, *full})
    best = dict.fromkeys(starts, (0, 0))
    for version in range(1, head + 1):
        if version in full:
            continue
        ways = [best.get(version)]
        if version - 1 in best:
            composites, deltas = best[version - 1]
            ways.append((composites, deltas + 1))
        for span in spans:
            if span.version == version and span.base in best:
                composites, deltas = best[span.base]
                ways.append((composites + 1, deltas))
        known = [way for way in ways if way is not None]
        best[version] = min(known, key=lambda way: 10 * way[0] + 9 * way[1])
    composites, deltas = best[head]
    assert composites <= 2
    assert deltas <= 7
    assert all(not any(s.base < v <= s.version for v in full) for s in spans)
