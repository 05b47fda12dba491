"""An engine of three ranks and an update of every kind of tensor: what its tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.chain.diff import diff_tensor
from deltastore.errors import Kind
from deltastore.format.block import Block, ValueKind
from deltastore.format.dtypes import DType
from deltastore.format.layout import BitState, Layout, TensorEntry
from tests.unit.adapters.placed_kit import Engine, Plan, point, update_of

if TYPE_CHECKING:
    from deltastore.pipeline.staged import StagedUpdate

ENTRIES = (
    TensorEntry("rows", DType.BF16, (12, 8)),
    TensorEntry("columns", DType.BF16, (6, 12)),
    TensorEntry("same", DType.F32, (10,)),
    TensorEntry("router", DType.BF16, (9,)),
    TensorEntry("apart", DType.BF16, (20,)),
)
LAYOUT = Layout.build(ENTRIES)
SPLITS = ("rows", "columns", "whole", "whole", "one")
STORAGES = ("plain", "transposed", "twice", "widened", "plain")
THREE = Plan(3, SPLITS, STORAGES)
CLEAN = {Kind.ROLLED_BACK}
DOUBT = {Kind.POISONED}


def random_state(seed: int = 0) -> BitState:
    """Any patterns, NaNs among them."""
    rng = np.random.default_rng(seed)
    return BitState(
        LAYOUT,
        [
            np.frombuffer(rng.bytes(spec.size_bytes), spec.dtype.bits_dtype).copy()
            for spec in LAYOUT.tensors
        ],
    )


def after(base: BitState, seed: int = 1) -> BitState:
    """Some elements of every tensor a step further; `apart` wholly new."""
    rng = np.random.default_rng(seed)
    new = base.copy()
    for bits in new.arrays:
        bits[rng.permutation(bits.size)[: bits.size // 3]] += 1
    new.arrays[-1][:] = rng.integers(0, 1 << 16, new.arrays[-1].size)
    return new


def update(base: BitState, new: BitState, first: int = 0, last: int = 1) -> StagedUpdate:
    """Steps; of `same` absolute patterns, of `apart` all of them."""
    blocks: list[Block] = []
    for tensor, (old, bits) in enumerate(zip(base.arrays, new.arrays, strict=True)):
        for block in diff_tensor(LAYOUT, tensor, old, bits):
            if LAYOUT.tensors[tensor].name == "same" and block.indices is not None:
                values = bits[block.indices]
                change = block.fingerprint_change
                block = Block(tensor, block.box, ValueKind.BITS, block.indices, values, change)
            blocks.append(block)
    return update_of(base, new, blocks, first, last)


BASE = random_state()


NEW = after(BASE)


UPDATE = update(BASE, NEW)


def kinds(outcomes: list[Any]) -> set[Any]:
    """The kinds of the errors; of what is none, itself."""
    return {getattr(one, "kind", one) for one in outcomes}


def injected(engine: Engine, rank: int, name: str, at: int, err: BaseException) -> list[int]:
    """Have a method of a rank's target raise at its `at`-th call; after the work if `at` < 0."""
    target = engine.targets[rank]
    original = getattr(target, name)
    calls = [0]

    def failing(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise err
        found = original(*args, **options)
        if calls[0] == -at:
            raise err
        return found

    setattr(target, name, failing)
    return calls


def parts_of(engine: Engine, rank: int) -> int:
    """How many parts the update has on a rank."""
    return len(engine.appliers[rank].prepare(UPDATE).parts)


def assert_at(engine: Engine, state: BitState, version: int) -> None:
    """Every rank says that version, holds that state, and is sound."""
    assert engine.held().equals(state)
    assert [applier.active for applier in engine.appliers] == [point(version, state)] * len(
        engine.appliers
    )
    assert not any(applier.poisoned for applier in engine.appliers)


def assert_doubted(engine: Engine) -> None:
    """Every rank is poisoned, still says the old version, and refuses what comes next."""
    assert all(applier.poisoned for applier in engine.appliers)
    assert all(applier.active == point(0, BASE) for applier in engine.appliers)
    assert kinds(engine.activate(UPDATE)) == DOUBT


def flip_all(placement: Any) -> None:
    """Change the sign of every element of one live view."""
    placement.live.neg_()
