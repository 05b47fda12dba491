"""Weights in runtime layout are not the checkpoint's: changes go where the loader put the element.

The part of an engine's weights that one process holds, as a RankTarget: through the placements that
the loader trace found, into live memory, never into a copy of it; and of dense-only tensors into
their shadows (`dense_shadow.py`), from which they are loaded anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

from deltastore.adapters.float_casts import is_narrowing
from deltastore.adapters.live_memory import DeviceMemory, HostMemory, Journal, LiveMemory, Piece
from deltastore.adapters.memory_overlap import overlaps_itself
from deltastore.adapters.placed_parts import HeldRegion, PlacedPart
from deltastore.adapters.placements import Region
from deltastore.adapters.safe_point_threads import Threads
from deltastore.adapters.torch_tensors import checkpoint_dtype, integer_view, torch_dtype
from deltastore.errors import InvalidInputError, Kind
from deltastore.format.coverage import list_names
from deltastore.format.fingerprint import ZERO
from deltastore.format.kernels_base import frozen
from deltastore.format.layout import require_same_layout
from deltastore.pipeline.rank_target import SCRATCH_MAX_BYTES, UnheldTensors
from deltastore.pipeline.tally import empty_tally, shape_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from deltastore.adapters.dense_shadow import DenseShadows
    from deltastore.adapters.placements import Placement
    from deltastore.format.block import Block
    from deltastore.format.dtypes import Bits
    from deltastore.format.fingerprint import Fingerprint
    from deltastore.format.layout import BitState, Layout, TensorSpec
    from deltastore.pipeline.tally import Tally

T = TypeVar("T")
R = TypeVar("R")


class PlacedTarget:
    """What one process holds of a layout.

    Args:
        placements: of this process. Their live views must stay what they are.
        shadows: of the dense-only tensors.
        unused: positions of the layout that this process does not hold.
        unused_fingerprint: of a tensor as the engine was loaded: asked for those that no process
            of the engine holds.
        scratch_max_bytes: of temporaries in torch: of one thread on a device, of all on the host.
        threads: that work on host memory at a safe point; None: one per processor that the calling
            thread may run on, 8 at most.

    Raises InvalidInputError (tensor_names, tensor_shape, tensor_dtype, tensor_storage, box) when a
    tensor is neither placed, shadowed nor unused, or a placement is not what it says.
    """

    def __init__(
        self,
        layout: Layout,
        placements: Iterable[Placement],
        *,
        shadows: DenseShadows | None = None,
        unused: Collection[int] = (),
        unused_fingerprint: Callable[[int], Fingerprint] | None = None,
        scratch_max_bytes: int = SCRATCH_MAX_BYTES,
        threads: int | None = None,
    ) -> None:
        self._threads = Threads(threads)
        self._caller = Threads(1)
        self._layout = layout
        self._shadows = shadows
        self._held: list[HeldRegion] = []
        self._by_tensor: dict[int, list[HeldRegion]] = {}
        self.unheld = UnheldTensors(unused, unused_fingerprint)
        for placement in placements:
            spec = _spec(layout, placement.region)
            memory, strides = _window(placement, spec, scratch_max_bytes, self._threads.count)
            self._hold(placement.region, spec, memory, strides)
        for tensor, bits in ({} if shadows is None else shadows.arrays).items():
            spec = layout.tensors[tensor]
            sizes, strides = ((), ()) if spec.elements == 1 else ((spec.elements,), (1,))
            self._hold(Region(tensor, 0, sizes, strides), spec, HostMemory(bits), strides)
        self._keys = _keys(self._held)
        self._require_all()

    @property
    def layout(self) -> Layout:
        """The tensor table that positions refer to."""
        return self._layout

    def plan(self, blocks: Sequence[Block]) -> list[PlacedPart]:
        """Locate what meets this process; any thread; touches no live weights."""
        parts: list[PlacedPart] = []
        for block in blocks:
            _check_block(self._layout, block)
            if not block.values.size:
                continue
            for held in self._by_tensor.get(block.tensor, ()):
                part = held.part_of(block)
                if part is not None:
                    parts.append(part)
        return parts

    def tally(self, parts: Sequence[PlacedPart], tensors: Sequence[int]) -> Tally:
        """Pass 1, read only: the change of every region that it holds of `tensors`."""
        found = self._each_part(parts, PlacedPart.change)
        changes: dict[int, Fingerprint] = {}
        for part, change in zip(parts, found, strict=True):
            number = part.held.number
            changes[number] = changes[number] + change if number in changes else change
        held = [held for tensor in tensors for held in self._by_tensor.get(tensor, ())]
        return self._rows(held, [changes.get(one.number, ZERO) for one in held])

    def write_all(self, parts: Sequence[PlacedPart], *, keep: bool) -> None:
        """Pass 2: write the parts in place. Whatever it raises, each knows how far it came."""
        if self._shadows is not None:
            self._shadows.begin()  # first: also a write that fails at once is undone to this
        self._each_part(parts, lambda part: self.write(part, keep=keep))

    def undo_all(self, parts: Sequence[PlacedPart]) -> None:
        """Undo what was written of the parts: all, some, or nothing."""
        with torch.inference_mode():
            for part in reversed(parts):
                self.undo(part)

    def write(self, part: PlacedPart, *, keep: bool) -> None:
        """Write one part: what a test of failures takes the place of."""
        part.write(keep=keep)

    def undo(self, part: PlacedPart) -> None:
        """Undo one part."""
        part.undo()

    def settle(self, tensors: Sequence[int], *, undoing: bool) -> None:
        """Wait for the device; load dense-only tensors anew where one of their closure changed."""
        for tensor in tensors:
            for held in self._by_tensor.get(tensor, ()):
                held.memory.finish()
        if self._shadows is not None:
            self._shadows.reload(tensors, self.read_tensor, undoing=undoing)

    def whole(self) -> Tally:
        """One pass over all that this process holds."""
        held = self._held
        found = self._each_region(held, HeldRegion.fingerprint)
        return self._rows(held, found)

    def check_derived(self) -> None:
        """IntegrityError(digest) when reloaded modules hold other bytes than after the reload."""
        if self._shadows is not None:
            self._shadows.check()

    def write_state(self, state: BitState) -> None:
        """Write a whole state, in place, and load all dense-only tensors anew."""
        require_same_layout(self._layout.digest, state.layout.digest, what="the whole state")

        def fill(held: HeldRegion) -> None:
            bits = state.arrays[held.region.tensor]
            for piece in held.pieces():
                held.memory.write(_filled(held, piece, bits), Journal(keep=False))

        if self._shadows is not None:
            self._shadows.begin()
        self._each_region(self._held, fill)
        self.settle(range(len(self._layout)), undoing=False)

    @torch.no_grad()
    def read_tensor(self, tensor: int) -> torch.Tensor:
        """A copy of what this process holds of a tensor, in its checkpoint shape, on the host.

        Elements that it does not hold are zero.
        """
        spec = self._layout.tensors[tensor]
        bits = torch.zeros(spec.elements * spec.dtype.element_bits // 8, dtype=torch.uint8)
        flat = bits.numpy().view(spec.dtype.bits_dtype)
        for held in self._by_tensor.get(tensor, ()):
            for piece in held.pieces():
                at = piece.elements.astype("i8") + (piece.first - spec.first_element)
                flat[at] = held.memory.read(piece)
        return bits.view(torch_dtype(spec.dtype)).reshape(spec.shape)

    def _each_part(self, parts: Sequence[PlacedPart], work: Callable[[PlacedPart], R]) -> list[R]:
        return self._each(parts, work, lambda part: part.held, lambda part: part.nnz)

    def _each_region(self, held: Sequence[HeldRegion], work: Callable[[HeldRegion], R]) -> list[R]:
        return self._each(held, work, lambda one: one, lambda one: one.region.elements)

    def _each(
        self,
        items: Sequence[T],
        work: Callable[[T], R],
        held_of: Callable[[T], HeldRegion],
        weight: Callable[[T], int],
    ) -> list[R]:
        """Threads share what lies on the host; a device gets its work from this one alone."""
        found: dict[int, R] = {}
        for threads, on_host in ((self._caller, False), (self._threads, True)):
            at = [n for n, one in enumerate(items) if held_of(one).memory.on_host is on_host]
            found |= zip(at, threads.each([items[n] for n in at], work, weight), strict=True)
        return [found[n] for n in range(len(items))]

    def _hold(
        self, region: Region, spec: TensorSpec, memory: LiveMemory, strides: tuple[int, ...]
    ) -> None:
        held = HeldRegion(len(self._held), region, spec, memory, strides)
        self._held.append(held)
        self._by_tensor.setdefault(region.tensor, []).append(held)

    def _rows(self, held: Sequence[HeldRegion], found: Sequence[Fingerprint]) -> Tally:
        rows = self._keys[[one.number for one in held]] if held else empty_tally()
        rows["low"] = [one.low for one in found]
        rows["high"] = [one.high for one in found]
        return rows

    def _require_all(self) -> None:
        missing = [
            spec.name
            for tensor, spec in enumerate(self._layout.tensors)
            if spec.elements and tensor not in self._by_tensor and tensor not in self.unheld.tensors
        ]
        twice = self.unheld.tensors.intersection(self._by_tensor)
        if missing or twice:
            names = missing or [self._layout.tensors[tensor].name for tensor in sorted(twice)]
            raise InvalidInputError(
                f"{len(names)} tensors are {'not placed' if missing else 'placed and unused'}:"
                f" {list_names(names)}",
                kind=Kind.TENSOR_NAMES,
                hint="every tensor is placed, dense-only, or unused",
            )


def on_host(flat: torch.Tensor) -> bool:
    """Whether kernels can run on that memory itself."""
    return flat.device.type == "cpu"


def _spec(layout: Layout, region: Region) -> TensorSpec:
    """The tensor that a region is of, if it lies in it as it says."""
    if not 0 <= region.tensor < len(layout):
        raise InvalidInputError(f"no tensor {region.tensor} in the layout", kind=Kind.FIELD)
    spec = layout.tensors[region.tensor]
    pairs = list(zip(region.sizes, region.strides, strict=True))
    reach = sum((n - 1) * s for n, s in pairs)
    inner = 0  # the extent of what follows, less one
    ordered = True
    for size, stride in reversed(pairs):
        ordered = ordered and size >= 1 and stride > inner
        inner += (size - 1) * stride
    if region.elements and (region.offset < 0 or region.offset + reach >= spec.elements):
        ordered = False
    if not ordered and region.elements:
        raise InvalidInputError(
            f"region {region.offset} {region.sizes} {region.strides} is not one of {spec.name!r}"
            f" {list(spec.element_shape)}",
            kind=Kind.BOX,
        )
    return spec


def _window(
    placement: Placement, spec: TensorSpec, scratch_max_bytes: int, threads: int
) -> tuple[LiveMemory, tuple[int, ...]]:
    """The memory that a placement lies in, and its strides there."""
    named = placement.parameter
    live = placement.live.detach()
    dtype = checkpoint_dtype(live.dtype)
    widened = placement.widened and dtype is not spec.dtype
    if dtype is not spec.dtype and not (
        placement.widened and dtype is not None and is_narrowing(dtype, spec.dtype)
    ):
        raise InvalidInputError(
            f"{named!r} of {live.dtype} cannot hold {spec.name!r} of {spec.dtype.value}",
            kind=Kind.TENSOR_DTYPE,
        )
    patterns = integer_view(live)
    if tuple(patterns.shape) != placement.region.sizes:
        raise InvalidInputError(
            f"{named!r} {list(patterns.shape)} is not the region {list(placement.region.sizes)}"
            f" of {spec.name!r}",
            kind=Kind.TENSOR_SHAPE,
        )
    strides = tuple(patterns.stride())
    if patterns.numel() and overlaps_itself(tuple(patterns.shape), strides):
        raise InvalidInputError(
            f"{named!r} has several elements in one place", kind=Kind.TENSOR_STORAGE
        )
    reach = 1 + sum((n - 1) * s for n, s in zip(patterns.shape, strides, strict=True))
    size = reach if patterns.numel() else 0
    flat = patterns.as_strided((size,), (1,), patterns.storage_offset())
    if on_host(flat) and not widened:
        return HostMemory(flat.numpy().view(spec.dtype.bits_dtype)), strides
    scratch_bytes = scratch_max_bytes // (threads if flat.device.type == "cpu" else 1)
    memory = DeviceMemory(
        flat, spec.dtype, name=named, widened=widened, scratch_bytes=scratch_bytes
    )
    return memory, strides


def _keys(held: Sequence[HeldRegion]) -> Tally:
    rows = empty_tally(len(held))
    rows["tensor"] = [one.region.tensor for one in held]
    rows["offset"] = [one.region.offset for one in held]
    rows["shape"] = [shape_digest(one.region.sizes, one.region.strides) for one in held]
    return rows


def _filled(held: HeldRegion, piece: Piece, bits: Bits) -> Piece:
    """A piece that writes what a whole tensor's bits are there."""
    first = piece.first - held.spec.first_element
    if piece.run:
        values = bits[first : first + piece.offsets.size]
    else:
        values = bits[piece.elements.astype("i8") + first]
    return Piece(
        piece.offsets, piece.base, piece.elements, piece.first, frozen(values), True, piece.run
    )


def _check_block(layout: Layout, block: Block) -> None:
    """Kernels do no bounds checks: what does not fit is refused here."""
    if not 0 <= block.tensor < len(layout):
        raise InvalidInputError(f"no tensor {block.tensor} in the layout", kind=Kind.FIELD)
    spec = layout.tensors[block.tensor]
    count = block.box.elements if block.indices is None else block.indices.size
    last = int(block.indices[-1]) if block.indices is not None and count else -1
    if (
        not block.box.fits(spec.element_shape)
        or block.values.dtype != spec.dtype.bits_dtype
        or block.values.shape != (count,)
        or last >= block.box.elements
    ):
        raise InvalidInputError(
            f"block at {block.box} of {block.values.size} {block.values.dtype} does not fit"
            f" {spec.name!r}",
            kind=Kind.BOX,
        )
