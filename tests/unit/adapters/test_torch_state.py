"""Modules as source and target: every bit travels, and every write lands in the live storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from deltastore.adapters.safetensors_dir import checkpoint_layout, load_state, scan_checkpoint
from deltastore.adapters.torch_state import ModuleSource, ModuleTarget
from deltastore.errors import IntegrityError, InvalidInputError, Kind
from deltastore.format.box import Box
from deltastore.format.dtypes import DType
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.mixing import fingerprint_state
from deltastore.testing.checkpoints import next_checkpoint, tiny_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.format.dtypes import Bits

WIDE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def layout_of(state: Any, **options: Any) -> Layout:
    """The layout of what a source offers."""
    return Layout.build(ModuleSource(state, **options).entries())


def state_of(source: ModuleSource, layout: Layout) -> BitState:
    """The boxes of a source put together; every element must come exactly once, in order."""
    parts: list[list[Bits]] = [[] for _ in layout.tensors]
    last = 0
    for box in source.boxes(layout):
        assert box.tensor >= last
        last = box.tensor
        assert box.box.flat
        assert box.box.start[0] == sum(p.size for p in parts[box.tensor])
        parts[box.tensor].append(box.bits.copy())
    return BitState(
        layout,
        [
            np.concatenate([np.empty(0, spec.dtype.bits_dtype), *found])
            for spec, found in zip(layout.tensors, parts, strict=True)
        ],
    )


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's elements in row-major order, through torch alone."""
    dense = tensor.detach().contiguous().reshape(-1)
    return bytes(dense.view(torch.uint8).numpy()) if dense.numel() else b""


def model_of(folder: Path, dtype: torch.dtype) -> Any:
    """A transformers model of the checkpoint."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def odd_tensors() -> dict[str, torch.Tensor]:
    """One tensor of every storage shape and of every kind of dtype there is."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    fused = random(12, 10).to(torch.bfloat16)
    return {
        "plain": random(5, 7).to(torch.bfloat16),
        "transposed": random(6, 4).T,
        "permuted": random(2, 3, 4).to(torch.float16).permute(2, 0, 1),
        "columns.left": fused[:, :3],
        "columns.right": fused[:, 3:],
        "every_second": random(9)[::2],
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "positions": torch.arange(380, 390),
        "flags": torch.tensor([True, False, True]),
        "wide_counts": torch.arange(4).to(torch.uint64),
        "short_counts": torch.arange(40_000, 40_003, dtype=torch.int32).to(torch.uint16),
        "eighths": random(8).to(torch.float8_e4m3fn),
        "complex": torch.complex(random(3, 2), random(3, 2)),
        "complex_transposed": torch.complex(random(3, 2), random(3, 2)).T,
        "double": random(3).double(),
    }


class TestSource:
    """A module as a source of weights."""

    def test_bits_of_every_kind_of_tensor(self) -> None:
        """CASE N4, N7, N9, R10: all storages and dtypes are read bit for bit, uncast."""
        tensors = odd_tensors()
        state = state_of(ModuleSource(tensors), layout_of(tensors))
        for name, tensor in tensors.items():
            assert state[name].tobytes() == bytes_of(tensor), name

    def test_large_tensors_come_in_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Runs are bounded for contiguous tensors and cover the others row by row."""
        monkeypatch.setattr("deltastore.adapters.torch_state.MAX_BOX_ELEMENTS", 6)
        tensors = odd_tensors()
        layout = layout_of(tensors)
        state = state_of(ModuleSource(tensors), layout)
        for name, tensor in tensors.items():
            assert state[name].tobytes() == bytes_of(tensor), name
        sizes = [b.bits.size for b in ModuleSource(tensors).boxes(layout) if b.tensor == 0]
        assert sizes == [6, 6, 6, 6, 6, 5]

    def test_all_patterns_of_a_half_travel(self) -> None:
        """CASE R4: all 65,536 patterns of BF16 and FP16 leave a module unchanged."""
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        tensors = {"b": every.view(torch.bfloat16), "h": every.clone().view(torch.float16)}
        state = state_of(ModuleSource(tensors), layout_of(tensors))
        for bits in state.arrays:
            assert np.array_equal(bits, np.arange(1 << 16, dtype=np.uint16))

    def test_masters_are_rounded_to_the_layout(self) -> None:
        """CASE N13: FP32 masters of a BF16 tensor are rounded as torch rounds; others are not."""
        generator = torch.Generator().manual_seed(1)
        masters = {"w": torch.randn(40, 50, generator=generator), "router.bias": torch.randn(3)}
        layout = Layout.build(
            [
                TensorEntry("w", DType.BF16, (40, 50)),
                TensorEntry("router.bias", DType.F32, (3,)),
            ]
        )
        state = state_of(ModuleSource(masters, layout=layout), layout)
        assert state["w"].tobytes() == bytes_of(masters["w"].to(torch.bfloat16))
        assert state["router.bias"].tobytes() == bytes_of(masters["router.bias"])

    def test_serving_dtype_without_a_layout(self) -> None:
        """Every FP32 tensor, and no other, is offered in the serving dtype."""
        tensors = {"w": torch.randn(3), "n": torch.arange(3), "d": torch.zeros(2).double()}
        layout = layout_of(tensors, serving_dtype=DType.F16)
        assert [s.dtype for s in layout.tensors] == [DType.F16, DType.I64, DType.F64]
        state = state_of(ModuleSource(tensors, serving_dtype=DType.F16), layout)
        assert state["w"].tobytes() == bytes_of(tensors["w"].to(torch.float16))

    def test_nothing_is_rounded_unasked(self) -> None:
        """CASE R10: an FP32 module is refused by a BF16 layout unless rounding was asked for."""
        layout = Layout.build([TensorEntry("w", DType.BF16, (3,))])
        with pytest.raises(InvalidInputError) as caught:
            list(ModuleSource({"w": torch.zeros(3)}).boxes(layout))
        assert caught.value.kind is Kind.TENSOR_DTYPE

    @pytest.mark.parametrize(
        ("tensor", "dtype"),
        [
            (torch.zeros(3, dtype=torch.bfloat16), DType.F32),
            (torch.zeros(3, dtype=torch.float16), DType.BF16),
            (torch.zeros(3, dtype=torch.float64), DType.BF16),
            (torch.zeros(3, dtype=torch.int64), DType.I32),
        ],
    )
    def test_other_casts_are_refused(self, tensor: torch.Tensor, dtype: DType) -> None:
        """CASE R10: int64, an FP32 bias held in BF16, and other halves are never cast."""
        layout = Layout.build([TensorEntry("w", dtype, (3,))])
        with pytest.raises(InvalidInputError) as caught:
            list(ModuleSource({"w": tensor}, layout=layout).boxes(layout))
        assert caught.value.kind is Kind.TENSOR_DTYPE

    def test_unmatched_names_are_listed(self) -> None:
        """CASE R9: a module with other names than the layout is refused with both lists."""
        layout = Layout.build([TensorEntry("a", DType.F32, (1,))])
        with pytest.raises(InvalidInputError, match=r"'a'.*'b'"):
            list(ModuleSource({"b": torch.zeros(1)}).boxes(layout))

    @pytest.mark.parametrize("transposed", [False, True])
    def test_both_names_apart(self, transposed: bool) -> None:
        """CASE R6: two storages of one tied tensor are accepted while equal, else AliasDrift."""
        layout = Layout.build([TensorEntry("embed", DType.BF16, (4, 3), ("head",))])
        masters = torch.randn(4, 3)
        twin = masters.T.contiguous().T if transposed else masters.clone()
        source = ModuleSource({"embed": masters, "head": twin}, layout=layout)
        assert state_of(source, layout)["head"].tobytes() == bytes_of(masters.to(torch.bfloat16))
        twin[3, 2] = -0.0
        masters[3, 2] = 0.0
        with pytest.raises(IntegrityError, match="'embed' and 'head'") as caught:
            list(source.boxes(layout))
        assert caught.value.kind is Kind.ALIAS_DRIFT

    def test_a_tied_module_serves_an_untied_layout(self) -> None:
        """What a module ties is published under both names of a layout that keeps them apart."""
        layout = Layout.build([TensorEntry(n, DType.F32, (2,)) for n in ("embed", "head")])
        shared = torch.tensor([1.0, float("nan")])
        state = state_of(ModuleSource({"embed": shared, "head": shared}), layout)
        assert state["embed"].tobytes() == state["head"].tobytes() == bytes_of(shared)

    def test_rebound_parameters_are_seen(self) -> None:
        """A parameter replaced between versions is published as it is then."""
        module = torch.nn.Linear(2, 1)
        source = ModuleSource(module)
        layout = Layout.build(source.entries())
        module.weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
        assert state_of(source, layout)["weight"].tobytes() == bytes_of(module.weight)

    def test_meta_module_is_refused_before_anything(self) -> None:
        """CASE N8: a module without bits is refused by name by entries and boxes."""
        module = torch.nn.Linear(2, 1, device="meta")
        layout = layout_of(torch.nn.Linear(2, 1))
        for call in (lambda s: s.entries(), lambda s: list(s.boxes(layout))):
            with pytest.raises(InvalidInputError, match="'weight', 'bias'") as caught:
                call(ModuleSource(module))
            assert caught.value.kind is Kind.META_TENSOR


class TestTarget:
    """A module as live weights."""

    def test_writes_land_in_the_original_storage(self) -> None:
        """CASE N4: transposed, sliced and strided parameters are written in place, no copy."""
        tensors = odd_tensors()
        layout = layout_of(tensors)
        addresses = {name: t.data_ptr() for name, t in tensors.items()}
        target = ModuleTarget(tensors, layout)
        rng = np.random.default_rng(2)
        expected = state_of(ModuleSource(tensors), layout)
        for tensor, spec in enumerate(layout.tensors):
            if not spec.elements:
                continue
            count = rng.integers(1, spec.elements + 1)
            indices = np.sort(rng.permutation(spec.elements)[:count]).astype(np.uint32)
            bits = rng.integers(0, 2, count).astype(spec.dtype.bits_dtype)
            box = Box.run(0, spec.elements)
            assert np.array_equal(
                target.gather(tensor, box, indices), expected.arrays[tensor][indices]
            )
            target.scatter(tensor, box, indices, bits)
            expected.arrays[tensor][indices] = bits
        assert state_of(ModuleSource(tensors), layout).equals(expected)
        assert {name: t.data_ptr() for name, t in tensors.items()} == addresses
        for name, tensor in tensors.items():
            assert expected[name].tobytes() == bytes_of(tensor), name

    @pytest.mark.parametrize("flat", [True, False])
    def test_boxes_of_both_kinds(self, flat: bool) -> None:
        """Runs and n-dimensional boxes, whole and at indices, of every kind of storage."""
        tensors = {n: t for n, t in odd_tensors().items() if t.numel() and t.ndim}
        layout = layout_of(tensors)
        target = ModuleTarget(tensors, layout)
        for tensor, spec in enumerate(layout.tensors):
            whole = state_of(ModuleSource(tensors), layout).arrays[tensor]
            places = np.arange(spec.elements).reshape(spec.element_shape)
            if flat:
                box, inside = Box.run(1, spec.elements - 1), places.reshape(-1)[1:]
            else:
                start = tuple(n // 3 for n in spec.element_shape)
                sizes = tuple(n - n // 3 for n in spec.element_shape)
                box = Box(start, sizes, flat=False)
                inside = places[tuple(slice(s, None) for s in start)].reshape(-1)
            assert np.array_equal(target.gather(tensor, box, None), whole[inside])
            some = np.arange(0, box.elements, 2, dtype=np.uint32)
            assert np.array_equal(target.gather(tensor, box, some), whole[inside][::2])
            bits = np.arange(box.elements).astype(spec.dtype.bits_dtype) % 2
            target.scatter(tensor, box, None, bits.astype(spec.dtype.bits_dtype))
            whole[inside] = bits
            after = state_of(ModuleSource(tensors), layout).arrays[tensor]
            assert np.array_equal(after, whole)

    def test_what_is_gathered_is_a_copy(self) -> None:
        """Old bits kept for an undo do not change when new ones are written."""
        target = ModuleTarget({"w": torch.tensor([1, 2, 3])}, layout_of({"w": torch.arange(3)}))
        old = target.gather(0, Box.run(0, 3), None)
        target.scatter(0, Box.run(0, 3), None, np.zeros(3, np.uint64))
        assert old.tolist() == [1, 2, 3]

    def test_read_only_bits_are_written(self) -> None:
        """Decoded blocks are read-only: they are written all the same."""
        live = torch.zeros(3, dtype=torch.bfloat16)
        target = ModuleTarget({"w": live}, layout_of({"w": live}))
        bits = np.array([1, 0x7FC0, 0xFFFF], np.uint16)
        bits.flags.writeable = False
        indices = np.arange(3, dtype=np.uint32)
        indices.flags.writeable = False
        target.scatter(0, Box.run(0, 3), indices, bits)
        assert bytes_of(live) == bits.tobytes()

    @pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
    def test_widened_parameters_take_and_give_all_patterns(self, dtype: DType) -> None:
        """CASE R4, R5: all 65,536 patterns, NaNs included, go into FP32 parameters and back."""
        live = torch.zeros(1 << 16)
        layout = Layout.build([TensorEntry("w", dtype, (1 << 16,))])
        target = ModuleTarget({"w": live}, layout)
        every = np.arange(1 << 16, dtype=np.uint16)
        box = Box.run(0, 1 << 16)
        target.scatter(0, box, None, every)
        assert np.array_equal(target.gather(0, box, None), every)
        flipped = every ^ np.uint16(0x8000)
        target.scatter(0, box, every.astype(np.uint32), flipped)
        assert np.array_equal(target.gather(0, box, every.astype(np.uint32)), flipped)
        torch_dtype = torch.bfloat16 if dtype is DType.BF16 else torch.float16
        expected = torch.from_numpy(flipped.view(np.int16)).view(torch_dtype).to(torch.float32)
        assert torch.equal(live.nan_to_num(7.0), expected.nan_to_num(7.0))

    def test_inexact_module_is_refused_by_name(self) -> None:
        """FP32 values that are no widenings of the layout's dtype are refused at construction."""
        layout = Layout.build([TensorEntry(n, DType.BF16, (2,)) for n in ("fine", "bad")])
        tensors = {"fine": torch.tensor([1.0, 2.0]), "bad": torch.tensor([1.0, 0.1])}
        with pytest.raises(InvalidInputError, match=r"1 FP32 tensors.*bad BF16") as caught:
            ModuleTarget(tensors, layout)
        assert caught.value.kind is Kind.TENSOR_DTYPE
        initial = BitState(layout, [np.full(2, 0x3F80, np.uint16) for _ in range(2)])
        target = ModuleTarget(tensors, layout, initial=initial)
        assert target.fingerprint() == fingerprint_state(initial)
        assert tensors["bad"].tolist() == [1.0, 1.0]

    def test_a_foreign_write_is_found(self) -> None:
        """Bits below the layout's precision that appear later are an IntegrityError, not hidden."""
        live = torch.tensor([1.0, 2.0])
        layout = Layout.build([TensorEntry("w", DType.BF16, (2,))])
        target = ModuleTarget({"w": live}, layout)
        live[1] = 0.1
        for read in (
            lambda: target.gather(0, Box.run(0, 2), np.array([1], np.uint32)),
            target.fingerprint,
        ):
            with pytest.raises(IntegrityError, match="'w'") as caught:
                read()
            assert caught.value.kind is Kind.FINGERPRINT

    def test_either_name_moves_a_tied_parameter(self) -> None:
        """CASE R6: a tensor of two names is written once where tied, in both places where not."""
        layout = Layout.build([TensorEntry("embed", DType.F32, (2,), ("head",))])
        shared = torch.zeros(2)
        one, two = torch.zeros(2), torch.zeros(2)
        for tensors in (
            {"embed": shared, "head": shared},
            {"embed": one, "head": two},
            {"head": torch.zeros(2)},
        ):
            target = ModuleTarget(tensors, layout)
            target.scatter(0, Box.run(0, 2), np.array([1], np.uint32), np.array([7], np.uint32))
            for tensor in tensors.values():
                assert tensor.view(torch.int32).tolist() == [0, 7]
            assert target.gather(0, Box.run(0, 2), None).tolist() == [0, 7]
        two[0] = 1
        with pytest.raises(IntegrityError) as caught:
            ModuleTarget({"embed": one, "head": two}, layout)
        assert caught.value.kind is Kind.ALIAS_DRIFT

    def test_a_module_that_ties_too_much_is_refused(self) -> None:
        """CASE R6: what the layout keeps apart cannot be live in one storage."""
        layout = Layout.build([TensorEntry(n, DType.F32, (2,)) for n in ("embed", "head")])
        shared = torch.zeros(2)
        with pytest.raises(InvalidInputError, match="'embed' and 'head'") as caught:
            ModuleTarget({"embed": shared, "head": shared}, layout)
        assert caught.value.kind is Kind.TENSOR_NAMES

    @pytest.mark.parametrize(
        ("box", "indices", "bits"),
        [
            (Box.run(0, 4), None, 4),
            (Box.run(2, 2), None, 2),
            (Box.run(0, 3), [3], 1),
            (Box((0, 0), (1, 1), flat=False), None, 1),
            (Box.run(0, 3), None, 2),
            (Box.run(0, 3), [0, 1], 1),
        ],
    )
    def test_what_does_not_fit_is_refused(
        self, box: Box, indices: list[int] | None, bits: int
    ) -> None:
        """CASE R29: an index or box outside the tensor, or other counts, write nothing."""
        live = torch.zeros(3)
        target = ModuleTarget({"w": live}, layout_of({"w": live}))
        where = None if indices is None else np.array(indices, np.uint32)
        with pytest.raises(InvalidInputError) as caught:
            target.scatter(0, box, where, np.ones(bits, np.uint32))
        assert caught.value.kind in (Kind.BOX, Kind.TENSOR_SHAPE)
        assert live.tolist() == [0, 0, 0]

    def test_patterns_of_another_width_are_refused(self) -> None:
        """Bits of another width than the tensor's write nothing."""
        live = torch.zeros(3)
        target = ModuleTarget({"w": live}, layout_of({"w": live}))
        with pytest.raises(InvalidInputError) as caught:
            target.scatter(0, Box.run(0, 3), None, np.ones(3, np.uint16))
        assert caught.value.kind is Kind.TENSOR_SHAPE

    def test_fingerprint_is_that_of_the_state(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The pass over live weights, in small boxes, gives the state's fingerprint."""
        monkeypatch.setattr("deltastore.adapters.torch_state.MAX_BOX_ELEMENTS", 4)
        tensors = odd_tensors()
        layout = layout_of(tensors)
        state = state_of(ModuleSource(tensors), layout)
        assert ModuleTarget(tensors, layout).fingerprint() == fingerprint_state(state)


@WIDE
@pytest.mark.parametrize("tied", [True, False])
def test_a_real_model_follows_its_checkpoints(
    tmp_path: Path, dtype: torch.dtype, tied: bool
) -> None:
    """CASE R5, R6: a transformers model patched where elements changed is the later checkpoint."""
    folder = tiny_checkpoint(tmp_path / "a", tied=tied)
    later = next_checkpoint(folder, tmp_path / "b", density=0.1)
    checkpoint = scan_checkpoint(folder)
    layout = checkpoint_layout(checkpoint)
    model = model_of(folder, dtype)
    target = ModuleTarget(model, layout)
    old = load_state(checkpoint, layout)
    new = load_state(scan_checkpoint(later), layout)
    assert target.fingerprint() == fingerprint_state(old)
    for tensor, (before, after) in enumerate(zip(old.arrays, new.arrays, strict=True)):
        indices = np.flatnonzero(before != after).astype(np.uint32)
        box = Box.run(0, before.size)
        assert np.array_equal(target.gather(tensor, box, indices), before[indices])
        target.scatter(tensor, box, indices, after[indices])
    assert target.fingerprint() == fingerprint_state(new)
    assert state_of(ModuleSource(model, layout=layout), layout).equals(new)
    if tied:
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_an_empty_model_takes_a_whole_state(tmp_path: Path) -> None:
    """A joiner without a checkpoint builds its model from the configuration and loads a state."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tiny_checkpoint(tmp_path / "a")
    checkpoint = scan_checkpoint(folder)
    layout = checkpoint_layout(checkpoint)
    state = load_state(checkpoint, layout)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    target = ModuleTarget(model, layout, initial=state)
    assert target.fingerprint() == fingerprint_state(state)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        logits = model.eval()(tokens).logits
        expected = model_of(folder, torch.float32)(tokens).logits
    assert torch.equal(logits, expected)


@pytest.mark.gpu
def test_an_accelerator_holds_the_same_bits() -> None:
    """CASE R4, R6, N4: gather, scatter and fingerprint on a device equal those on the host."""
    host, device = odd_tensors(), {n: t.cuda() for n, t in odd_tensors().items()}
    device["transposed"] = host["transposed"].T.contiguous().cuda().T
    layout = layout_of(host)
    targets = ModuleTarget(host, layout), ModuleTarget(device, layout)
    for tensor, spec in enumerate(layout.tensors):
        indices = np.arange(0, spec.elements, 2, dtype=np.uint32)
        box = Box.run(0, spec.elements)
        for target in targets:
            target.scatter(tensor, box, indices, np.ones(indices.size, spec.dtype.bits_dtype))
    assert targets[0].fingerprint() == targets[1].fingerprint()
