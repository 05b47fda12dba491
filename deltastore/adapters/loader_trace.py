"""Where an engine puts checkpoint elements is known to its loader only: so the loader is asked.

The loader runs once on stand-ins for all tensors of the layout, and every write it would make is
recorded and left undone. A tensor whose elements are copied as they are gets placements; any other
is *dense-only*, with the reason. Nothing in the module may change: digests of its memory from
before and after must be equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deltastore.adapters.lineage import stand_in
from deltastore.adapters.loader_memory import ModuleMemory
from deltastore.adapters.loader_places import place_writes
from deltastore.adapters.loader_recorder import RebindWatch, Recorder
from deltastore.adapters.loader_verify import verify_bytes
from deltastore.adapters.torch_tensors import torch_dtype
from deltastore.errors import InvalidInputError, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from deltastore.adapters.placements import Placement, Reach
    from deltastore.format.layout import Layout

    LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

__all__ = ["LoaderTrace", "trace_loader", "verify_bytes"]


@dataclass(frozen=True, slots=True, eq=False)
class LoaderTrace:
    """What a loader does with each tensor of a layout, in this process.

    Args:
        placements: where elements live that are copied as they are.
        dense_only: layout position of every tensor that is no set of placements -> why.
        unused: positions of tensors that the loader took and put nowhere in this process.
        reaches: every place in the module's memory that the loader writes, and from what.
        forms: runtime names of parameters that are kept in another form after loading -> the
            form in which the loader knows them.
        computed: runtime names of parameters that the engine computes from others.
    """

    placements: tuple[Placement, ...]
    dense_only: Mapping[int, str]
    unused: tuple[int, ...]
    reaches: tuple[Reach, ...]
    forms: Mapping[str, torch.Tensor]
    computed: frozenset[str]


def trace_loader(
    module: torch.nn.Module,
    load_weights: LoadWeights,
    layout: Layout,
    *,
    forms: Mapping[str, torch.Tensor] | None = None,
    derived: Mapping[str, str] | None = None,
    computed: Collection[str] = (),
) -> LoaderTrace:
    """Run a module's loader on stand-ins for every tensor of the layout, in one call.

    Tied tensors are offered under their canonical name; under all names only if the loader will
    not have it so. The module is left as it was.

    Args:
        forms: runtime names of parameters that the engine keeps in another form after loading
            -> tensors on the meta device in the form that the loader knows.
        derived: runtime names of modules from whose weights the engine computes others after
            loading -> what: tensors that go there are dense-only.
        computed: runtime names of the parameters that it computes.

    Raises:
        InvalidInputError(loader): the loader raised; names the tensor it was at.
        IntegrityError(digest): the loader changed the module's memory all the same.
    """
    memory = ModuleMemory(module)
    before = memory.digests()
    forms = forms or {}
    with memory.bound(forms):
        try:
            recorder = _run(memory, load_weights, layout, aliases=False)
        except InvalidInputError:
            memory.require_unchanged(before)
            if not any(spec.aliases for spec in layout.tensors):
                raise
            recorder = _run(memory, load_weights, layout, aliases=True)
        placed = place_writes(recorder, memory, layout, derived or {})
    memory.require_unchanged(before)
    reached = {tensor for reach in placed.reaches for tensor in reach.tensors}
    empty = {t for t, spec in enumerate(layout.tensors) if spec.elements == 0}
    unused = set(range(len(layout))) - reached - set(placed.dense_only) - empty
    return LoaderTrace(
        placed.placements,
        placed.dense_only,
        tuple(sorted(unused)),
        placed.reaches,
        forms,
        frozenset(computed),
    )


def _run(
    memory: ModuleMemory, load_weights: LoadWeights, layout: Layout, *, aliases: bool
) -> Recorder:
    recorder = Recorder(memory.storages)
    offered = _Offer(layout, memory.device, aliases=aliases)
    try:
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            recorder,
            RebindWatch(recorder),
        ):
            load_weights(offered)
    except Exception as err:
        memory.restore()
        raise InvalidInputError(
            f"the loader failed at tensor {offered.name!r} of the layout:"
            f" {type(err).__name__}: {err}",
            kind=Kind.LOADER,
            hint="is the layout's checkpoint of this model?",
        ) from err
    for owner, value in memory.restore():
        tensor = value if isinstance(value, torch.Tensor) else None
        if owner is not None:
            recorder.rebind(owner.tensor, owner.tensor if tensor is None else tensor)
        elif tensor is not None:
            recorder.distrust(tensor, "kept outside of the parameters")
    return recorder


class _Offer:
    """The stand-ins by name, in layout order; remembers which one was asked for last.

    They are made before the loader runs: made under a recorder each would take a millisecond.
    """

    def __init__(self, layout: Layout, device: torch.device, *, aliases: bool) -> None:
        self.name = ""
        self._made = [
            (name, made)
            for position, spec in enumerate(layout.tensors)
            for made in (stand_in(position, spec.shape, torch_dtype(spec.dtype), device),)
            for name in (spec.name, *(spec.aliases if aliases else ()))
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, made in self._made:
            self.name = name
            yield name, made
