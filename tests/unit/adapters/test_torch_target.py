"""Modules as targets: every write lands in the live storage, and what it holds is proved."""

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
from tests.unit.adapters.torch_kit import bytes_of, layout_of, odd_tensors, state_of

if TYPE_CHECKING:
    from pathlib import Path


WIDE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def model_of(folder: Path, dtype: torch.dtype) -> Any:
    """A transformers model of the checkpoint."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


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
