"""The algebra of lineage against torch itself: addresses that real elements would have had."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import torch
from hypothesis import given
from hypothesis import strategies as st

from deltastore.adapters.region_overlap import Strided, count_disjoint, nested, overlap
from deltastore.format.dtypes import DType
from tests.unit.adapters.loader_kit import (
    Engine,
    layout_of,
    memory_of,
    random_state,
    tensors_of,
    traced,
    write,
)

if TYPE_CHECKING:
    from tests.unit.adapters.loader_kit import Weights

SHAPES = [(12,), (4, 6), (2, 3, 4), (6, 1, 4), (2, 2, 3, 2), (1, 24)]


def _move(pick: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """One operation that moves elements and changes none."""
    kinds = ["permute", "slice", "reshape", "select", "unsqueeze", "cat", "stack", "clone", "split"]
    kind = pick.choice(kinds)
    if kind == "permute":
        return tensor.permute(pick.sample(range(tensor.dim()), tensor.dim()))
    if kind == "reshape":
        outer = _divisor(pick, tensor.numel())
        inner = _divisor(pick, tensor.numel() // outer)
        return tensor.reshape(outer, tensor.numel() // outer // inner, inner)
    if kind == "clone":
        return tensor.contiguous().clone()
    if kind == "unsqueeze" or not tensor.dim():
        return tensor.unsqueeze(pick.randint(0, tensor.dim()))
    dim = pick.randrange(tensor.dim())
    size = tensor.shape[dim]
    start = pick.randrange(size)
    if kind == "slice":
        index: list[slice] = [slice(None)] * tensor.dim()
        index[dim] = slice(start, pick.randint(start + 1, size), pick.randint(1, 3))
        return tensor[tuple(index)]
    if kind == "select":
        return tensor.select(dim, start)
    if kind == "split":
        return pick.choice(tensor.split(pick.randint(1, size), dim))
    first, second = tensor.narrow(dim, 0, start), tensor.narrow(dim, start, size - start)
    if kind == "stack" and first.shape == second.shape:
        return torch.stack([second, first], pick.randint(0, tensor.dim()))
    return torch.cat([second, first], dim)


def _divisor(pick: random.Random, number: int) -> int:
    return pick.choice([n for n in range(1, number + 1) if number % n == 0])


@given(shape=st.sampled_from(SHAPES), seed=st.integers(0, 1 << 30), moves=st.integers(1, 8))
def test_any_sequence_of_moves_is_written_as_a_load_would(
    shape: tuple[int, ...], seed: int, moves: int
) -> None:
    """CASE R8: whatever is called a placement is, element for element, what the loader copies."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        pick = random.Random(seed)
        for _ in range(moves):
            tensor = _move(pick, tensor)
        return tensor

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            engine.a.data.copy_(moved(weight))

    target = torch.zeros(moved(torch.zeros(shape)).shape, dtype=torch.int16)
    engine = Engine(load, a=target)
    layout = layout_of({"w": shape}, w=DType.I16)
    trace = traced(engine, layout)
    for reason in trace.dense_only.values():
        assert reason.startswith(("a reshape of", "a stepped slice of", "placed in cuts"))
    if trace.dense_only:
        return
    state = random_state(layout)
    engine.load_weights(tensors_of(state))
    expected = memory_of(engine)
    engine.a.data.zero_()
    write(trace, state)
    assert memory_of(engine) == expected


@given(seed=st.integers(0, 1 << 30))
def test_scratch_memory_is_read_back_as_it_was_written(seed: int) -> None:
    """CASE R8: parts collected in the loader's own memory keep their origin, in any view of it."""
    pick = random.Random(seed)
    parts = pick.sample(range(4), 4)
    order = pick.sample(range(3), 3)
    turned = pick.random() < 0.5

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        scratch = torch.zeros(4, 3, 5, dtype=torch.int16).permute(order)
        for name, weight in weights:
            axis = order.index(0)
            scratch.select(axis, parts[int(name)]).copy_(
                weight if order.index(1) < order.index(2) else weight.t()
            )
        found = scratch.transpose(0, 2) if turned else scratch
        engine.a.data.copy_(found.contiguous())

    shape = [(4, 3, 5)[k] for k in order]
    engine = Engine(load, a=torch.zeros(shape[::-1] if turned else shape, dtype=torch.int16))
    names = {str(number): (3, 5) for number in range(4)}
    layout = layout_of(names, **dict.fromkeys(names, DType.I16))
    trace = traced(engine, layout)
    assert trace.dense_only == {}
    state = random_state(layout)
    engine.load_weights(tensors_of(state))
    expected = memory_of(engine)
    engine.a.data.zero_()
    write(trace, state)
    assert memory_of(engine) == expected


@st.composite
def _strided(draw: st.DrawFn) -> Strided:
    """A set of a few numbers with nested strides."""
    sizes, strides, reach = [], [], 1
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.integers(2, 4))
        stride = draw(st.integers(reach, reach + 6))
        sizes.append(size)
        strides.append(stride)
        reach += (size - 1) * stride
    found = nested(draw(st.integers(0, 20)), sizes, strides)
    assert found is not None
    return found


@given(first=_strided(), second=_strided())
def test_two_strided_sets_share_what_their_numbers_share(first: Strided, second: Strided) -> None:
    """The descent through strides says what walking all numbers says."""
    shared = _numbers_of(first) & _numbers_of(second)
    assert overlap(first, second) == bool(shared)
    assert overlap(second, first) == bool(shared)
    assert len(_numbers_of(first)) == first.elements
    assert max(_numbers_of(first)) + 1 == first.end


@given(sets=st.lists(_strided(), max_size=5))
def test_disjoint_sets_are_counted_and_others_are_not(sets: list[Strided]) -> None:
    """Equal sets count once; any other overlap has no count."""
    distinct = [_numbers_of(one) for one in set(sets)]
    union = set().union(*distinct)
    apart = sum(map(len, distinct)) == len(union)
    assert count_disjoint(sets) == (len(union) if apart else None)


def _numbers_of(one: Strided) -> set[int]:
    offsets = itertools.product(*(range(n) for n in one.sizes))
    return {one.offset + sum(i * s for i, s in zip(at, one.strides, strict=True)) for at in offsets}
