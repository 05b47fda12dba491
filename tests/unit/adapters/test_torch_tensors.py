"""Names and storages of a module: aliases found, overlaps and unreadable tensors named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deltastore.adapters.torch_tensors import checkpoint_names, named_tensors
from deltastore.errors import InvalidInputError, Kind
from deltastore.format.dtypes import DType


def names_of(state: Any) -> list[tuple[str, ...]]:
    """The names of each storage."""
    return [tensor.names for tensor in named_tensors(state)]


def refusal(state: dict[str, Any]) -> InvalidInputError:
    """What looking at the tensors raises."""
    with pytest.raises(InvalidInputError) as caught:
        named_tensors(state)
    return caught.value


class Tied(torch.nn.Module):
    """An embedding with a tied head, buffers of both kinds, and a wrapped layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 3)
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def test_parameters_and_persistent_buffers_by_checkpoint_name() -> None:
    """CASE R6: tied parameters are one tensor of two names; only persistent buffers count."""
    assert names_of(Tied()) == [("steps",), ("embed.weight", "head.weight")]


def test_live_tensors_are_given() -> None:
    """The patterns are the parameters' own memory."""
    module = Tied()
    named_tensors(module)[1].patterns().fill_(0)
    assert bool((module.head.weight == 0).all())


def test_wrappers_leave_no_trace_in_names() -> None:
    """CASE R10: names of compiled, wrapped and parallel modules are those of the checkpoint."""
    assert names_of(torch.nn.Sequential(torch.compile(torch.nn.Linear(1, 1), backend="eager"))) == [
        ("0.weight",),
        ("0.bias",),
    ]
    wrapped = [
        "module._orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.weight",
        "module._fsdp_wrapped_module.norm._orig_mod.weight",
    ]
    assert checkpoint_names(wrapped) == ["model.layers.0.mlp.weight", "norm.weight"]


def test_a_part_called_module_keeps_its_name() -> None:
    """`module.` is taken off only where it stands before every name."""
    assert checkpoint_names(["module.weight", "head.weight"]) == ["module.weight", "head.weight"]
    assert checkpoint_names(["my_orig_mod.weight"]) == ["my_orig_mod.weight"]


def test_names_that_become_one_are_refused() -> None:
    """Two tensors may not end up under one checkpoint name."""
    error = refusal({"_orig_mod.w": torch.zeros(1), "w": torch.zeros(1)})
    assert error.kind is Kind.TENSOR_NAMES
    assert "'w'" in error.message


def test_meta_tensors_are_named() -> None:
    """CASE N8: tensors without bits are refused by name, before anything else is looked at."""
    error = refusal({"a": torch.zeros(2), "b": torch.empty(2, device="meta")})
    assert error.kind is Kind.META_TENSOR
    assert "'b'" in error.message


def test_disjoint_views_are_separate_tensors() -> None:
    """CASE N5: rows or columns of one storage that never meet are fine."""
    fused = torch.zeros(6, 8)
    state = {"q": fused[:, :2], "k": fused[:, 2:4], "v": fused[:, 4:], "other": torch.zeros(3)}
    assert names_of(state) == [("q",), ("k",), ("v",), ("other",)]
    assert names_of({"a": fused[:3], "b": fused[3:]}) == [("a",), ("b",)]
    assert names_of({"even": fused.view(-1)[::2], "odd": fused.view(-1)[1::2]}) == [
        ("even",),
        ("odd",),
    ]


def test_the_same_view_twice_is_an_alias() -> None:
    """CASE N5: two names of exactly the same elements are one tensor."""
    fused = torch.zeros(6, 8)
    assert names_of({"a": fused[:, 2:4], "b": fused[:, 2:4]}) == [("a", "b")]
    assert names_of({"a": torch.zeros(0), "b": torch.zeros(0)}) == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("[:4]", "[3:]"),
        ("[:, :5]", "[:, 4:]"),
        ("[0]", "[:, 0]"),
        ("[:]", ".T"),
        ("[:]", ".view(-1)"),
        ("[:]", ".view(torch.int32)"),
    ],
)
def test_partial_overlap_is_refused(first: str, second: str) -> None:
    """CASE N5: elements shared in part, or in another shape, order or dtype, name both tensors."""
    scope = {"fused": torch.zeros(6, 8), "torch": torch}
    state = {
        "apart": torch.zeros(2),
        "one": eval(f"fused{first}", scope),
        "two": eval(f"fused{second}", scope),
    }
    error = refusal(state)
    assert error.kind is Kind.TENSOR_STORAGE
    assert "'one'" in error.message
    assert "'two'" in error.message


def test_the_right_partner_is_named() -> None:
    """Of several tensors in one storage the two that overlap are named."""
    fused = torch.zeros(4, 8)
    error = refusal({"a": fused[:, :2], "b": fused[:, 2:4], "c": fused[:, 4:], "d": fused[:, 3:5]})
    assert "'d'" in error.message
    assert "'b'" in error.message or "'c'" in error.message
    assert "'a'" not in error.message


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 1).expand(3, 4),
        torch.zeros(5).as_strided((3, 3), (1, 1)),
        torch.zeros(20).as_strided((3, 3, 2), (2, 5, 5)),
        torch.zeros(4).to_sparse(),
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.nn.parameter.UninitializedParameter(),
        {"not": "a tensor"},
    ],
    ids=["stride 0", "windows", "odd strides", "sparse", "conjugate view", "lazy", "extra state"],
)
def test_tensors_that_cannot_be_written_in_place(tensor: Any) -> None:
    """CASE N4: stride 0 and whatever else has no memory of its own per element, by name."""
    error = refusal({"fine": torch.zeros(2), "bad.weight": tensor})
    assert error.kind is Kind.TENSOR_STORAGE
    assert "'bad.weight'" in error.message
    assert error.hint


def test_unusual_strides_without_overlap_are_fine() -> None:
    """Strides that interleave but never repeat a place are no overlap."""
    assert names_of({"a": torch.zeros(20).as_strided((2, 3), (3, 2))}) == [("a",)]
    assert names_of({"a": torch.zeros(3, 1, 4).expand(3, 1, 4)}) == [("a",)]


def test_freed_storage_is_named() -> None:
    """A sharded module's parameter whose storage is gone is refused, not read as garbage."""
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    assert "freed" in refusal({"w": tensor}).message


def test_wrapper_tensors_are_named() -> None:
    """A tensor that only wraps others (sharded, quantized, fake) is refused by its class."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.zeros(2))
    assert "FakeTensor" in refusal({"w": fake}).message


def test_dtypes_without_a_place_in_a_checkpoint() -> None:
    """CASE R10: a dtype that a checkpoint has not is refused, never cast."""
    error = refusal({"w": torch.zeros(2, dtype=torch.complex128)})
    assert error.kind is Kind.TENSOR_DTYPE
    assert "complex128" in error.message


@pytest.mark.parametrize("dtype", list(DType))
def test_every_checkpoint_dtype_has_patterns(dtype: DType) -> None:
    """CASE N9: patterns of every dtype, 0-d too, without an operation torch lacks for it."""
    by_name = {t.dtype: t for t in map(_one_of, _TORCH_DTYPES)}
    tensor = by_name[dtype]
    assert tensor.patterns().dtype.itemsize * 8 == dtype.element_bits
    assert tensor.patterns().numel() == dtype.elements_per_item


_TORCH_DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.int16,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.uint32,
    torch.float32,
    torch.int64,
    torch.uint64,
    torch.float64,
    torch.complex64,
]


def _one_of(dtype: torch.dtype) -> Any:
    return named_tensors({"x": torch.empty((), dtype=dtype)})[0]
