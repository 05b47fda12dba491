"""Tests that only meet well-behaved weights miss NaN, -0 and 0-d tensors: these draw all of them.

Hypothesis strategies for layouts, states, and what an update may do to a state. Patterns come from
a seeded generator, so that large states are quick to draw; shapes, dtypes and densities shrink.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from deltastore.format.box import Box
from deltastore.format.dtypes import Bits, DType
from deltastore.format.layout import BitState, Layout, TensorEntry

if TYPE_CHECKING:
    from collections.abc import Iterable

DENSITIES = (0.0, 0.0001, 0.01, 0.05, 0.3, 0.5, 0.9, 1.0)
STEP_STYLES = ("one", "small", "any", "flip", "clustered")
_MAX_DIMENSION = 40


def layouts(
    *, max_tensors: int = 5, dtypes: Iterable[DType] = tuple(DType)
) -> st.SearchStrategy[Layout]:
    """Layouts of up to `max_tensors` tensors: scalars, empty ones, and up to three dimensions."""
    shapes = st.lists(st.integers(0, _MAX_DIMENSION), max_size=3).map(tuple)
    entries = st.lists(
        st.tuples(st.sampled_from(list(dtypes)), shapes), min_size=1, max_size=max_tensors
    )
    return entries.map(
        lambda rows: Layout.build(
            TensorEntry(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(rows)
        )
    )


def states(layout: Layout) -> st.SearchStrategy[BitState]:
    """States of a layout: random patterns, so every exponent, NaN and signed zero occurs."""
    return seeds().map(
        lambda seed: BitState(
            layout,
            [random_bits(spec.elements, spec.dtype.bits_dtype, seed + i)
             for i, spec in enumerate(layout.tensors)],
        )
    )  # fmt: skip


@st.composite
def updates(draw: st.DrawFn, base: BitState) -> BitState:
    """What an update may make of a state: per tensor another density and another style of step."""
    new = base.copy()
    for bits in new.arrays:
        density = draw(st.sampled_from(DENSITIES))
        style = draw(st.sampled_from(STEP_STYLES))
        change_bits(bits, density, style, draw(seeds()))
    return new


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box, not empty, inside a tensor of that shape, which is not empty either."""
    start = tuple(draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(draw(st.integers(1, n - s)) for n, s in zip(shape, start, strict=True))
    return Box(start, sizes, flat=False)


def seeds() -> st.SearchStrategy[int]:
    """Seeds of numpy generators."""
    return st.integers(0, 2**32 - 1)


def random_bits(count: int, dtype: np.dtype[np.unsignedinteger], seed: int) -> Bits:
    """`count` uniformly random patterns."""
    raw = np.random.default_rng(seed).bytes(count * dtype.itemsize)
    return np.frombuffer(raw, dtype).copy()


def change_bits(bits: Bits, density: float, style: str, seed: int) -> None:
    """Change about that share of the patterns in place, by that style of step."""
    generator = np.random.default_rng(seed)
    if style == "clustered":
        length = math.ceil(bits.size * density)
        first = int(generator.integers(0, max(bits.size - length, 0) + 1))
        where = np.arange(first, min(first + length, bits.size))
    else:
        where = np.flatnonzero(generator.random(bits.size) < density)
    top = 1 << (bits.itemsize * 8 - 1)
    steps = random_bits(where.size, bits.dtype, seed ^ 1)
    if style in {"one", "clustered"}:
        steps = np.where(steps & 1, 1, np.iinfo(bits.dtype).max).astype(bits.dtype)
    elif style == "small":
        steps = (steps % 7 - 3).astype(bits.dtype)
    elif style == "flip":
        steps = np.full(where.size, top, bits.dtype)
    bits[where] += steps
