"""What kernels do to live memory, torch does: the same numbers, the same bits, the same undo."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deltastore.adapters.live_memory import DeviceMemory, HostMemory, Journal, Piece
from deltastore.format.dtypes import DType
from deltastore.format.kernels_base import frozen

SIZE = 500
WIDTHS = (DType.U8, DType.BF16, DType.F32, DType.F64)


def _bits(dtype: DType, count: int, seed: int) -> Any:
    raw = np.random.default_rng(seed).bytes(count * dtype.item_bytes)
    return np.frombuffer(raw, dtype.bits_dtype).copy()


def _flat(bits: Any) -> torch.Tensor:
    return torch.from_numpy(bits.view(f"<i{bits.itemsize}") if bits.itemsize > 1 else bits)


def _pair(dtype: DType) -> tuple[Any, Any, HostMemory, DeviceMemory]:
    first, second = _bits(dtype, SIZE, 1), _bits(dtype, SIZE, 1)
    device = DeviceMemory(_flat(second), dtype, name="w", widened=False, scratch_bytes=64 << 20)
    return first, second, HostMemory(first), device


def _piece(dtype: DType, absolute: bool, numbers: type = np.uint32) -> Piece:
    rng = np.random.default_rng(2)
    offsets = np.sort(rng.permutation(SIZE - 20)[:120]).astype(numbers)
    elements = (offsets * 3 + 1).astype(numbers)
    values = _bits(dtype, offsets.size, 3)
    first = (1 << 47) + 5
    return Piece(frozen(offsets), 20, frozen(elements), first, frozen(values), absolute)


def _run(dtype: DType) -> Piece:
    some = frozen(np.arange(100, dtype=np.uint32))
    return Piece(some, 33, some, 1 << 40, frozen(_bits(dtype, 100, 4)), absolute=True, run=True)


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("kind", ["steps", "patterns", "run", "int64"])
def test_torch_does_what_the_kernels_do(dtype: DType, kind: str) -> None:
    """LAW 1: change, fingerprint, read, write and undo of every width, at places of either width,
    are the same through kernels and through torch."""
    first, second, host, device = _pair(dtype)
    piece = {
        "steps": lambda: _piece(dtype, absolute=False),
        "patterns": lambda: _piece(dtype, absolute=True),
        "run": lambda: _run(dtype),
        "int64": lambda: _piece(dtype, absolute=False, numbers=np.int64),
    }[kind]()
    assert host.change([piece]) == device.change([piece])
    assert host.fingerprint([piece]) == device.fingerprint([piece])
    assert np.array_equal(host.read(piece), device.read(piece))
    before, change, old = first.copy(), host.change([piece]), host.fingerprint([piece])
    journals = Journal(), Journal()
    for memory, journal in zip((host, device), journals, strict=True):
        memory.write(piece, journal)
        assert journal.done[0] == 1
    assert not np.array_equal(first, before)
    assert np.array_equal(first, second)
    assert host.fingerprint([piece]) == old + change
    for memory, journal in zip((host, device), journals, strict=True):
        memory.undo(piece, journal)
        assert journal.done[0] == 0
    assert np.array_equal(first, before)
    assert np.array_equal(second, before)


class Torn:
    """Live memory whose next write stops half way, on a device that then still works."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.tears = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.flat, name)

    def __getitem__(self, where: Any) -> torch.Tensor:
        return self.flat[where]

    def index_copy_(self, dim: int, places: torch.Tensor, values: torch.Tensor) -> None:
        """Write the first half, and raise, once."""
        if self.tears:
            self.tears -= 1
            half = places.numel() // 2
            self.flat.index_copy_(dim, places[:half], values[:half])
            raise RuntimeError("torn")
        self.flat.index_copy_(dim, places, values)


@pytest.mark.parametrize("counted", [False, True])
def test_a_write_that_was_interrupted_at_its_end_is_undone_once(counted: bool) -> None:
    """CASE R2: an interrupt between a write and its count, or right after that, undoes it once."""
    _first, second, _host, device = _pair(DType.BF16)
    before, piece, journal = second.copy(), _piece(DType.BF16, absolute=False), Journal()
    device.write(piece, journal)
    places = torch.from_numpy(piece.offsets.astype(np.int64)) + piece.base
    journal.writing = (0, places, _flat(before.copy())[places])
    journal.done[0] = int(counted)
    while journal.writing is not None or journal.done[0]:
        device.undo(piece, journal)
    assert np.array_equal(second, before)


@pytest.mark.parametrize("absolute", [False, True])
def test_a_write_that_stops_half_way_is_undone(absolute: bool) -> None:
    """CASE R2: of a piece that was written in part, and of those before it, nothing is left."""
    _first, second, _host, device = _pair(DType.BF16)
    before = second.copy()
    pieces = [_piece(DType.BF16, absolute), _run(DType.BF16)]
    journal = Journal()
    device.write(pieces[0], journal)
    device._flat = Torn(device._flat)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="torn"):
        device.write(pieces[1], journal)
    assert not np.array_equal(second, before)
    while journal.writing is not None or journal.done[0]:
        device.undo(pieces[max(int(journal.done[0]) - 1, 0)], journal)
    assert np.array_equal(second, before)
