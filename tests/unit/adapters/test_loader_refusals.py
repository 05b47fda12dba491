"""What loaders do to tensors that ends their lineage: dense-only with the reason, never a guess."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from deltastore.adapters.loader_memory import digest_memory, mix_chunks
from deltastore.adapters.loader_trace import trace_loader, verify_bytes
from deltastore.errors import IntegrityError, InvalidInputError, Kind
from deltastore.format.dtypes import DType
from tests.unit.adapters.loader_kit import (
    BF16,
    Engine,
    layout_of,
    memory_of,
    random_state,
    reasons,
    tensors_of,
    traced,
    zeros,
)

if TYPE_CHECKING:
    from tests.unit.adapters.loader_kit import Weights

LAYOUT = layout_of({"w": (4, 3)})


def _scale(a: torch.Tensor, w: torch.Tensor) -> None:
    a.data.copy_(w * 2)


def _scale_copy(a: torch.Tensor, w: torch.Tensor) -> None:
    changed = w.clone()
    changed.mul_(2)
    a.data.copy_(changed)


def _scale_transposed(a: torch.Tensor, w: torch.Tensor) -> None:
    a.data.copy_((w.t() + 0).contiguous().t())


def _narrow(a: torch.Tensor, w: torch.Tensor) -> None:
    a.data.copy_(w.float().to(BF16))


def _after(a: torch.Tensor, w: torch.Tensor) -> None:
    """As Mamba2's loader does with A_log."""
    a.data.copy_(w)
    a.data.copy_(-torch.exp(a.float()))


def _in_place(a: torch.Tensor, w: torch.Tensor) -> None:
    a.data.copy_(w)
    a.data.mul_(0.5)


def _part_in_place(a: torch.Tensor, w: torch.Tensor) -> None:
    a.data.copy_(w)
    a.data[1:2].clamp_(0)


def _scatter(a: torch.Tensor, w: torch.Tensor) -> None:
    a.data[torch.tensor([1, 0, 3, 2])] = w


def _cleared(a: torch.Tensor, w: torch.Tensor) -> None:
    a.data.copy_(w)
    a.data[1:].zero_()


def _twice(a: torch.Tensor, w: torch.Tensor) -> None:
    a.data.copy_(w)
    a.data[:1].copy_(w[1:2])


def _data(a: torch.Tensor, w: torch.Tensor) -> None:
    a.data = w


def _sum(a: torch.Tensor, w: torch.Tensor) -> None:
    a.data.copy_(w.flip(0).sum(1, keepdim=True))


def _scratch_scaled(a: torch.Tensor, w: torch.Tensor) -> None:
    scratch = torch.empty(4, 3, dtype=BF16)
    scratch.copy_(w)
    scratch.neg_()
    a.data.copy_(scratch)


def _source_cleared_in_part(a: torch.Tensor, w: torch.Tensor) -> None:
    w[:2].zero_()
    a.data.copy_(w)


def _other_width(a: torch.Tensor, w: torch.Tensor) -> None:
    a.data.view(torch.uint8).copy_(w.view(torch.uint8))


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (_scale, "computed by mul"),
        (_scale_copy, "changed in place by mul_"),
        (_scale_transposed, "computed by add"),
        (_narrow, "cast from float32 to bfloat16"),
        (_after, "computed by neg"),
        (_in_place, "changed in place by mul_"),
        (_part_in_place, "changed in place by clamp_"),
        (_scatter, "changed in place by index_put_"),
        (_cleared, "cleared after it was written"),
        (_twice, "written over by another write"),
        (_data, "bound to new memory"),
        (_sum, "computed by sum"),
        (_scratch_scaled, "changed in place by neg_"),
        (_source_cleared_in_part, "cleared in part"),
        (_other_width, "elements seen as elements of another width"),
    ],
)
def test_a_changed_value_makes_the_tensor_dense_only(one: object, reason: str) -> None:
    """CASE R5: scaled, cast, mutated, written twice: no placement, and the reason is told."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            one(engine.a, weight)  # type: ignore[operator]

    engine = Engine(load, a=torch.ones(4, 3, dtype=BF16))
    trace = traced(engine, LAYOUT)
    assert reasons(trace, LAYOUT) == {"w": reason}
    assert trace.placements == ()
    assert any("a" in reach.parameters for reach in trace.reaches)


def test_a_cast_on_the_way_is_dense_only() -> None:
    """CASE R10: an FP32 tensor in a BF16 parameter, an integer in a float: never by value."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for name, weight in weights:
            getattr(engine, name).data.copy_(weight)

    layout = layout_of({"a": (3,), "b": (3,), "c": (3,)}, a=DType.F32, b=DType.I64, c=DType.BF16)
    engine = Engine(load, a=zeros(3), b=zeros(3), c=zeros(3, dtype=torch.float16))
    assert reasons(traced(engine, layout), layout) == {
        "a": "cast from float32 to bfloat16",
        "b": "cast from int64 to bfloat16",
        "c": "cast from bfloat16 to float16",
    }


def test_two_sources_in_one_place_are_both_dense_only() -> None:
    """The loader's order of writing is no placement: neither of the two is trusted."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            engine.a.data.copy_(weight)

    layout = layout_of({"v": (3,), "w": (3,)})
    assert set(reasons(traced(Engine(load, a=zeros(3)), layout), layout)) == {"v", "w"}


def test_a_mixture_of_tensors_makes_all_of_them_dense_only() -> None:
    """A product of two tensors, and a cat of two dtypes, name every source."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        found = dict(weights)
        engine.a.data.copy_(found["v"] * found["w"])
        engine.b.data.copy_(torch.cat([found["x"], found["y"]]))

    layout = layout_of({"v": (3,), "w": (3,), "x": (3,), "y": (3,)}, y=DType.F32)
    engine = Engine(load, a=zeros(3), b=zeros(6, dtype=torch.float32))
    assert set(reasons(traced(engine, layout), layout)) == {"v", "w", "x", "y"}


@pytest.mark.parametrize("question", ["item", "equal", "bool"])
def test_a_source_that_is_read_by_value_is_dense_only(question: str) -> None:
    """A loader that looks at values may do otherwise with the next version's."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            if question == "item":
                weight[0, 0].item()
            elif question == "equal":
                assert torch.equal(weight, engine.a)
            elif weight.isnan().any():
                raise ValueError("NaN")
            engine.a.data.copy_(weight)

    found = reasons(traced(Engine(load, a=zeros(4, 3)), LAYOUT), LAYOUT)["w"]
    assert found.startswith("read by value")


def test_overlapping_cuts_of_one_tensor_are_dense_only() -> None:
    """Fingerprints of regions add up only if no element is in two different ones."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            engine.a.data.copy_(weight)
            engine.b.data.copy_(weight[1:3])

    engine = Engine(load, a=zeros(4, 3), b=zeros(2, 3))
    assert reasons(traced(engine, LAYOUT), LAYOUT) == {"w": "placed in cuts that overlap"}


def test_memory_that_is_no_parameter_is_not_written() -> None:
    """A weight that goes into an attribute is dense-only, and the attribute is not touched."""
    cache = zeros(4, 3)

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            cache.copy_(weight)

    trace = traced(Engine(load), LAYOUT)
    assert reasons(trace, LAYOUT) == {"w": "goes into memory that is no parameter"}
    assert not cache.any()


def test_a_parameter_that_is_replaced_is_put_back() -> None:
    """Rebinding by attribute, registration or `data` is found, undone, and told."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        found = dict(weights)
        engine.a = torch.nn.Parameter(found["a"], requires_grad=False)
        engine.register_parameter("b", torch.nn.Parameter(zeros(3), requires_grad=False))
        engine.b.data.copy_(found["b"])
        engine.c.data = found["c"].t()
        engine.d.set_(found["d"])

    layout = layout_of({"a": (3,), "b": (3,), "c": (2, 3), "d": (3,)})
    engine = Engine(load, a=zeros(3), b=zeros(3), c=zeros(3, 2), d=zeros(3))
    before = {name: (id(p), p.data_ptr(), p.shape) for name, p in engine.named_parameters()}
    found = reasons(traced(engine, layout), layout)
    after = {name: (id(p), p.data_ptr(), p.shape) for name, p in engine.named_parameters()}
    assert after == before
    assert set(found) == {"a", "b", "c", "d"}


def test_what_a_loader_keeps_for_itself_is_taken_out() -> None:
    """A weight kept in an attribute, a new parameter or a buffer: nothing of the trace stays."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        found = dict(weights)
        engine.__dict__["kept"] = found["a"].t()
        engine.late = torch.nn.Parameter(zeros(3), requires_grad=False)
        engine.late.data.copy_(found["b"])
        engine.register_buffer("more", found["c"])

    layout = layout_of({"a": (2, 3), "b": (3,), "c": (3,)})
    engine = Engine(load)
    before = set(vars(engine))
    assert set(reasons(traced(engine, layout), layout)) == {"a", "b", "c"}
    assert set(vars(engine)) == before
    assert dict(engine.named_parameters()) == dict(engine.named_buffers()) == {}


def test_a_source_that_is_cleared_is_a_constant() -> None:
    """As gpt-oss does on all ranks but the first: the tensor is unused there, its place padding."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            weight.zero_()
            engine.a.data.copy_(weight)

    trace = traced(Engine(load, a=zeros(4, 3)), LAYOUT)
    assert trace.dense_only == {}
    assert trace.unused == (0,)
    assert [reach.padding for reach in trace.reaches] == [True]


def test_a_write_behind_torch_fails_the_start() -> None:
    """A loader that writes through numpy is not seen: the digests of the memory tell."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            engine.a.data.copy_(weight)
        engine.hidden.view(torch.int16).numpy()[2] = 5

    engine = Engine(load, a=zeros(4, 3))
    engine.register_buffer("hidden", zeros(3), persistent=False)
    with pytest.raises(IntegrityError, match="'hidden'") as caught:
        trace_loader(engine, engine.load_weights, LAYOUT)
    assert caught.value.kind is Kind.DIGEST


def test_a_loader_that_raises_is_an_error_that_names_the_tensor() -> None:
    """CASE R9: an unexpected name in the layout stops the start; nothing is skipped."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for name, weight in weights:
            engine.get_parameter(name).data.copy_(weight)

    layout = layout_of({"a": (3,), "strange": (3,), "b": (3,)})
    engine = Engine(load, a=zeros(3), b=zeros(3))
    before = memory_of(engine)
    with pytest.raises(InvalidInputError, match=r"'strange'.*AttributeError") as caught:
        trace_loader(engine, engine.load_weights, layout)
    assert caught.value.kind is Kind.LOADER
    assert memory_of(engine) == before


def test_a_shape_that_does_not_fit_is_the_loaders_error() -> None:
    """CASE R9: a copy that could not be made for real is not recorded as one."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            engine.a.data.copy_(weight)

    with pytest.raises(InvalidInputError, match="'w'"):
        traced(Engine(load, a=zeros(4, 2)), LAYOUT)


def test_values_that_are_needed_outside_torch_are_an_error() -> None:
    """A loader that takes a weight to numpy cannot be traced, and the tensor is named."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            engine.a.data.copy_(torch.from_numpy(weight.view(torch.int16).numpy()))

    with pytest.raises(InvalidInputError, match="'w'"):
        traced(Engine(load, a=zeros(4, 3)), LAYOUT)


def test_repacked_weights_are_found_by_their_bytes() -> None:
    """CASE R5, R8: same shape, other order after loading: all but the repacked one is placed."""

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for name, weight in weights:
            getattr(engine, name).data.copy_(weight)

    layout = layout_of({"a": (4, 3), "b": (4, 3), "c": (4, 3)})
    engine = Engine(load, a=zeros(4, 3), b=zeros(4, 3), c=zeros(4, 3, dtype=torch.float32))
    state = random_state(layout)
    engine.load_weights(tensors_of(state))
    trace = traced(engine, layout)
    assert verify_bytes(trace, layout, state.arrays.__getitem__).dense_only == {}
    engine.b.data.copy_(engine.b.data.flip(0).clone())
    verified = verify_bytes(trace, layout, state.arrays.__getitem__)
    assert reasons(verified, layout) == {"b": "repacked"}
    assert [p.parameter for p in verified.placements] == ["a", "c"]
    engine.c.data.view(torch.int32)[0, 0] ^= 1
    verified = verify_bytes(trace, layout, state.arrays.__getitem__)
    assert reasons(verified, layout) == {"b": "repacked", "c": "repacked"}


def test_large_placements_are_compared_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last element of a strided view of several chunks is compared too."""
    from deltastore.adapters import loader_verify

    monkeypatch.setattr(loader_verify, "CHUNK_ELEMENTS", 10)

    def load(engine: torch.nn.Module, weights: Weights) -> None:
        for _, weight in weights:
            engine.a.data.copy_(weight.permute(2, 0, 1))

    layout = layout_of({"w": (3, 5, 7)})
    engine = Engine(load, a=zeros(7, 3, 5))
    state = random_state(layout)
    engine.load_weights(tensors_of(state))
    trace = traced(engine, layout)
    for element in (0, 52, 104):
        assert not verify_bytes(trace, layout, state.arrays.__getitem__).dense_only
        state.arrays[0][element] ^= 1
        assert verify_bytes(trace, layout, state.arrays.__getitem__).dense_only
        state.arrays[0][element] ^= 1


def test_digests_see_every_byte() -> None:
    """Both digests of memory change with any bit, whatever its place, and with an order."""
    numbers = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 4099, np.uint8))
    view = numbers[3:1000]  # a digest is of the whole storage

    def both() -> tuple[bytes, bytes]:
        return digest_memory(view), mix_chunks(numbers.split(1024))

    first = both()
    assert both() == first
    seen = {first[0], first[1]}
    for place in (0, 7, 8, 1023, 1024, 4095, 4098):
        for bit in (0, 7):
            numbers[place] ^= 1 << bit
            seen.update(both())
            numbers[place] ^= 1 << bit
    numbers[:16] = numbers[:16].roll(8)
    seen.update(both())
    assert len(seen) == 2 + 2 * 14 + 2
