"""A write that stops half way must be undone: who writes a piece notes when it is wholly written.

Live weights as one-dimensional windows of patterns, read and written at offsets that were worked
out beforehand. `HostMemory` runs the kernels on live memory itself; `DeviceMemory` does the same in
torch, on the tensors' own device or where they hold exact widenings, and is checked against it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from deltastore.adapters.float_casts import narrow_exact, widen
from deltastore.adapters.torch_tensors import device_patterns
from deltastore.errors import IntegrityError, Kind
from deltastore.format.fingerprint import ZERO, Fingerprint
from deltastore.format.kernels_base import frozen
from deltastore.format.kernels_fingerprint import (
    HIGH_KEYS,
    HIGH_SHIFTS,
    LOW_KEYS,
    LOW_SHIFTS,
    mix_run,
)
from deltastore.format.kernels_placed import (
    add_steps,
    change_at,
    mix_at,
    put_back,
    swap,
    take_steps,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from deltastore.format.dtypes import Bits, DType

PIECE_ELEMENTS = 1 << 22
HOST_RUN_ELEMENTS = 1 << 16
"""They stay in a processor's cache. On a device a piece costs some forty launches: it is large."""
DEVICE_BYTES_PER_ELEMENT = 96
"""What the torch operations of one piece allocate at most, per element."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Some elements of one tensor and where they are in a window.

    Args:
        offsets: uint32 or int64, read-only, without repeats; the places are base + offsets.
        elements: likewise; the flat element indices are first + elements.
        values: steps or new patterns, one each; None where they are only read.
        absolute: whether `values` are patterns.
        run: whether offsets and elements both are 0, 1, 2, …
    """

    offsets: NDArray[Any]
    base: int
    elements: NDArray[Any]
    first: int
    values: Bits | None = None
    absolute: bool = False
    run: bool = False


@dataclass(slots=True, eq=False)
class Journal:
    """How far the pieces of one part are written.

    Args:
        done: one number: pieces wholly written.
        kept: old bits of the absolute pieces that are done, if they are kept.
        writing: of the piece in hand its number, places and old bits, where a write can fail half
            way.
    """

    done: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    kept: list[Any] = field(default_factory=list)
    writing: tuple[int, torch.Tensor, torch.Tensor] | None = None
    keep: bool = True

    def clear(self) -> None:
        """As if nothing had been written."""
        self.done[0] = 0
        self.kept.clear()
        self.writing = None


class LiveMemory(Protocol):
    """A window of patterns."""

    size: int
    """Elements in the window."""
    piece_elements: int
    """Most elements in one piece."""

    @property
    def run_elements(self) -> int:
        """Most elements in one piece that is made when it is needed: of dense blocks, of wholes."""
        ...

    @property
    def on_host(self) -> bool:
        """Whether this process's own threads do the work."""
        ...

    def change(self, pieces: Iterable[Piece]) -> Fingerprint:
        """What writing the pieces would add to the fingerprint; IntegrityError(fingerprint)."""
        ...

    def fingerprint(self, pieces: Iterable[Piece]) -> Fingerprint:
        """Of what is there now; IntegrityError(fingerprint)."""
        ...

    def read(self, piece: Piece) -> Bits:
        """A copy of the patterns that are there."""
        ...

    def write(self, piece: Piece, journal: Journal) -> None:
        """Write the piece, and count it as done."""
        ...

    def undo(self, piece: Piece, journal: Journal) -> None:
        """Undo the piece that was done last, or is in hand."""
        ...

    def finish(self) -> None:
        """Wait until all that was written is there; raises what went wrong meanwhile."""
        ...


class HostMemory:
    """Patterns in this process's own memory.

    A kernel raises nothing, and no exception can come between its writes and its count.
    """

    piece_elements = PIECE_ELEMENTS
    run_elements = HOST_RUN_ELEMENTS
    on_host = True

    def __init__(self, bits: Bits) -> None:
        self._bits = bits
        self.size = int(bits.size)

    def change(self, pieces: Iterable[Piece]) -> Fingerprint:
        """What writing the pieces would add to the fingerprint."""
        return _sum(map(self._change, pieces))

    def _change(self, piece: Piece) -> Fingerprint:
        low, high = change_at(
            self._bits,
            piece.offsets,
            piece.base,
            piece.elements,
            piece.first,
            piece.values,
            piece.absolute,
        )
        return Fingerprint(int(low), int(high))

    def fingerprint(self, pieces: Iterable[Piece]) -> Fingerprint:
        """Of what is there now."""
        return _sum(map(self._fingerprint, pieces))

    def _fingerprint(self, piece: Piece) -> Fingerprint:
        if piece.run:
            run = self._bits[piece.base : piece.base + piece.offsets.size]
            low, high = mix_run(frozen(run), piece.first)
        else:
            low, high = mix_at(self._bits, piece.offsets, piece.base, piece.elements, piece.first)
        return Fingerprint(int(low), int(high))

    def read(self, piece: Piece) -> Bits:
        """A copy of the patterns that are there."""
        if piece.run:
            return self._bits[piece.base : piece.base + piece.offsets.size].copy()
        found: Bits = self._bits[piece.offsets.astype(np.int64) + piece.base]
        return found

    def write(self, piece: Piece, journal: Journal) -> None:
        """Write the piece, and count it as done."""
        if not piece.absolute:
            add_steps(self._bits, piece.offsets, piece.base, piece.values, journal.done)
            return
        old = np.empty(piece.offsets.size if journal.keep else 0, self._bits.dtype)
        del journal.kept[int(journal.done[0]) :]
        journal.kept.append(old)
        swap(self._bits, piece.offsets, piece.base, piece.values, old, journal.done)

    def undo(self, piece: Piece, journal: Journal) -> None:
        """Undo the piece that was done last."""
        if piece.absolute:
            old = frozen(journal.kept[int(journal.done[0]) - 1])
            put_back(self._bits, piece.offsets, piece.base, old, journal.done)
        else:
            take_steps(self._bits, piece.offsets, piece.base, piece.values, journal.done)

    def finish(self) -> None:
        """Nothing is under way."""


class DeviceMemory:
    """Patterns on any torch device, of the layout's dtype or as FP32 that holds them widened.

    All index math is int64, all patterns are integers. Temporaries stay below `scratch_bytes`, but
    for pieces of at least 2^10 elements. A sum over pieces waits for the device once, at its end;
    so does every piece where FP32 must be proved to hold nothing but widenings, and every piece
    whose old bits are kept: those go to the host.

    Args:
        flat: one-dimensional integer view of live memory (int32 of FP32 where widened).
        dtype: of the layout.
        name: of the runtime parameter, for errors.
    """

    def __init__(
        self, flat: torch.Tensor, dtype: DType, *, name: str, widened: bool, scratch_bytes: int
    ) -> None:
        self._flat = flat
        self._dtype = dtype
        self._name = name
        self._widened = widened
        self.size = flat.numel()
        most = scratch_bytes // DEVICE_BYTES_PER_ELEMENT
        self.piece_elements = min(max(most, 1 << 10), PIECE_ELEMENTS)

    @property
    def run_elements(self) -> int:
        """All that the scratch memory has room for."""
        return self.piece_elements

    @property
    def on_host(self) -> bool:
        """Whether this process's own threads do the work."""
        return self._flat.device.type == "cpu"

    def change(self, pieces: Iterable[Piece]) -> Fingerprint:
        """What writing the pieces would add to the fingerprint."""
        return self._point(map(self._change, pieces))

    def _change(self, piece: Piece) -> torch.Tensor:
        old = self._patterns(self._live(piece))
        new = self._given(piece)
        if not piece.absolute:
            new = old + new
        elements = self._elements(piece)
        return _difference(elements, _zero_extended(old), _zero_extended(new))

    def fingerprint(self, pieces: Iterable[Piece]) -> Fingerprint:
        """Of what is there now."""
        return self._point(map(self._fingerprint, pieces))

    def _fingerprint(self, piece: Piece) -> torch.Tensor:
        bits = _zero_extended(self._patterns(self._live(piece)))
        elements = self._elements(piece)
        low = _lane(elements, bits, LOW_KEYS, LOW_SHIFTS).sum()
        return torch.stack((low, _lane(elements, bits, HIGH_KEYS, HIGH_SHIFTS).sum()))

    def _point(self, changes: Iterable[torch.Tensor]) -> Fingerprint:
        """The sum of both lanes of all pieces, added up on the device."""
        total = torch.zeros(2, dtype=torch.int64, device=self._flat.device)
        for change in changes:
            total += change
        low, high = total.tolist()
        return Fingerprint(low & _MASK, high & _MASK)

    def read(self, piece: Piece) -> Bits:
        """A copy of the patterns that are there."""
        found = self._patterns(self._live(piece)).cpu().numpy().view(self._dtype.bits_dtype)
        return found.copy() if piece.run else found

    def write(self, piece: Piece, journal: Journal) -> None:
        """Write the piece, and count it as done."""
        places = self._places(piece)
        old = self._flat.index_select(0, places)
        new = self._given(piece)
        if not piece.absolute:
            new = self._patterns(old) + new
        journal.writing = (int(journal.done[0]), places, old)
        self._flat.index_copy_(0, places, self._as_live(new))
        del journal.kept[int(journal.done[0]) :]
        journal.kept.append(old.cpu() if piece.absolute and journal.keep else None)
        journal.done[0] += 1
        journal.writing = None

    def undo(self, piece: Piece, journal: Journal) -> None:
        """Undo the piece that was done last, or is in hand."""
        if journal.writing is not None:
            journal.done[0], places, old = journal.writing
            self._flat.index_copy_(0, places, old)
            journal.writing = None
            return
        places = self._places(piece)
        if piece.absolute:
            back = journal.kept[int(journal.done[0]) - 1].to(self._flat.device)
        else:
            now = self._patterns(self._flat.index_select(0, places))
            back = self._as_live(now - self._given(piece))
        self._flat.index_copy_(0, places, back)
        journal.done[0] -= 1

    def finish(self) -> None:
        """Wait for the device."""
        if not self.on_host:
            torch.accelerator.synchronize(self._flat.device)

    def _live(self, piece: Piece) -> torch.Tensor:
        if piece.run:
            return self._flat[piece.base : piece.base + piece.offsets.size]
        return self._flat.index_select(0, self._places(piece))

    def _patterns(self, live: torch.Tensor) -> torch.Tensor:
        """The layout's patterns of what is there."""
        if not self._widened:
            return live
        exact = narrow_exact(live, self._dtype)
        if exact is None:
            raise IntegrityError(
                f"FP32 parameter {self._name!r} holds a value that {self._dtype.value} has not",
                kind=Kind.FINGERPRINT,
                hint="something else writes to the live weights: load them again",
            )
        return exact

    def _as_live(self, patterns: torch.Tensor) -> torch.Tensor:
        return widen(patterns, self._dtype) if self._widened else patterns

    def _given(self, piece: Piece) -> torch.Tensor:
        if piece.values is None:
            raise ValueError("a piece that is only read was to be written")
        return device_patterns(piece.values, self._flat.device)

    def _places(self, piece: Piece) -> torch.Tensor:
        return self._numbers(piece.offsets, piece.base, piece.run)

    def _elements(self, piece: Piece) -> torch.Tensor:
        return self._numbers(piece.elements, piece.first, piece.run)

    def _numbers(self, array: NDArray[Any], base: int, run: bool) -> torch.Tensor:
        device = self._flat.device
        if run:
            return torch.arange(base, base + array.size, device=device)
        narrow = device_patterns(array, device)  # int32: half of what int64 costs to copy there
        wide = narrow.to(torch.int64)
        return (wide & 0xFFFFFFFF if array.itemsize == 4 else wide) + base


def _zero_extended(patterns: torch.Tensor) -> torch.Tensor:
    wide = patterns.to(torch.int64)
    bits = patterns.element_size() * 8
    return wide if bits == 64 or patterns.dtype is torch.uint8 else wide & ((1 << bits) - 1)


@cache
def _signed(key: int) -> int:
    return key - (1 << 64) if key >> 63 else key


def _lane(
    elements: torch.Tensor, bits: torch.Tensor, keys: tuple[int, ...], shifts: tuple[int, int]
) -> torch.Tensor:
    """One lane of the mix of each element, in wrapping int64 (FORMAT.md, "Fingerprint")."""
    constant, of_element, of_bits, of_mix = (_signed(key) for key in keys)
    x = elements * of_element
    x += constant
    x += bits * of_bits
    x ^= (x >> shifts[0]) & ((1 << (64 - shifts[0])) - 1)
    x *= of_mix
    x ^= (x >> shifts[1]) & ((1 << (64 - shifts[1])) - 1)
    return x


def _difference(elements: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    low = _lane(elements, new, LOW_KEYS, LOW_SHIFTS)
    low -= _lane(elements, old, LOW_KEYS, LOW_SHIFTS)
    low = low.sum()
    high = _lane(elements, new, HIGH_KEYS, HIGH_SHIFTS)
    high -= _lane(elements, old, HIGH_KEYS, HIGH_SHIFTS)
    return torch.stack((low, high.sum()))


def _sum(changes: Iterable[Fingerprint]) -> Fingerprint:
    return sum(changes, ZERO)
