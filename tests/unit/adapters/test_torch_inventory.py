"""A module that is remembered is looked at anew when anything of it is another than it was."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from deltastore.adapters import torch_inventory
from deltastore.adapters.torch_state import ModuleSource
from deltastore.errors import IntegrityError, InvalidInputError, Kind
from tests.unit.adapters.torch_kit import bytes_of, layout_of, odd_tensors, state_of


def _tensors() -> dict[str, torch.Tensor]:
    return {name: torch.arange(4.0).to(torch.bfloat16) + i for i, name in enumerate("ab")}


def _read(source: ModuleSource, state: dict[str, torch.Tensor]) -> None:
    """What the source offers is what the tensors hold."""
    layout = layout_of(state)
    for name, bits in state_of(source, layout).items():
        assert bits.tobytes() == bytes_of(state[name]), name


def test_what_is_remembered_is_not_worked_out_again(monkeypatch):
    """Of every kind of tensor: the second reading is of the live bits and names nothing anew."""
    tensors = odd_tensors()
    source = ModuleSource(tensors)
    _read(source, tensors)
    monkeypatch.setattr(torch_inventory, "name_tensors", None)
    for tensor in tensors.values():
        if tensor.numel() and tensor.dtype is not torch.bool:
            tensor.zero_()
    _read(source, tensors)


def _overlapping(like: torch.Tensor) -> dict[str, torch.Tensor]:
    both = like.new_zeros(6)
    return {"a": both[:4], "b": both[2:]}


@pytest.mark.parametrize("bound", ["dict", "data", "tied"])
def test_a_tensor_bound_to_other_memory_is_read_there(bound):
    """Rebound in the state, or given other data: the next reading is of what is there now."""
    tensors = _tensors()
    source = ModuleSource(tensors)
    _read(source, tensors)
    other = torch.full((4,), 7.0, dtype=torch.bfloat16)
    if bound == "dict":
        tensors["a"] = other
    elif bound == "tied":
        tensors["a"] = tensors["b"] = other
    else:
        tensors["a"].data = other
    layout = layout_of(_tensors())
    assert [box.bits.tobytes() for box in source.boxes(layout)] == [
        bytes_of(tensors[name]) for name in "ab"
    ]
    assert tensors["a"].tolist() == [7.0] * 4


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda t: t.update(c=torch.zeros(4)), Kind.TENSOR_NAMES),
        (lambda t: t.pop("b"), Kind.TENSOR_NAMES),
        (lambda t: t.update(a=t["a"][:3]), Kind.TENSOR_SHAPE),
        (lambda t: t.update(a=t["a"].view(torch.float16)), Kind.TENSOR_DTYPE),
        (lambda t: t.update(a=t["a"].new_zeros(1).expand(4)), Kind.TENSOR_STORAGE),
        (lambda t: t.update(a=t["a"].to("meta")), Kind.META_TENSOR),
        (lambda t: t.update(a=t["a"].to_sparse()), Kind.TENSOR_STORAGE),
        (lambda t: t["a"].untyped_storage().resize_(0), Kind.TENSOR_STORAGE),
        (lambda t: t.update(_overlapping(t["a"])), Kind.TENSOR_STORAGE),
    ],
    ids=["more", "fewer", "shape", "dtype", "expanded", "meta", "sparse", "freed", "overlap"],
)
def test_what_was_fine_is_refused_when_it_no_longer_is(change, kind):
    """Every refusal of a first reading is one of a second, after a reading that went well."""
    tensors = _tensors()
    layout = layout_of(tensors)
    source = ModuleSource(tensors, layout=layout)
    assert len(list(source.runs(layout, most=9))) == 2
    change(tensors)
    with pytest.raises(InvalidInputError) as err:
        list(source.runs(layout, most=9))
    assert err.value.kind is kind


def test_two_storages_of_one_tensor_are_compared_every_time():
    """Names of one tensor in two storages may drift apart after a reading that went well."""
    tied = torch.arange(4.0)
    layout = layout_of({"a": tied, "b": tied})
    apart = {"a": tied.clone(), "b": tied.clone()}
    source = ModuleSource(apart, layout=layout)
    list(source.boxes(layout))
    apart["b"][2] = 9
    with pytest.raises(IntegrityError) as err:
        list(source.boxes(layout))
    assert err.value.kind is Kind.ALIAS_DRIFT


def test_no_tensor_is_kept_alive():
    """Weights that a trainer frees between two versions are free."""
    tensors = _tensors()
    source = ModuleSource(tensors)
    layout = layout_of(tensors)
    list(source.boxes(layout))
    gone = weakref.ref(tensors["a"])
    tensors["a"] = torch.zeros(4, dtype=torch.bfloat16)
    assert gone() is None


def test_a_tensor_of_another_class_is_looked_at_every_time(monkeypatch):
    """What a class of tensors does is unknown: nothing of it is remembered."""

    class Tagged(torch.Tensor):
        """A plain tensor by another name."""

    tensors = {"a": torch.arange(4.0).as_subclass(Tagged)}
    source = ModuleSource(tensors)
    seen = []
    real = torch_inventory.name_tensors
    monkeypatch.setattr(
        torch_inventory, "name_tensors", lambda found: seen.append(1) or real(found)
    )
    for _ in range(2):
        _read(source, tensors)
    assert len(seen) == 2
    assert np.array_equal(tensors["a"].numpy(), np.arange(4))
