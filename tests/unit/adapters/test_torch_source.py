"""Modules as sources: every bit of every tensor is published, and nothing is cast unasked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltastore.adapters.torch_state import ModuleSource
from deltastore.errors import IntegrityError, InvalidInputError, Kind
from deltastore.format.dtypes import DType
from deltastore.format.layout import Layout, TensorEntry
from tests.unit.adapters.torch_kit import bytes_of, layout_of, odd_tensors, state_of

WIDE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


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
