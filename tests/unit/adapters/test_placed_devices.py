"""A device is driven by one thread, in pieces as large as its scratch memory has room for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltastore.adapters import placed_target, safe_point_threads
from deltastore.adapters.live_memory import DeviceMemory
from deltastore.adapters.placed_parts import HeldRegion
from deltastore.adapters.placed_target import PlacedTarget
from deltastore.adapters.placements import Placement, Region
from deltastore.format.block import Block, ValueKind
from deltastore.format.box import Box
from deltastore.format.dtypes import DType
from deltastore.format.fingerprint import ZERO
from deltastore.format.layout import BitState, Layout, TensorEntry
from deltastore.format.mixing import fingerprint_state
from deltastore.pipeline.tally import Sums

if TYPE_CHECKING:
    from deltastore.format.fingerprint import Fingerprint


def layout_of(*shapes: tuple[int, ...]) -> Layout:
    """Tensors t0, t1, … of those shapes."""
    return Layout.build(TensorEntry(f"t{i}", DType.BF16, shape) for i, shape in enumerate(shapes))


def apply(target: PlacedTarget, block: Block) -> None:
    """Both passes."""
    parts = target.plan([block])
    target.tally(parts, [block.tensor])
    target.write_all(parts, keep=True)


class Outputs(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    most_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it, and look at what it returns; views cost nothing."""
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not func.is_view:
            in_place = any(found is one for one in args)
            self.most_bytes = max(self.most_bytes, 0 if in_place else found.nbytes)
        return found


@pytest.mark.parametrize("widened", [False, True])
def test_on_devices_temporaries_stay_in_the_scratch_memory(
    widened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASE R15: no operation of either pass, of the whole fingerprint or of a whole state makes a
    tensor that is large against `scratch_max_bytes`."""
    monkeypatch.setattr(placed_target, "on_host", lambda _flat: False)
    layout = layout_of((512, 512))
    dtype = torch.float32 if widened else torch.bfloat16
    live = torch.zeros(512, 512, dtype=dtype)
    made = Placement(Region(0, 0, (512, 512), (512, 1)), live, "w", "m", widened)
    scratch_bytes = 256 << 10
    target = PlacedTarget(layout, [made], scratch_max_bytes=scratch_bytes)
    every = np.arange(0, 1 << 18, 2, dtype=np.uint32)
    steps = Block(
        0, Box.run(0, 1 << 18), ValueKind.STEPS, every, np.full(every.size, 3, np.uint16), ZERO
    )
    dense = Block(
        0, Box.run(0, 1 << 18), ValueKind.DENSE, None, np.full(1 << 18, 0x3F80, np.uint16), ZERO
    )
    with Outputs() as outputs:
        apply(target, steps)
        apply(target, dense)
        target.whole()
        target.write_state(BitState.zeros(layout))
    assert 0 < outputs.most_bytes <= scratch_bytes // 8


def test_a_device_gets_large_pieces_whatever_the_processors() -> None:
    """CASE R15: the scratch memory of a device is one thread's: its pieces are as large as the
    memory has room for, on a host of many processors too."""
    layout = layout_of((64, 1 << 16))
    live = torch.empty(64, 1 << 16, dtype=torch.bfloat16, device="meta")
    made = Placement(Region(0, 0, (64, 1 << 16), (1 << 16, 1)), live, "w", "m")
    target = PlacedTarget(layout, [made], threads=8)
    (held,) = target._held
    assert not held.memory.on_host
    assert [piece.offsets.size >= 1 << 21 for piece in held.pieces()] == [True, False]


def test_a_device_is_driven_by_one_thread_and_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CASE R15: only the calling thread works on a device, and a sum over many pieces is read from
    it once; memory of the host beside it is shared by threads, and results keep their order."""
    monkeypatch.setattr(placed_target, "on_host", lambda flat: flat.shape[0] == 1 << 18)
    monkeypatch.setattr(DeviceMemory, "on_host", False)
    monkeypatch.setattr(DeviceMemory, "finish", lambda self: None)
    monkeypatch.setattr(safe_point_threads, "MIN_WEIGHT", 1)
    layout = layout_of((300, 512), (512, 512), (300, 511), (512, 512))
    state = BitState(
        layout, [np.arange(spec.elements).astype(np.uint16) for spec in layout.tensors]
    )
    shapes = [spec.shape for spec in layout.tensors]
    target = PlacedTarget(
        layout,
        [
            Placement(
                Region(at, 0, shape, (shape[1], 1)), torch.zeros(shape).bfloat16(), f"w{at}", "m"
            )
            for at, shape in enumerate(shapes)
        ],
        scratch_max_bytes=1 << 20,
        threads=2,
    )
    threads: dict[bool, set[int]] = {True: set(), False: set()}
    summed = HeldRegion.fingerprint

    def seen(held: HeldRegion) -> Fingerprint:
        threads[held.memory.on_host].add(threading.get_ident())
        return summed(held)

    read: list[int] = []
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        read.append(1)
        return tolist(tensor)

    target.write_state(state)
    monkeypatch.setattr(HeldRegion, "fingerprint", seen)
    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    assert Sums.joined(layout, [target.whole()]).total() == fingerprint_state(state)
    assert threads[False] == {threading.get_ident()}
    assert len(threads[True]) == 2
    assert len(read) == 2
