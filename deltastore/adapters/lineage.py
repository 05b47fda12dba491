"""A loader run on real weights tells nothing: run on stand-ins it says where every element goes.

A *stand-in* has the shape, dtype and device of a checkpoint tensor, no memory, and a *lineage*:
which checkpoint elements it would hold. Views and pure copies keep the lineage element by element;
anything else makes it *opaque*, with the reason and the names of all tensors it depends on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from deltastore.adapters import pieces as algebra
from deltastore.adapters.pieces import NotStridedError, Pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HALVES = (torch.bfloat16, torch.float16)
"""Their patterns are exactly those of the FP32 numbers they widen to."""


@dataclass(slots=True, eq=False)
class Memory:
    """What all views of one stand-in share: a write through one is seen by all.

    Args:
        changed: why its contents are no longer those of the lineage; empty if they are.
        cleared: whether the whole was overwritten with a constant.
        sources: positions of tensors that were mixed in.
    """

    elements: int
    changed: str = ""
    cleared: bool = False
    sources: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, eq=False)
class Lineage:
    """Which checkpoint elements a tensor consists of.

    Args:
        pieces: boxes of checkpoint elements; what they leave out is constant.
        sources: positions of every tensor it depends on, traced or not.
        widened: the dtype it had before it was widened to FP32, exactly; None if it was not.
        opaque: why the pieces do not say it; empty if they do.
    """

    pieces: Pieces = ()
    sources: frozenset[int] = frozenset()
    widened: torch.dtype | None = None
    opaque: str = ""


class StandIn(torch.Tensor):
    """A tensor without memory; only the recorder of a trace can compute with it."""

    meta: torch.Tensor
    memory: Memory
    _lineage: Lineage

    @staticmethod
    def __new__(
        cls, meta: torch.Tensor, device: torch.device, lineage: Lineage, memory: Memory
    ) -> StandIn:
        """Wrap a meta tensor: its sizes, strides and dtype, on `device`."""
        made: StandIn = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        made.meta = meta
        made.memory = memory
        made._lineage = lineage
        return made

    def __init__(self, *_: object) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        """Shape and origin: the elements do not exist."""
        return f"StandIn({tuple(self.shape)}, {self.dtype}, of {sorted(self.lineage.sources)})"

    @property
    def lineage(self) -> Lineage:
        """What it consists of now."""
        if self.memory.changed:
            sources = self._lineage.sources | self.memory.sources
            return Lineage(sources=sources, opaque=self.memory.changed)
        return Lineage() if self.memory.cleared else self._lineage

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        """Outside a trace nothing may be done with it."""
        raise RuntimeError(f"{func} of a stand-in outside its trace: it has no elements")


def stand_in(
    source: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> StandIn:
    """The stand-in of one checkpoint tensor."""
    lineage = Lineage(algebra.whole_tensor(source, shape), frozenset({source}))
    return fresh(torch.empty(tuple(shape), dtype=dtype, device="meta"), device, lineage)


def fresh(meta: torch.Tensor, device: torch.device, lineage: Lineage) -> StandIn:
    """A stand-in with memory of its own."""
    return StandIn(meta, device, lineage, Memory(meta.numel()))


def opaque(reason: str, sources: frozenset[int]) -> Lineage:
    """A lineage of which only the sources are known."""
    return Lineage(sources=sources, opaque=reason)


def view_of(base: StandIn, meta: torch.Tensor, name: str, args: Sequence[Any]) -> StandIn:
    """The result of a view operation on a stand-in.

    Args:
        meta: what the operation made of `base.meta` (of one of several results: that one).
        name: of the operation, as ATen has it.
        args: its arguments after the tensor; of one of several results those of the
            operation that makes that one alone.
    """
    lineage = base._lineage
    if not lineage.opaque and lineage.pieces:
        change = _VIEWS.get(name)
        try:
            if change is None:
                lineage = opaque(f"seen through {name}", lineage.sources)
            else:
                pieces = change(lineage.pieces, base.meta, meta, args)
                lineage = replace(lineage, pieces=pieces)
        except NotStridedError as err:
            lineage = opaque(str(err), lineage.sources)
    return StandIn(meta, base.device, lineage, base.memory)


def copied(lineage: Lineage, source: torch.dtype, target: torch.dtype) -> Lineage:
    """The lineage after a conversion of dtype: kept if none, or if it widens exactly."""
    if source == target or lineage.opaque or not lineage.sources:
        return lineage
    if source in HALVES and target == torch.float32 and lineage.widened is None:
        return replace(lineage, widened=source)
    return opaque(f"cast from {_dtype_name(source)} to {_dtype_name(target)}", lineage.sources)


def expanded(lineage: Lineage, old: Sequence[int], new: Sequence[int]) -> Lineage:
    """The lineage of a tensor of shape `old` where it is copied to all of `new`."""
    return replace(lineage, pieces=algebra.expand(lineage.pieces, old, new))


def joined(parts: Sequence[tuple[Lineage, Sequence[int]]], dim: int) -> Lineage:
    """The lineage of a concatenation; each part with its shape."""
    sources = frozenset[int]().union(*(lineage.sources for lineage, _ in parts))
    reason = next((lineage.opaque for lineage, _ in parts if lineage.opaque), "")
    widened = {lineage.widened for lineage, _ in parts if lineage.sources}
    if len(widened) > 1:
        reason = reason or "joined with a tensor of another dtype"
    if reason:
        return opaque(reason, sources)
    pieces: list[algebra.Piece] = []
    at = 0
    for lineage, shape in parts:
        pieces += algebra.shift(lineage.pieces, dim, at)
        at += shape[dim]
    return Lineage(tuple(pieces), sources, widened.pop() if widened else None)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dim(tensor: torch.Tensor, dim: int, extra: int = 0) -> int:
    return dim % max(1, tensor.dim() + extra)


def _same(pieces: Pieces, *_: object) -> Pieces:
    return pieces


def _reshape(pieces: Pieces, old: torch.Tensor, new: torch.Tensor, _: Sequence[Any]) -> Pieces:
    return algebra.reshape(pieces, tuple(old.shape), tuple(new.shape))


def _permute(pieces: Pieces, old: torch.Tensor, _: object, args: Sequence[Any]) -> Pieces:
    return algebra.permute(pieces, [_dim(old, d) for d in args[0]])


def _transpose(pieces: Pieces, old: torch.Tensor, _: object, args: Sequence[Any]) -> Pieces:
    order = list(range(old.dim()))
    if order:
        a, b = _dim(old, args[0]), _dim(old, args[1])
        order[a], order[b] = order[b], order[a]
    return algebra.permute(pieces, order)


def _t(pieces: Pieces, old: torch.Tensor, *_: object) -> Pieces:
    return algebra.permute(pieces, list(reversed(range(old.dim()))))


def _slice(pieces: Pieces, old: torch.Tensor, new: torch.Tensor, args: Sequence[Any]) -> Pieces:
    given = [*args, *([0, None, None, 1][len(args) :])]
    dim, step = _dim(old, given[0]), given[3]
    begin, _, _ = slice(given[1], given[2], step).indices(old.shape[dim])
    return algebra.narrow(pieces, dim, begin, new.shape[dim], step)


def _narrow(pieces: Pieces, old: torch.Tensor, _: object, args: Sequence[Any]) -> Pieces:
    dim = _dim(old, args[0])
    return algebra.narrow(pieces, dim, args[1] % (old.shape[dim] + 1), args[2])


def _select(pieces: Pieces, old: torch.Tensor, _: object, args: Sequence[Any]) -> Pieces:
    dim = _dim(old, args[0])
    return algebra.drop(algebra.narrow(pieces, dim, args[1] % old.shape[dim], 1), [dim])


def _unsqueeze(pieces: Pieces, old: torch.Tensor, _: object, args: Sequence[Any]) -> Pieces:
    return algebra.insert(pieces, _dim(old, args[0], 1))


def _squeeze(pieces: Pieces, old: torch.Tensor, _: object, args: Sequence[Any]) -> Pieces:
    asked = args[0] if args else range(old.dim())
    dims = [asked] if isinstance(asked, int) else list(asked)
    ones = [_dim(old, d) for d in dims if old.dim() and old.shape[_dim(old, d)] == 1]
    return algebra.drop(pieces, ones)


def _expand(pieces: Pieces, old: torch.Tensor, new: torch.Tensor, _: Sequence[Any]) -> Pieces:
    return algebra.expand(pieces, tuple(old.shape), tuple(new.shape))


def _view_dtype(pieces: Pieces, old: torch.Tensor, new: torch.Tensor, _: Sequence[Any]) -> Pieces:
    if old.element_size() != new.element_size():
        raise NotStridedError("elements seen as elements of another width")
    return pieces


_VIEWS: dict[str, Callable[[Pieces, torch.Tensor, torch.Tensor, Sequence[Any]], Pieces]] = {
    "alias": _same,
    "detach": _same,
    "lift_fresh": _same,
    "view": _reshape,
    "_unsafe_view": _reshape,
    "_reshape_alias": _reshape,
    "reshape": _reshape,
    "permute": _permute,
    "transpose": _transpose,
    "t": _t,
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "view.dtype": _view_dtype,
}
