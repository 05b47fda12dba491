"""A trace that writes is a load of garbage: here every write of a loader is recorded, none is made.

While a `Recorder` is active every operation of torch comes to it first. What would change memory
that existed before is noted and left undone; memory that the loader itself makes is real, unless
checkpoint elements go into it: then what is read back from it has their lineage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from deltastore.adapters import lineage as lines
from deltastore.adapters.lineage import Lineage, StandIn
from deltastore.adapters.loader_ops import SPLITS, copy_like, is_view, split_views, without_masks
from deltastore.adapters.readback import memory_of, read_back
from deltastore.adapters.region_overlap import overlap

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deltastore.adapters.region_overlap import Strided

_FACTORIES = {
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty_strided",
}
_BY_VALUE = {"_local_scalar_dense", "item", "equal", "is_nonzero"}
_CONSTANTS = {"zero_", "fill_"}
_DATA_SETTER = torch.Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """What a loader would have written.

    Args:
        view: of the memory, with the shape that was written.
        place: its bytes, counted from the start of its storage; None if it overlaps itself.
        lineage: of what would be there now; without sources and reason: a constant.
    """

    view: torch.Tensor
    place: Strided | None
    lineage: Lineage

    @property
    def constant(self) -> bool:
        """Whether no tensor of the checkpoint has a part in it."""
        return not self.lineage.sources and not self.lineage.opaque

    def meets(self, place: Strided | None) -> bool:
        """Whether they share a byte, as far as is known."""
        return place is None or self.place is None or overlap(self.place, place)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records writes and leaves them undone.

    Args:
        owned: storages (`storage_key`) of the module whose loader runs.
    """

    def __init__(self, owned: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.writes: dict[int, list[Write]] = {}
        self.distrusted: dict[int, str] = {}
        self._owned = frozenset(owned)
        self._made: dict[int, StorageWeakRef] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to be hidden from the compiler would import it, and cost more than the trace."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer one operation."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func._schema.is_mutable:
            return self._mutate(func, name, args, kwargs)
        if is_view(func, name):
            if isinstance(args[0], StandIn):
                return self._view(func, name, args, kwargs)
            result = func(*args, **kwargs)
            if name == "lift_fresh":
                self._note_made(result, ())
            return result
        given = [*_tensors(args), *_tensors(kwargs)]
        if not any(self._depends(x) for x in given):
            result = func(*args, **kwargs)
            self._note_made(result, given)
            return result
        return self._compute(func, name, args, kwargs, given)

    def lineage_of(self, tensor: torch.Tensor) -> Lineage:
        """What a tensor would consist of now."""
        if isinstance(tensor, StandIn):
            return tensor.lineage
        return read_back(tensor, self.writes.get(storage_key(tensor), ()))

    def distrust(self, tensor: torch.Tensor, reason: str) -> None:
        """Note why no tensor that this one depends on can be a placement."""
        for source in self.lineage_of(tensor).sources:
            self.distrusted.setdefault(source, reason)

    def is_scratch(self, storage: int) -> bool:
        """Whether memory was made by the loader itself."""
        return storage in self._made

    def rebind(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Note that a loader gives a tensor other memory, which is left undone."""
        line = lines.opaque("bound to new memory", self.lineage_of(value).sources)
        if isinstance(tensor, StandIn):
            tensor.memory.changed = line.opaque
            tensor.memory.sources |= line.sources
        else:
            self._note(tensor.detach(), line)

    def _depends(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, StandIn) or storage_key(tensor) in self.writes

    def _note_made(self, result: Any, given: Iterable[torch.Tensor]) -> None:
        """Remember memory that this operation made: it is the loader's own."""
        before = {storage_key(x) for x in given}
        for made in _tensors(result):
            if storage_key(made) not in before:
                storage = made.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._made[reference.cdata] = reference  # its address stays taken

    def _view(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        base: StandIn = args[0]
        made = func(base.meta, *args[1:], **kwargs)
        if name in SPLITS:
            asked = split_views(name, base.meta, args[1:], kwargs, len(made))
            return [
                lines.view_of(base, meta, one, rest)
                for meta, (one, rest) in zip(made, asked, strict=True)
            ]
        if func._overloadname == "dtype":
            name += ".dtype"
        return lines.view_of(base, made, name, _positional(func, args, kwargs)[1:])

    def _mutate(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        given = [*_tensors(args), *_tensors(kwargs)]
        values = _positional(func, args, kwargs)
        written, read = _written(func, values)
        if all(not self._depends(x) for x in given) and all(
            storage_key(x) in self._made for x in written
        ):
            return func(*args, **kwargs)
        if name == "copy_":
            self._copy(values[0], values[1])
        elif name == "_foreach_copy_":
            for target, source in zip(values[0], values[1], strict=True):
                self._copy(target, source)
        elif name in _CONSTANTS and not any(self._depends(x) for x in read):
            self._clear(values[0])
        else:
            self._change(name, written, read)
        returns = func._schema.returns
        if not returns:
            return None
        return written[0] if len(returns) == 1 else tuple(written)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        line = self.lineage_of(source)
        shape = tuple(target.shape)
        if isinstance(target, StandIn):
            self._change("copy_", [target], [source])
            return
        if line.opaque or line.sources:
            meta = source.meta if isinstance(source, StandIn) else _meta_of(source)
            wide = meta.expand(shape)  # raises what a real copy would
            line = lines.copied(line, source.dtype, target.dtype)
            if not line.opaque:
                line = lines.expanded(line, tuple(meta.shape), tuple(wide.shape))
        elif storage_key(source) in self._owned:
            line = lines.opaque("copied from elsewhere in the module", frozenset())
        self._note(target, line)

    def _clear(self, target: torch.Tensor) -> None:
        if not isinstance(target, StandIn):
            self._note(target, Lineage())
        elif target.numel() == target.memory.elements:
            target.memory.cleared = True
        else:
            target.memory.changed = "cleared in part"

    def _change(self, name: str, written: list[torch.Tensor], read: list[torch.Tensor]) -> None:
        reason = f"changed in place by {name}"
        sources = frozenset[int]().union(*(self.lineage_of(x).sources for x in read))
        for target in written:
            if isinstance(target, StandIn):
                target.memory.sources |= sources
                target.memory.changed = reason
                continue
            place = memory_of(target)
            before = [w for w in self.writes.get(storage_key(target), ()) if w.meets(place)]
            all_sources = sources.union(*(w.lineage.sources for w in before))
            self._note(target, lines.opaque(reason, all_sources))

    def _note(self, target: torch.Tensor, line: Lineage) -> None:
        if target.numel():
            view = target.detach()
            self.writes.setdefault(storage_key(view), []).append(Write(view, memory_of(view), line))

    def _compute(
        self, func: Any, name: str, args: Any, kwargs: Any, given: list[torch.Tensor]
    ) -> Any:
        """An operation that makes new memory out of stand-ins, or reads their values."""
        if name in _FACTORIES:
            return self._make(func, args, kwargs)
        first = given[0]
        sources = frozenset[int]().union(*(self.lineage_of(x).sources for x in given))
        if name in _BY_VALUE:
            for tensor in given:
                self.distrust(tensor, f"read by value ({name.strip('_')})")
            if any(isinstance(x, StandIn) for x in given):
                return True if name == "equal" else _a_value(first)
            return func(*args, **kwargs)
        metas = tree_map(_to_meta, (without_masks(name, args), kwargs))
        if "device" in metas[1]:
            metas[1]["device"] = torch.device("meta")
        device = kwargs.get("device") or first.device
        line = copy_like(self.lineage_of, name, _positional(func, args, kwargs), kwargs)
        if line is None:
            line = lines.opaque(f"computed by {name}", sources)
        made = func(*metas[0], **metas[1])
        return tree_map(
            lambda x: lines.fresh(x, device, line) if isinstance(x, torch.Tensor) else x, made
        )

    def _make(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Scratch memory in the form of a stand-in: real, so that writes to it can be told."""
        model = args[0]
        options = {**kwargs, "device": kwargs.get("device") or model.device}
        result = func(_to_meta(model), *args[1:], **options)
        self._note_made(result, ())
        return result


class RebindWatch(TorchFunctionMode):
    """Catches `tensor.data = other`, which is no operation of torch."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a new binding; let everything else pass."""
        if func is _DATA_SETTER or func == _DATA_SETTER:
            self._recorder.rebind(args[0], args[1])
            return None
        return func(*args, **(kwargs or {}))


def storage_key(tensor: torch.Tensor) -> int:
    """Which memory a tensor is a view of, for as long as somebody holds it."""
    if isinstance(tensor, StandIn):
        return 0
    key: int = tensor.untyped_storage()._cdata
    return key


def _meta_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments or a result: operations nest them in lists and dicts only."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _to_meta(value: Any) -> Any:
    if isinstance(value, StandIn):
        return value.meta
    return _meta_of(value) if isinstance(value, torch.Tensor) else value


def _a_value(tensor: torch.Tensor) -> bool | int | float:
    """A value for a loader that asks for one: it is not the checkpoint's."""
    if tensor.dtype == torch.bool:
        return False
    return 1.0 if tensor.dtype.is_floating_point else 1


def _positional(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """All arguments in the order of the schema, up to the last that is given."""
    values = list(args)
    values += [
        kwargs.get(argument.name, argument.default_value)
        for argument in func._schema.arguments[len(args) :]
    ]
    return values


def _written(func: Any, values: list[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operation writes, and those that it only reads."""
    written: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for argument, value in zip(func._schema.arguments, values, strict=True):
        alias = argument.alias_info
        (written if alias is not None and alias.is_write else read).extend(_tensors(value))
    return written, read
