"""Placed weights are written where the loader put them, and nowhere else, however large."""

from __future__ import annotations

import math
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from deltastore.adapters import placed_target
from deltastore.adapters.placed_target import PlacedTarget
from deltastore.adapters.placements import Placement, Region
from deltastore.adapters.torch_tensors import integer_view, torch_dtype
from deltastore.errors import IntegrityError, InvalidInputError, Kind
from deltastore.format.block import Block, ValueKind
from deltastore.format.box import Box
from deltastore.format.dtypes import DType
from deltastore.format.fingerprint import ZERO
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.mixing import fingerprint_change, fingerprint_state
from deltastore.pipeline.tally import Sums

if TYPE_CHECKING:
    from pathlib import Path

BF16 = DType.BF16
ROWS, COLUMNS = 6, 8


def layout_of(*shapes: tuple[int, ...], dtype: DType = BF16) -> Layout:
    """Tensors t0, t1, … of those shapes."""
    return Layout.build(TensorEntry(f"t{i}", dtype, shape) for i, shape in enumerate(shapes))


def placed(tensor: int, offset: int, live: torch.Tensor, strides: tuple[int, ...]) -> Placement:
    """A placement whose region has the live view's shape."""
    return Placement(Region(tensor, offset, tuple(live.shape), strides), live, "weight", "layer")


def sparse(tensor: int, indices: list[int], values: list[int], size: int, start: int = 0) -> Block:
    """Steps in a run of a BF16 tensor."""
    where = np.array(indices, np.uint32)
    steps = np.array(values, np.uint16)
    return Block(tensor, Box.run(start, size), ValueKind.STEPS, where, steps, ZERO)


def apply(target: PlacedTarget, blocks: list[Block]) -> Any:
    """Both passes; what the first one found."""
    parts = target.plan(blocks)
    tally = target.tally(parts, sorted({block.tensor for block in blocks}))
    for part in parts:
        target.write(part, keep=True)
    return tally


def views() -> dict[str, torch.Tensor]:
    """Views of 6 x 8 elements in larger storages of zeros."""
    return {
        "transposed": torch.zeros(COLUMNS, ROWS, dtype=torch.bfloat16).t(),
        "rows of a fused weight": torch.zeros(20, COLUMNS, dtype=torch.bfloat16)[5:11],
        "columns of a fused weight": torch.zeros(ROWS, 30, dtype=torch.bfloat16)[:, 9:17],
        "every second": torch.zeros(2 * ROWS, 3 * COLUMNS, dtype=torch.bfloat16)[::2, 1::3],
        "from the middle": torch.zeros(400, dtype=torch.bfloat16).as_strided((6, 8), (1, 7), 33),
    }


@pytest.mark.parametrize("on_host", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", list(views()))
def test_writes_land_in_the_original_storage(
    name: str, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASE N4: through any view the live storage itself is written, and nothing beside the view."""
    monkeypatch.setattr(placed_target, "on_host", lambda _flat: on_host)
    live = views()[name]
    storage = integer_view(live).as_strided((live.untyped_storage().nbytes() // 2,), (1,), 0)
    address = live.data_ptr()
    target = PlacedTarget(layout_of((ROWS, COLUMNS)), [placed(0, 0, live, (COLUMNS, 1))])
    apply(target, [sparse(0, list(range(48)), list(range(1, 49)), 48)])
    assert live.data_ptr() == address
    assert integer_view(live).reshape(-1).tolist() == list(range(1, 49))
    assert int((storage != 0).sum()) == 48
    dense = np.arange(100, 124, dtype=np.uint16)
    apply(target, [Block(0, Box((0, 2), (6, 4), flat=False), ValueKind.DENSE, None, dense, ZERO)])
    assert integer_view(live)[:, 2:6].reshape(-1).tolist() == dense.tolist()
    assert int((storage != 0).sum()) == 48


def test_views_with_several_elements_in_one_place_are_refused() -> None:
    """CASE N4: an expanded tensor cannot hold what a checkpoint tensor holds."""
    live = torch.zeros(1, COLUMNS, dtype=torch.bfloat16).expand(ROWS, COLUMNS)
    with pytest.raises(InvalidInputError) as caught:
        PlacedTarget(layout_of((ROWS, COLUMNS)), [placed(0, 0, live, (COLUMNS, 1))])
    assert caught.value.kind is Kind.TENSOR_STORAGE


@pytest.mark.parametrize(
    ("region", "kind"),
    [
        (Region(0, 0, (6, 8), (8, 1)), None),
        (Region(0, 1, (6, 8), (8, 1)), Kind.BOX),
        (Region(0, -1, (6, 8), (8, 1)), Kind.BOX),
        (Region(0, 0, (6, 8), (7, 1)), Kind.BOX),
        (Region(0, 0, (8, 6), (1, 8)), Kind.BOX),
        (Region(0, 0, (8, 6), (6, 1)), Kind.TENSOR_SHAPE),
        (Region(1, 0, (6, 8), (8, 1)), Kind.FIELD),
    ],
)
def test_regions_are_what_they_say(region: Region, kind: Kind | None) -> None:
    """CASE R29: a region that leaves its tensor, repeats an element or has another shape than its
    view is refused before any kernel sees it."""
    live = torch.zeros(6, 8, dtype=torch.bfloat16)
    made = Placement(region, live, "weight", "layer")
    if kind is None:
        PlacedTarget(layout_of((6, 8)), [made])
        return
    with pytest.raises(InvalidInputError) as caught:
        PlacedTarget(layout_of((6, 8)), [made])
    assert caught.value.kind is kind


def test_dtypes_are_the_layouts_or_declared_widenings() -> None:
    """FP32 memory of a BF16 tensor is refused unless the placement says that it is widened."""
    layout = layout_of((4,))
    wide = torch.zeros(4)
    region = Region(0, 0, (4,), (1,))
    with pytest.raises(InvalidInputError) as caught:
        PlacedTarget(layout, [Placement(region, wide, "w", "m")])
    assert caught.value.kind is Kind.TENSOR_DTYPE
    PlacedTarget(layout, [Placement(region, wide, "w", "m", widened=True)])
    with pytest.raises(InvalidInputError):
        PlacedTarget(layout, [Placement(region, wide.double(), "w", "m", widened=True)])


def test_every_tensor_is_placed_or_unused() -> None:
    """CASE R9: a tensor that nothing was said of is named, and so is one of which both was said."""
    layout = layout_of((4,), (2, 3), (0, 5))
    live = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(InvalidInputError, match="t1") as caught:
        PlacedTarget(layout, [placed(0, 0, live, (1,))])
    assert caught.value.kind is Kind.TENSOR_NAMES
    with pytest.raises(InvalidInputError, match="t0"):
        PlacedTarget(layout, [placed(0, 0, live, (1,))], unused=[0, 1])
    PlacedTarget(layout, [placed(0, 0, live, (1,))], unused=[1])


@pytest.mark.parametrize(
    "block",
    [
        sparse(1, [0], [1], 4),
        sparse(0, [4], [1], 4),
        sparse(0, [0], [1], 5),
        sparse(0, [0], [1], 2, start=3),
        sparse(0, [0, 1], [1], 4),
        Block(0, Box.run(0, 4), ValueKind.DENSE, None, np.zeros(3, np.uint16), ZERO),
        Block(0, Box.run(0, 4), ValueKind.DENSE, None, np.zeros(4, np.uint32), ZERO),
    ],
)
def test_blocks_that_do_not_fit_are_refused_beforehand(block: Block) -> None:
    """CASE R29: kernels do no bounds checks, so a block outside of its tensor never reaches one."""
    target = PlacedTarget(layout_of((4,)), [placed(0, 0, torch.zeros(4).bfloat16(), (1,))])
    with pytest.raises(InvalidInputError):
        target.plan([block])


FAR = (1 << 31) + 8


@pytest.mark.parametrize("on_host", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("shape", ["one run", "rows far apart"])
def test_places_beyond_two_to_the_31(
    shape: str, on_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASE N1: changes at 2^31 - 1, 2^31, 2^32 and last of a tensor that large, in live memory
    as large (a file with holes), are found and written there and nowhere else."""
    monkeypatch.setattr(placed_target, "on_host", lambda _flat: on_host)
    elements = 2 * FAR
    layout = Layout.build([TensorEntry("experts", DType.U8, (2, FAR))])
    memory = np.memmap(tmp_path / "holes", np.uint8, "w+", shape=(elements + 64,))
    flat = torch.from_numpy(memory)
    if shape == "one run":
        live, strides = flat[:elements], (1,)
    else:
        live, strides = flat.as_strided((2, FAR), (FAR + 64, 1), 0), (FAR, 1)
    target = PlacedTarget(layout, [placed(0, 0, live, strides)])
    places = [0, (1 << 31) - 1, 1 << 31, 1 << 32, elements - 1]
    blocks, expected = [], ZERO
    for number, place in enumerate(places):
        start = max(0, place - 3)
        size = min(8, elements - start)
        index = np.array([place - start], np.uint32)
        value = np.array([number + 7], np.uint8)
        blocks.append(Block(0, Box.run(start, size), ValueKind.STEPS, index, value, ZERO))
        expected = expected + fingerprint_change(np.array([place]), np.zeros(1, np.uint8), value)
    tally = apply(target, blocks)
    assert Sums.joined(layout, [tally]).total() == expected
    for number, place in enumerate(places):
        where = place if shape == "one run" or place < FAR else place + 64
        assert int(memory[where]) == number + 7
        assert int(memory[where - 2 if place else 2]) == 0


def test_a_small_part_of_a_huge_tensor() -> None:
    """CASE N1: a rank that holds a few elements from 2^40 on of a tensor needs only those."""
    elements = (1 << 40) + 100
    layout = Layout.build([TensorEntry("huge", BF16, (elements,))])
    live = torch.zeros(50).bfloat16()
    target = PlacedTarget(layout, [placed(0, 1 << 40, live, (2,))])
    start = (1 << 40) - 10
    tally = apply(target, [sparse(0, [0, 10, 11, 12, 108], [1, 2, 3, 4, 5], 110, start)])
    assert integer_view(live).nonzero().reshape(-1).tolist() == [0, 1, 49]
    assert integer_view(live)[[0, 1, 49]].tolist() == [2, 4, 5]
    old, new = np.zeros(3, np.uint16), np.array([2, 4, 5], np.uint16)
    where = np.array([0, 2, 98]) + (1 << 40)
    assert Sums.joined(layout, [tally]).total() == fingerprint_change(where, old, new)


def _peak(work: Any) -> int:
    """Bytes that numpy and Python allocate at most while it works."""
    work()  # kernels are compiled, caches are warm
    tracemalloc.start()
    work()
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


SIDE = 4096


@pytest.mark.parametrize("transposed", [False, True])
def test_one_changed_element_costs_no_more_than_itself(transposed: bool) -> None:
    """CASE R15: of a weight of 32 MB one change allocates some kilobytes, whatever its strides."""
    live = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16)
    live = live.t() if transposed else live
    target = PlacedTarget(layout_of((SIDE, SIDE)), [placed(0, 0, live, (SIDE, 1))])
    assert _peak(lambda: apply(target, [sparse(0, [77], [1], 1 << 20, 1 << 23)])) < 32 << 10


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", list(ValueKind))
def test_a_patch_costs_less_than_twice_itself(kind: ValueKind, transposed: bool) -> None:
    """CASE R15: located, verified, written with all that is kept for an undo, a patch of either
    kind takes less than twice its own bytes, and never what the weight takes."""
    live = torch.zeros(SIDE, SIDE, dtype=torch.bfloat16)
    live = live.t() if transposed else live
    target = PlacedTarget(layout_of((SIDE, SIDE)), [placed(0, 0, live, (SIDE, 1))])
    box = Box.run(0, 1 << 22)
    if kind is ValueKind.DENSE:
        values = np.arange(1 << 22).astype(np.uint16)
        block = Block(0, box, kind, None, values, ZERO)
    else:
        indices = np.arange(0, 1 << 22, 8, dtype=np.uint32)
        values = np.ones(indices.size, np.uint16)
        block = Block(0, box, kind, indices, values, ZERO)
    patch_bytes = values.nbytes + (0 if block.indices is None else block.indices.nbytes)
    fixed_bytes = 2 << 20  # one piece of a dense block, in 64-bit numbers where it is located
    assert _peak(lambda: apply(target, [block])) < 2 * patch_bytes + fixed_bytes


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
def test_widened_weights_take_and_give_all_patterns(dtype: DType) -> None:
    """CASE R4, R5: all 65,536 patterns, every NaN and -0 among them, go into FP32 and back."""
    layout = Layout.build([TensorEntry("router", dtype, (1 << 16,))])
    live = torch.zeros(1 << 16)
    region = Region(0, 0, (1 << 16,), (1,))
    target = PlacedTarget(layout, [Placement(region, live, "w", "m", widened=True)])
    state = BitState(layout, [np.arange(1 << 16, dtype=np.uint16)])
    target.write_state(state)
    assert Sums.joined(layout, [target.whole()]).total() == fingerprint_state(state)
    read = integer_view(target.read_tensor(0)).numpy().view(np.uint16)
    assert np.array_equal(read, state.arrays[0])
    plain = torch.from_numpy(state.arrays[0].view(np.int16)).view(torch_dtype(dtype))
    numbers = ~plain.isnan()
    assert torch.equal(live[numbers].view(torch.int32), plain[numbers].float().view(torch.int32))
    assert bool(live[~numbers].isnan().all())


def test_widened_weights_that_are_no_widening_are_found() -> None:
    """An FP32 weight that something else wrote is named in both passes and in a whole one."""
    layout = layout_of((4,))
    live = torch.zeros(4)
    region = Region(0, 0, (4,), (1,))
    target = PlacedTarget(layout, [Placement(region, live, "router", "m", widened=True)])
    live[2] = math.pi
    for work in (target.whole, lambda: apply(target, [sparse(0, [2], [1], 4)])):
        with pytest.raises(IntegrityError, match="router") as caught:
            work()
        assert caught.value.kind is Kind.FINGERPRINT


def test_a_tensor_is_read_in_its_checkpoint_shape() -> None:
    """What this process holds of a tensor is where it belongs; the rest is zero."""
    live = torch.arange(12).to(torch.bfloat16).reshape(3, 4)
    layout = layout_of((3, 8))
    target = PlacedTarget(layout, [placed(0, 4, live, (8, 1))])
    read = target.read_tensor(0)
    assert read.shape == (3, 8)
    assert torch.equal(read[:, 4:], live)
    assert not read[:, :4].any()
