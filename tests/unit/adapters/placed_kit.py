"""An engine whose ranks are threads, its weights placed in odd ways: what its tests share."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from deltastore.adapters.float_casts import widen
from deltastore.adapters.placed_target import PlacedTarget
from deltastore.adapters.placements import Placement, Region
from deltastore.adapters.torch_tensors import integer_view, torch_dtype
from deltastore.config import FollowerSettings
from deltastore.format.dtypes import DType
from deltastore.format.mixing import fingerprint_run, fingerprint_state
from deltastore.pipeline.group import ThreadGroup
from deltastore.pipeline.rank_applier import RankApplier, whole_fingerprint
from deltastore.pipeline.staged import StagedUpdate
from deltastore.repository.points import ActiveVersion
from deltastore.testing.clock import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deltastore.events import Event
    from deltastore.format.block import Block
    from deltastore.format.layout import BitState, Layout, TensorSpec

T = TypeVar("T")
HALVES = (DType.BF16, DType.F16)
STORAGES = ("plain", "transposed", "stepped", "narrowed", "widened", "twice")


def region_of(tensor: int, view: torch.Tensor) -> Region:
    """The region that a view of a tensor's own element numbers is."""
    pairs = [(n, s) for n, s in zip(view.shape, view.stride(), strict=True) if n != 1]
    sizes, strides = tuple(n for n, _ in pairs), tuple(s for _, s in pairs)
    return Region(tensor, view.storage_offset(), sizes, strides)


def numbers_of(region: Region) -> torch.Tensor:
    """The element numbers of a region, in its shape."""
    reach = region.offset + sum(
        (n - 1) * s for n, s in zip(region.sizes, region.strides, strict=True)
    )
    return torch.arange(reach + 1).as_strided(region.sizes, region.strides, region.offset)


def split(spec: TensorSpec, style: str, rank: int, ranks: int) -> list[torch.Tensor]:
    """Views of a tensor's element numbers: those that a rank of so many holds."""
    whole = torch.arange(spec.elements).reshape(spec.element_shape)
    if style == "rows" and spec.shape and spec.shape[0] >= ranks:
        return [whole.tensor_split(ranks, 0)[rank]]
    # The two halves of a complex number stay together.
    if style == "columns" and spec.shape and spec.shape[-1] >= ranks:
        dim = len(spec.shape) - 1
        return [whole.tensor_split(ranks, dim)[rank]]
    if style == "heads" and spec.shape and spec.shape[0] >= 2:
        heads = whole.tensor_split(2, 0)  # more ranks than heads: some hold the same one
        mine = {0} if ranks == 1 else {rank * 2 // ranks}
        return [heads[head] for head in (range(2) if ranks == 1 else sorted(mine))]
    if style == "steps" and spec.shape and spec.shape[0] >= 2:
        return [whole[::2], whole[1::2]]  # gate and up, interleaved
    if style == "one":
        return [whole] if rank == spec.first_element % ranks else []
    return [whole]


SPLITS = ("whole", "rows", "columns", "heads", "steps", "one")


def live_of(patterns: torch.Tensor, dtype: DType, storage: str) -> torch.Tensor:
    """A view of new live memory that holds those patterns: integers in the region's shape."""
    if storage == "widened":
        wide = widen(patterns.reshape(-1), dtype)
        return wide.view(torch.float32).reshape(patterns.shape)
    if dtype is DType.C64:
        live = torch.zeros(patterns.shape[:-1], dtype=torch.complex64)
    elif storage == "transposed":
        live = torch.zeros(tuple(reversed(patterns.shape)), dtype=torch_dtype(dtype))
        live = live.permute(tuple(reversed(range(live.dim()))))
    elif storage == "stepped" and patterns.dim():
        *outer, last = patterns.shape
        live = torch.zeros((*outer, 2 * last), dtype=torch_dtype(dtype))[..., ::2]
    elif storage == "narrowed" and patterns.dim():
        first, *inner = patterns.shape
        live = torch.zeros((first + 3, *inner), dtype=torch_dtype(dtype))[2 : first + 2]
    else:
        live = torch.zeros(patterns.shape, dtype=torch_dtype(dtype))
    integer_view(live).copy_(patterns)
    return live


@cache
def widened_patterns(dtype: DType) -> dict[int, int]:
    """The pattern of which an FP32 pattern is the widening; both as signed integers."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    return dict(zip(widen(every, dtype).tolist(), every.tolist(), strict=True))


def patterns_of(bits: np.ndarray[Any, Any]) -> torch.Tensor:
    """Bits as torch's integers of their width."""
    return torch.from_numpy(bits.view(f"<i{bits.itemsize}") if bits.itemsize > 1 else bits)


@dataclass(frozen=True)
class Plan:
    """How an engine holds its tensors: per tensor how it is split, and how parts are stored."""

    ranks: int
    splits: Sequence[str]
    storages: Sequence[str]

    def placements(self, state: BitState, rank: int) -> list[Placement]:
        """What a rank holds, in new memory."""
        found = []
        for tensor, spec in enumerate(state.layout.tensors):
            if not spec.elements:
                continue
            flat = patterns_of(state.arrays[tensor])
            for number, view in enumerate(split(spec, self.splits[tensor], rank, self.ranks)):
                if not view.numel():
                    continue
                region = region_of(tensor, view)
                storage = self.storages[tensor]
                if storage == "widened" and spec.dtype not in HALVES:
                    storage = "plain"
                values = flat[numbers_of(region)].reshape(region.sizes)
                copies = 2 if storage == "twice" else 1
                found += [
                    Placement(
                        region,
                        live_of(values, spec.dtype, storage),
                        f"{spec.name}.{number}.{copy}",
                        "module",
                        storage == "widened",
                    )
                    for copy in range(copies)
                ]
        return found

    def unused(self, layout: Layout, rank: int) -> list[int]:
        """Positions that a rank does not hold."""
        return [
            tensor
            for tensor, spec in enumerate(layout.tensors)
            if spec.elements and not split(spec, self.splits[tensor], rank, self.ranks)
        ]


@dataclass
class Engine:
    """Ranks that hold a state together."""

    plan: Plan
    state: BitState
    targets: list[PlacedTarget] = field(default_factory=list)
    appliers: list[RankApplier[Any]] = field(default_factory=list)
    placements: list[list[Placement]] = field(default_factory=list)
    groups: list[ThreadGroup] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        plan: Plan,
        state: BitState,
        *,
        make: Callable[..., PlacedTarget] = PlacedTarget,
        **settings: int,
    ) -> Engine:
        """An engine at version 0, proved."""
        made = cls(plan, state.copy())
        made.groups = ThreadGroup.of(plan.ranks)
        for rank in range(plan.ranks):
            placements = plan.placements(state, rank)
            made.placements.append(placements)
            made.targets.append(
                make(
                    state.layout,
                    placements,
                    unused=plan.unused(state.layout, rank),
                    unused_fingerprint=lambda tensor: fingerprint_run(
                        state.arrays[tensor], state.layout.tensors[tensor].first_element
                    ),
                )
            )
        found = made.run(lambda rank: whole_fingerprint(made.targets[rank], made.groups[rank]))
        assert found == [fingerprint_state(state)] * plan.ranks, found
        made.appliers = [
            RankApplier(
                target,
                point(0, state),
                made.groups[rank],
                name=f"rank{rank}",
                clock=FakeClock(),
                settings=FollowerSettings(**settings),
                sink=made.events.append,
            )
            for rank, target in enumerate(made.targets)
        ]
        return made

    def run(self, work: Callable[[int], T]) -> list[T | BaseException]:
        """Every rank does it, in a thread of its own; what each returned, or raised.

        A rank that raises SystemExit has died: its group is told.
        """
        found: list[Any] = [None] * self.plan.ranks

        def one(rank: int) -> None:
            try:
                found[rank] = work(rank)
            except BaseException as err:  # noqa: BLE001 - it is what the test looks at
                found[rank] = err
                if isinstance(err, SystemExit):
                    self.groups[rank].leave()

        threads = [threading.Thread(target=one, args=(r,)) for r in range(self.plan.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def activate(self, update: StagedUpdate) -> list[ActiveVersion | BaseException]:
        """Every rank prepares and activates the update."""

        def work(rank: int) -> ActiveVersion:
            applier = self.appliers[rank]
            return applier.activate(applier.prepare(update))

        return self.run(work)

    def held(self) -> BitState:
        """The state that all ranks hold together, read through torch alone; copies must agree.

        What nobody holds is as it was at the start.
        """
        layout = self.state.layout
        found = self.state.copy()
        seen = [np.zeros(spec.elements, bool) for spec in layout.tensors]
        for placement in (one for placements in self.placements for one in placements):
            spec = layout.tensors[placement.region.tensor]
            live = integer_view(placement.live).clone().reshape(-1).numpy()
            if placement.widened:
                table = widened_patterns(spec.dtype)
                live = np.array([table[wide] for wide in live.tolist()], np.int16)
            numbers = numbers_of(placement.region).reshape(-1).numpy()
            bits = live.view(spec.dtype.bits_dtype)
            array, known = found.arrays[placement.region.tensor], seen[placement.region.tensor]
            assert np.array_equal(array[numbers[known[numbers]]], bits[known[numbers]]), "copies"
            array[numbers] = bits
            known[numbers] = True
        return found


def point(version: int, state: BitState) -> ActiveVersion:
    """A version whose weights are that state."""
    return ActiveVersion(version, f"{version:064x}", fingerprint_state(state), 0)


def update_of(
    base: BitState, new: BitState, blocks: list[Block], first: int = 0, last: int = 1
) -> StagedUpdate:
    """Those blocks as a staged update."""
    return StagedUpdate(point(first, base), point(last, new), blocks, 0)
