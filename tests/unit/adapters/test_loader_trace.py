"""What loaders do to tensors that remain copies: each ends where a real load would put it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from deltastore.adapters.torch_tensors import integer_view, torch_dtype
from deltastore.format.dtypes import DType
from deltastore.format.layout import Layout, TensorEntry
from tests.unit.adapters.loader_kit import (
    BF16,
    Engine,
    layout_of,
    random_state,
    require_same_as_loading,
    tensors_of,
    traced,
    write,
    zeros,
)

if TYPE_CHECKING:
    from tests.unit.adapters.loader_kit import Weights


def test_a_fused_projection_is_three_placements() -> None:
    """q, k and v narrow into one parameter; one element each is written where a reload puts it."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        places = {"q": (0, 8), "k": (8, 4), "v": (12, 4)}
        for name, weight in weights:
            start, rows = places[name]
            engine.qkv.data.narrow(0, start, rows).copy_(weight)

    layout = layout_of({"q": (8, 6), "k": (4, 6), "v": (4, 6)})
    trace = require_same_as_loading(Engine(load, qkv=zeros(16, 6)), layout)
    assert [(p.region.tensor, p.parameter) for p in trace.placements] == [
        (0, "qkv"),
        (1, "qkv"),
        (2, "qkv"),
    ]


def _chunk(engine: torch.nn.Module, weight: torch.Tensor) -> None:
    first, second = weight.chunk(2, dim=-1)
    engine.a.data[:6].copy_(second)
    engine.a.data[6:].copy_(first)


def _unbind(engine: torch.nn.Module, weight: torch.Tensor) -> None:
    for number, row in enumerate(weight.unbind(1)):
        engine.a.data.view(-1).narrow(0, number * 6, 6).copy_(row)


def _transpose(engine: torch.nn.Module, weight: torch.Tensor) -> None:
    engine.b.data.copy_(weight.t())


def _transpose_copy(engine: torch.nn.Module, weight: torch.Tensor) -> None:
    engine.b.data.copy_(weight.t().contiguous().clone().to(BF16))


def _steps(engine: torch.nn.Module, weight: torch.Tensor) -> None:
    engine.a.data[:, :].view(6, 8)[:, ::2].copy_(weight[:, 1::2])
    engine.a.data[:, :].view(6, 8)[:, 1::2].copy_(weight[:, ::2])


def _heads(engine: torch.nn.Module, weight: torch.Tensor) -> None:
    """As rotary weights are reordered: pairs become halves."""
    halves = weight.view(3, 2, 2, 4).transpose(1, 2).reshape(12, 4)
    engine.a.data.copy_(halves)


def _slice_of_reordered(engine: torch.nn.Module, weight: torch.Tensor) -> None:
    reordered = weight.view(3, 2, 8).transpose(0, 1).reshape(6, 8)
    engine.a.data.view(6, 8)[1:6].copy_(reordered[1:6])
    engine.a.data.view(6, 8)[:1].copy_(reordered.narrow(0, 0, 1))


def _cat(engine: torch.nn.Module, weight: torch.Tensor) -> None:
    engine.a.data.copy_(torch.cat([weight[3:], weight[:3]], 0).view(12, 4))


def _stack(engine: torch.nn.Module, weight: torch.Tensor) -> None:
    stacked = torch.stack([weight[:3], weight[3:]], 1)
    engine.a.data.copy_(stacked.permute(1, 0, 2).reshape(12, 4))


def _scratch(engine: torch.nn.Module, weight: torch.Tensor) -> None:
    collected = torch.empty(2, 6, 4, dtype=weight.dtype)
    for number in range(2):
        collected[1 - number].copy_(weight[:, 4 * number : 4 * number + 4])
    engine.a.data.copy_(collected.view(12, 4))


def _like(engine: torch.nn.Module, weight: torch.Tensor) -> None:
    collected = torch.zeros_like(weight)
    collected[:3] = weight[3:]
    collected[3:] = weight[:3]
    engine.a.data.view(6, 8).copy_(collected)


def _picked(engine: torch.nn.Module, weight: torch.Tensor) -> None:
    rows = torch.tensor([5, 0, 1, 2, 4, 3])
    engine.a.data.view(6, 8).copy_(weight[rows])


def _masked(engine: torch.nn.Module, weight: torch.Tensor) -> None:
    mask = torch.tensor([True, False, True, False, True, False])
    engine.a.data.view(6, 8)[:3].copy_(weight[mask])
    engine.a.data.view(6, 8)[3:].copy_(weight[~mask])


def _setitem(engine: torch.nn.Module, weight: torch.Tensor) -> None:
    engine.a.data[...] = weight.view(12, 4)


def _many(engine: torch.nn.Module, weight: torch.Tensor) -> None:
    torch._foreach_copy_([engine.a.data[:6], engine.a.data[6:]], [weight[:, :4], weight[:, 4:]])


def _as_integers(engine: torch.nn.Module, weight: torch.Tensor) -> None:
    engine.a.data.view(torch.int16).copy_(weight.view(torch.int16).view(12, 4))


def _unsqueezed(engine: torch.nn.Module, weight: torch.Tensor) -> None:
    deep = weight.unsqueeze(1).flatten(1).unflatten(1, (2, 4)).squeeze()
    engine.a.data.copy_(deep.movedim(0, 1).flatten(0, 1))


@pytest.mark.parametrize(
    "one",
    [
        _chunk,
        _unbind,
        _transpose,
        _transpose_copy,
        _steps,
        _heads,
        _slice_of_reordered,
        _cat,
        _stack,
        _scratch,
        _like,
        _picked,
        _masked,
        _setitem,
        _many,
        _as_integers,
        _unsqueezed,
    ],
)
def test_moved_elements_keep_their_lineage(one: object) -> None:
    """CASE R5, R8: loaders that chunk, cat, transpose, step, reorder: bitwise as a full reload."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            one(engine, weight)  # type: ignore[operator]

    parameters = {"b": zeros(8, 6)} if "transpose" in one.__name__ else {"a": zeros(12, 4)}  # type: ignore[attr-defined]
    require_same_as_loading(Engine(load, **parameters), layout_of({"w": (6, 8)}))


def test_expert_stacks_are_placed_expert_by_expert() -> None:
    """CASE R8: gate, up and down of every expert, each transposed, in two stacked parameters."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for name, weight in weights:
            number, part = int(name[1]), name[2:]
            if part == "down":
                engine.w2.data[number].copy_(weight)
            else:
                half = engine.w13.data[number].chunk(2, dim=0)[part == "up"]
                half.copy_(weight.to("cpu").t())

    shapes = {f"e{e}{part}": (6, 4) for e in range(3) for part in ("gate", "up", "down")}
    trace = require_same_as_loading(
        Engine(load, w13=zeros(3, 8, 6), w2=zeros(3, 6, 4)), layout_of(shapes)
    )
    assert len(trace.placements) == 9


def test_one_stacked_tensor_becomes_many_parameters() -> None:
    """CASE R8: a fused expert tensor of the checkpoint is cut into the parameters of experts."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            for number, expert in enumerate(weight.transpose(-1, -2)):
                gate, up = expert.chunk(2, dim=0)
                getattr(engine, f"gate{number}").data.copy_(gate)
                getattr(engine, f"up{number}").data.copy_(up)

    parameters = {f"{part}{e}": zeros(3, 5) for e in range(4) for part in ("gate", "up")}
    trace = require_same_as_loading(Engine(load, **parameters), layout_of({"w": (4, 5, 6)}))
    assert sum(p.region.elements for p in trace.placements) == 120


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
def test_an_exact_widening_is_a_placement(dtype: DType) -> None:
    """CASE R10: a 16-bit tensor in an FP32 parameter is written as the widening of its bits."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for name, weight in weights:
            engine.a.data[int(name)].copy_(weight.float() if name == "0" else weight)

    layout = layout_of({"0": (5,), "1": (5,)}, **{"0": dtype, "1": dtype})
    engine = Engine(load, a=zeros(2, 5, dtype=torch.float32))
    trace = traced(engine, layout)
    assert [p.widened for p in trace.placements] == [True, True]
    state = random_state(layout)
    for bits in state.arrays:
        bits &= 0xBBFF if dtype is DType.F16 else 0xFFFF  # a load makes FP16 NaN quiet
    engine.load_weights(tensors_of(state))
    expected = engine.a.detach().clone()
    integer_view(engine.a.detach()).fill_(0)
    write(trace, state)
    assert torch.equal(integer_view(engine.a.detach()), integer_view(expected))


@pytest.mark.parametrize("dtype", list(DType))
def test_every_dtype_is_copied_as_its_bits(dtype: DType) -> None:
    """CASE R10: integers, booleans, 8-bit floats and complex numbers arrive in all their bits."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            engine.a.data.copy_(weight[1:].t())

    layout = layout_of({"w": (4, 3)}, w=dtype)
    engine = Engine(load, a=torch.zeros(3, 3, dtype=torch_dtype(dtype)))
    trace = traced(engine, layout)
    assert not trace.dense_only
    state = random_state(layout)
    if dtype is DType.BOOL:
        state.arrays[0] &= 1
    write(trace, state)
    expected = state.arrays[0].reshape(4, 3, -1)[1:].swapaxes(0, 1)
    live = integer_view(engine.a.detach()).numpy().reshape(3, 3, -1)
    assert np.array_equal(live.view(expected.dtype), expected)


def test_scalars_and_empty_tensors_are_placed() -> None:
    """CASE N7: a 0-d tensor is one element; one without elements is nothing, and not missing."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for name, weight in weights:
            getattr(engine, name).data.copy_(weight.view(getattr(engine, name).shape))

    layout = layout_of({"a": (), "b": (0, 3), "c": (1,)})
    engine = Engine(load, a=zeros(1), b=zeros(0, 3), c=zeros())
    trace = require_same_as_loading(engine, layout)
    assert [p.region.sizes for p in trace.placements] == [(), ()]
    assert trace.unused == ()


def test_one_tensor_in_two_parameters_is_two_equal_regions() -> None:
    """Copies of one tensor (a head that is not tied in the engine) are both written."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            engine.embed.data.copy_(weight)
            engine.head.data.copy_(weight)

    trace = require_same_as_loading(
        Engine(load, embed=zeros(4, 3), head=zeros(4, 3)), layout_of({"w": (4, 3)})
    )
    assert trace.placements[0].region == trace.placements[1].region


def test_repeated_elements_are_written_to_all_their_places() -> None:
    """A vector that is expanded over heads is placed once per head."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            engine.a.data.copy_(weight)

    trace = require_same_as_loading(Engine(load, a=zeros(3, 5)), layout_of({"w": (5,)}))
    assert len({p.live.data_ptr() for p in trace.placements}) == 3


def test_padding_is_recorded_and_no_placement() -> None:
    """Rows beyond the vocabulary, and padding around a tensor, are the loader's constants."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for name, weight in weights:
            if name == "w":
                engine.a.data[:5].copy_(weight)
                engine.a.data[5:].fill_(0)
            else:
                engine.b.data.copy_(torch.nn.functional.pad(weight, (1, 2)))

    layout = layout_of({"w": (5, 3), "v": (2, 4)})
    engine = Engine(load, a=zeros(8, 3), b=zeros(2, 7))
    trace = traced(engine, layout)
    assert [r.place.elements for r in trace.reaches if r.padding and r.place] == [18]
    state = random_state(layout)
    write(trace, state)
    live = integer_view(engine.b.detach())
    assert live[:, 0].tolist() == [0, 0]
    assert np.array_equal(live[:, 1:5].numpy().view(np.uint16).reshape(-1), state.arrays[1])


def test_tied_names_are_offered_once_unless_the_loader_needs_them() -> None:
    """CASE R6: a loader that knows only the alias still gets the tensor, under that name."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        found = dict(weights)
        engine.a.data.copy_(found["head"])

    layout = Layout.build([TensorEntry("embed", DType.BF16, (3, 2), ("head",))])
    trace = traced(Engine(load, a=zeros(3, 2)), layout)
    assert [(p.region.tensor, p.region.sizes) for p in trace.placements] == [(0, (6,))]
