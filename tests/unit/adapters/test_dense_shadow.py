"""Weights that the engine repacks follow the run through a shadow; whole closures are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from deltastore.adapters.dense_shadow import DenseShadows
from deltastore.adapters.placed_target import PlacedTarget
from deltastore.adapters.placements import Placement, Region
from deltastore.adapters.torch_tensors import integer_view
from deltastore.chain.diff import diff_tensor
from deltastore.errors import ApplyError, IntegrityError, InvalidInputError, Kind, StorageError
from deltastore.format.dtypes import DType
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.pipeline.group import SoloGroup
from deltastore.pipeline.rank_applier import RankApplier, whole_fingerprint
from deltastore.testing.clock import FakeClock
from tests.unit.adapters.placed_kit import patterns_of, point, update_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NAMES = ("w1", "w2", "bias", "norm", "other")
SHAPE = (4, 6)
LAYOUT = Layout.build(
    [
        TensorEntry("w1", DType.BF16, SHAPE),
        TensorEntry("w2", DType.BF16, SHAPE),
        TensorEntry("bias", DType.BF16, (6,)),
        TensorEntry("norm", DType.BF16, (6,)),
        TensorEntry("other", DType.BF16, SHAPE),
    ]
)
DENSE = (0, 1, 4)


@dataclass(frozen=True)
class Group:
    """A closure."""

    modules: tuple[str, ...]
    tensors: tuple[int, ...]


GROUPS = (Group(("experts",), (0, 1, 2)), Group(("mixer",), (4,)))


def state_of(seed: int) -> BitState:
    """Any patterns."""
    rng = np.random.default_rng(seed)
    return BitState(
        LAYOUT, [rng.integers(0, 1 << 16, s.elements).astype(np.uint16) for s in LAYOUT.tensors]
    )


BASE = state_of(0)


class Model:
    """An engine that keeps w1 and w2 interleaved and transposed, and `other` times two as int32."""

    def __init__(self, state: BitState) -> None:
        self.packed = torch.zeros(6, 8, dtype=torch.bfloat16)
        self.bias = torch.zeros(6, dtype=torch.bfloat16)
        self.norm = torch.zeros(6, dtype=torch.bfloat16)
        self.doubled = torch.zeros(SHAPE, dtype=torch.int32)
        self.loads: list[tuple[str, ...]] = []
        self.fail_at = -1
        self.load(
            [
                (name, patterns_of(bits).view(torch.bfloat16).reshape(spec.shape))
                for name, bits, spec in zip(NAMES, state.arrays, LAYOUT.tensors, strict=True)
            ]
        )
        self.loads.clear()

    def load(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """What is not given of a module is lost, as in the real one."""
        given = {name: integer_view(tensor) for name, tensor in named}
        self.loads.append(tuple(given))
        if len(self.loads) == self.fail_at:
            integer_view(self.packed).fill_(1)
            raise RuntimeError("the loader failed half way")
        if {"w1", "w2", "bias"} & given.keys():
            lost = torch.full(SHAPE, 0x7FC0, dtype=torch.int16)
            for column, name in enumerate(("w1", "w2")):
                integer_view(self.packed)[:, column::2] = given.get(name, lost).t()
            integer_view(self.bias).copy_(given["bias"])
        if "norm" in given:
            integer_view(self.norm).copy_(given["norm"])
        if "other" in given:
            self.doubled.copy_(given["other"].to(torch.int32) * 2)

    def runtime(self, modules: Sequence[str]) -> Iterable[tuple[str, torch.Tensor]]:
        """What a module holds."""
        if "experts" in modules:
            yield from (("packed", self.packed), ("bias", self.bias))
        if "mixer" in modules:
            yield "doubled", self.doubled

    def held(self) -> BitState:
        """The checkpoint that it would have been loaded from."""
        pairs = [
            integer_view(self.packed)[:, 0::2].t(),
            integer_view(self.packed)[:, 1::2].t(),
            integer_view(self.bias),
            integer_view(self.norm),
            (self.doubled // 2).to(torch.int16),
        ]
        return BitState(LAYOUT, [p.reshape(-1).numpy().view(np.uint16).copy() for p in pairs])


class Engine:
    """A model of one rank, followed."""

    def __init__(self, **options: Any) -> None:
        self.model = Model(BASE)
        self.shadows = DenseShadows(
            LAYOUT,
            DENSE,
            GROUPS,
            lambda tensor: BASE.arrays[tensor],
            reload=self.model.load,
            runtime=self.model.runtime,
            **options,
        )
        line = Region(2, 0, (6,), (1,)), Region(3, 0, (6,), (1,))
        self.target = PlacedTarget(
            LAYOUT,
            [
                Placement(line[0], self.model.bias, "bias", "experts"),
                Placement(line[1], self.model.norm, "norm", "norm"),
            ],
            shadows=self.shadows,
        )
        found = whole_fingerprint(self.target, SoloGroup())
        assert found == point(0, BASE).fingerprint
        self.applier = RankApplier(
            self.target, point(0, BASE), SoloGroup(), name="r", clock=FakeClock()
        )

    def activate(self, new: BitState, tensors: Sequence[int] = range(5)) -> None:
        """Bring the tensors to what they are in `new`; the others stay."""
        goal = BASE.copy()
        for tensor in tensors:
            goal.arrays[tensor][:] = new.arrays[tensor]
        blocks = [
            block
            for tensor in tensors
            for block in diff_tensor(LAYOUT, tensor, BASE.arrays[tensor], goal.arrays[tensor])
        ]
        self.applier.activate(self.applier.prepare(update_of(BASE, goal, blocks)))
        assert self.model.held().equals(goal)
        self.applier.check_whole()


NEW = state_of(1)


def test_repacked_weights_follow_through_their_shadow() -> None:
    """CASE R5, R8: packed, doubled and placed weights hold what a fresh load of the target holds,
    bit for bit; whole closures were loaded, and once."""
    engine = Engine()
    engine.activate(NEW)
    assert engine.model.loads == [("w1", "w2", "bias"), ("other",)]
    assert engine.model.held().equals(NEW)
    assert torch.equal(engine.model.packed.view(torch.int16), Model(NEW).packed.view(torch.int16))


@pytest.mark.parametrize(
    ("tensors", "loads"),
    [
        ((3,), []),
        ((0,), [("w1", "w2", "bias")]),
        ((2,), [("w1", "w2", "bias")]),
        ((3, 4), [("other",)]),
    ],
)
def test_only_closures_that_changed_are_loaded(tensors: Any, loads: Any) -> None:
    """CASE R26: an update of a part loads what shares a module with it, siblings and all, and
    leaves the others alone."""
    engine = Engine()
    engine.activate(NEW, tensors)
    assert engine.model.loads == loads


@pytest.mark.parametrize("fail_at", [1, 2])
def test_a_load_that_fails_is_undone(fail_at: int) -> None:
    """CASE R2: after a loader that failed half way the old bits are loaded again, and proved."""
    engine = Engine()
    before = engine.model.held()
    engine.model.fail_at = fail_at
    with pytest.raises(ApplyError, match="half way") as caught:
        engine.activate(NEW)
    assert caught.value.kind is Kind.ROLLED_BACK
    assert engine.model.held().equals(before)
    engine.applier.check_whole()
    engine.model.fail_at = -1
    engine.activate(NEW)


def test_a_write_that_fails_before_any_load_loads_nothing() -> None:
    """CASE R2: what was never derived from the new bits is not derived again from the old ones."""
    engine = Engine()

    def failing(part: Any, *, keep: bool) -> None:
        raise OSError("no")

    engine.target.write = failing  # type: ignore[method-assign]
    with pytest.raises(ApplyError):
        engine.activate(NEW)
    assert engine.model.loads == []
    engine.applier.check_whole()


def test_a_write_that_fails_anywhere_after_an_update_is_undone() -> None:
    """CASE R2: what an earlier update has loaded anew is no measure of the undo: after part k
    fails, for every k, and each load, the modules hold what they held, and nobody is poisoned."""
    engine = Engine()
    engine.activate(NEW)
    newest = state_of(2)
    blocks = [
        block
        for tensor in range(len(LAYOUT))
        for block in diff_tensor(LAYOUT, tensor, NEW.arrays[tensor], newest.arrays[tensor])
    ]
    update = update_of(NEW, newest, blocks, 1, 2)
    packed = engine.model.packed.clone()
    write = engine.target.write
    left = [0]

    def failing(part: Any, *, keep: bool) -> None:
        if left[0] == 0:
            raise OSError("no")
        left[0] -= 1
        write(part, keep=keep)

    engine.target.write = failing  # type: ignore[method-assign]
    parts = len(engine.applier.prepare(update).parts)
    assert parts == len(LAYOUT)
    for fail_at in (None, 1, 2):
        for after in range(parts) if fail_at is None else [parts]:
            left[0] = after
            engine.model.loads.clear()
            engine.model.fail_at = fail_at or -1
            with pytest.raises(ApplyError) as caught:
                engine.applier.activate(engine.applier.prepare(update))
            assert caught.value.kind is Kind.ROLLED_BACK
            assert engine.model.held().equals(NEW)
            assert torch.equal(integer_view(engine.model.packed), integer_view(packed))
            engine.applier.check_whole()
    left[0], engine.model.fail_at = parts, -1
    engine.applier.activate(engine.applier.prepare(update))
    assert engine.model.held().equals(newest)


def test_an_undo_that_does_not_restore_the_modules_poisons() -> None:
    """CASE R2: if loading the old bits again gives other weights than before, nothing is served."""
    engine = Engine()
    original = engine.model.load

    def failing(named: Sequence[tuple[str, torch.Tensor]]) -> None:
        original(named)
        if len(engine.model.loads) == 2:
            raise RuntimeError("the second closure failed")
        if len(engine.model.loads) == 3:
            engine.model.packed[0, 0] = 99.0

    engine.shadows._reload = failing
    with pytest.raises(ApplyError) as caught:
        engine.activate(NEW)
    assert caught.value.kind is Kind.POISONED
    assert engine.applier.poisoned


def test_a_loader_that_changes_a_placed_sibling_is_refused() -> None:
    """A placed tensor that is loaded from its own live bits and comes out different is no placed
    tensor: the activation fails."""
    engine = Engine()
    original = engine.model.load

    def scaling(named: Sequence[tuple[str, torch.Tensor]]) -> None:
        original(named)
        engine.model.bias.add_(1)

    engine.shadows._reload = scaling
    with pytest.raises(ApplyError, match="bias"):
        engine.activate(NEW)


def test_what_writes_to_a_repacked_module_is_found() -> None:
    """A whole check compares the modules' bytes too: the shadow alone would not notice."""
    engine = Engine()
    engine.activate(NEW)
    engine.model.doubled[1, 1] += 2
    with pytest.raises(IntegrityError) as caught:
        engine.applier.check_whole()
    assert caught.value.kind is Kind.DIGEST
    assert engine.applier.poisoned


def test_a_whole_state_is_loaded_whole() -> None:
    """Re-anchoring writes shadows and placed weights, and loads every closure."""
    engine = Engine()
    engine.model.packed.zero_()
    engine.applier.write_state(NEW, point(1, NEW))
    assert engine.model.held().equals(NEW)
    engine.applier.check_whole()


def test_shadows_say_what_they_cost_and_keep_to_their_limit() -> None:
    """The size is known before an update comes, and more than the limit is refused."""
    assert Engine().shadows.size_bytes == 3 * 48
    with pytest.raises(InvalidInputError, match="shadow_max_bytes, 100") as caught:
        Engine(max_bytes=100)
    assert caught.value.kind is Kind.LIMIT


def test_a_full_disk_is_found_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is taken at once: a full disk is an error then, not a killed process at a write."""
    import errno
    import os

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError) as caught:
        Engine()
    assert caught.value.kind is Kind.DISK_FULL


def test_a_dense_tensor_without_a_closure_is_refused() -> None:
    """CASE R9: a shadow from which nothing would ever be loaded is an error that names it."""
    with pytest.raises(InvalidInputError, match="norm"):
        DenseShadows(
            LAYOUT,
            [3],
            GROUPS,
            lambda tensor: BASE.arrays[tensor],
            reload=lambda named: None,
            runtime=lambda modules: (),
        )
