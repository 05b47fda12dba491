"""Two names of one storage, published as two tensors, drift apart: storages decide, not names.

Names and storages of a module's parameters and persistent buffers. The names are those a checkpoint
has: the wrappers' prefixes are taken off. Tensors whose elements are exactly the same memory are
one tensor with aliases; any other overlap, and any tensor whose bits cannot be read and written in
place, is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import torch

from deltastore.adapters.memory_overlap import MemoryView, find_overlap, overlaps_itself
from deltastore.errors import InvalidInputError, Kind
from deltastore.format.coverage import list_names
from deltastore.format.dtypes import DType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deltastore.format.dtypes import Bits

ModuleLike: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor]

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Of torch.compile, FSDP and activation checkpointing: they may stand anywhere in a name."""
_PARALLEL = "module."
"""Of DistributedDataParallel: stands before every name, or belongs to the model."""
_DTYPES = {
    torch.bool: DType.BOOL,
    torch.uint8: DType.U8,
    torch.int8: DType.I8,
    torch.float8_e4m3fn: DType.F8_E4M3,
    torch.float8_e5m2: DType.F8_E5M2,
    torch.float8_e8m0fnu: DType.F8_E8M0,
    torch.int16: DType.I16,
    torch.uint16: DType.U16,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.int32: DType.I32,
    torch.uint32: DType.U32,
    torch.float32: DType.F32,
    torch.int64: DType.I64,
    torch.uint64: DType.U64,
    torch.float64: DType.F64,
    torch.complex64: DType.C64,
}
_TORCH_DTYPES = {found: dtype for dtype, found in _DTYPES.items()}
_INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
"""torch has almost no operations on uint16, uint32 and uint64."""


@dataclass(frozen=True, slots=True, eq=False)
class NamedTensor:
    """One storage of a module: all its checkpoint names, and the live tensor.

    Args:
        position: of the tensor that has the first of the names, among all of the module.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    dtype: DType
    position: int

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    def patterns(self) -> torch.Tensor:
        """Its elements as integers of their width, in place; complex gain a last dimension."""
        return integer_view(self.tensor)


def named_tensors(module: ModuleLike) -> list[NamedTensor]:
    """The parameters and persistent buffers of a module, or the tensors of a state dict.

    Raises InvalidInputError: `meta_tensor`, `tensor_storage` (no plain strided tensor, stride 0,
    freed, or overlapping another), `tensor_dtype`, `tensor_names` (two become one name).
    """
    return name_tensors(found_tensors(module))


def found_tensors(module: ModuleLike) -> dict[str, torch.Tensor]:
    """The tensors under the module's own names, as they are."""
    if isinstance(module, torch.nn.Module):
        found: dict[str, torch.Tensor] = module.state_dict(keep_vars=True)
        return found
    return dict(module)


def name_tensors(found: Mapping[str, torch.Tensor]) -> list[NamedTensor]:
    """`named_tensors` of tensors that were found."""
    _refuse_meta(found)
    tensors = {
        name: _plain(name, tensor)
        for name, tensor in zip(checkpoint_names(found), found.values(), strict=True)
    }
    positions = {name: position for position, name in enumerate(tensors)}
    shared: dict[object, list[str]] = {}
    views: dict[str, MemoryView] = {}
    for name, tensor in tensors.items():
        view = _memory(tensor)
        own: object = (view, tensor.dtype, tensor.shape) if tensor.numel() else name
        shared.setdefault(own, []).append(name)
        if tensor.numel() and len(shared[own]) == 1:
            views[name] = view
    _refuse_overlap(views)
    return [
        NamedTensor(
            tuple(names),
            tensors[names[0]],
            _DTYPES[tensors[names[0]].dtype],
            positions[names[0]],
        )
        for names in shared.values()
    ]


def checkpoint_names(names: Iterable[str]) -> list[str]:
    """The names without what torch's wrappers put into them; refuses two that become one."""
    plain = list(names)
    for wrapper in _WRAPPERS:
        plain = [_without(name, wrapper) for name in plain]
    if plain and all(name.startswith(_PARALLEL) for name in plain):
        plain = [name.removeprefix(_PARALLEL) for name in plain]
    twice = sorted({name for name in plain if plain.count(name) > 1}) if _repeats(plain) else []
    if twice:
        raise InvalidInputError(
            f"{len(twice)} tensor names are used twice: {list_names(twice)}",
            kind=Kind.TENSOR_NAMES,
            hint="give the module below its wrappers",
        )
    return plain


def integer_view(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as integers of their width, in place; complex gain a last dimension."""
    live = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return live.view(integer_dtype(live))


def integer_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Torch's integers of the width of a real tensor's elements."""
    return _INTEGERS[tensor.element_size() * 8]


def checkpoint_dtype(dtype: torch.dtype) -> DType | None:
    """What a checkpoint calls torch's dtype; None when it has no such dtype."""
    return _DTYPES.get(dtype)


def torch_dtype(dtype: DType) -> torch.dtype:
    """Torch's dtype of a checkpoint's."""
    return _TORCH_DTYPES[dtype]


def host_bits(patterns: torch.Tensor, dtype: DType) -> Bits:
    """A one-dimensional tensor of patterns as numpy bits; on the CPU the same memory."""
    bits: Bits = patterns.cpu().numpy().view(dtype.bits_dtype)
    return bits


def device_patterns(bits: Bits, device: torch.device) -> torch.Tensor:
    """Numpy bits as a tensor of patterns on a device."""
    signed = bits.view(f"<i{bits.itemsize}") if bits.itemsize > 1 else bits
    if not signed.flags.writeable:
        signed = signed.copy()  # torch has no read-only tensors
    return torch.from_numpy(signed).to(device)


def _without(name: str, wrapper: str) -> str:
    """Drop a wrapper's component wherever it is a whole component of the name."""
    if name.startswith(wrapper):
        name = name[len(wrapper) :]
    return name.replace("." + wrapper, ".")


def _repeats(names: list[str]) -> bool:
    return len(set(names)) != len(names)


def _refuse_meta(found: Mapping[str, object]) -> None:
    meta = [n for n, t in found.items() if isinstance(t, torch.Tensor) and t.is_meta]
    if meta:
        raise InvalidInputError(
            f"{len(meta)} tensors are on the meta device, they have no bits: {list_names(meta)}",
            kind=Kind.META_TENSOR,
            hint="load or initialise the module first",
        )


def _plain(name: str, tensor: object) -> torch.Tensor:
    """The tensor without its graph, if its memory can be read and written in place."""
    if not isinstance(tensor, torch.Tensor):
        _refuse(name, f"is a {type(tensor).__name__}, not a tensor", "leave it out of the state")
    wraps = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if wraps or torch.nn.parameter.is_lazy(tensor):
        _refuse(
            name,
            f"is a {type(tensor).__name__}, not a plain tensor",
            "sharded, lazy and quantized tensors need an adapter of their own",
        )
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        _refuse(name, "is not a plain strided tensor", "make it dense with .clone()")
    if tensor.dtype not in _DTYPES:
        raise InvalidInputError(
            f"tensor {name!r} has dtype {tensor.dtype}, which a checkpoint cannot hold",
            kind=Kind.TENSOR_DTYPE,
            hint=f"supported are {', '.join(d.value for d in _DTYPES.values())}",
        )
    if tensor.numel() and tensor.untyped_storage().nbytes() == 0:
        _refuse(name, "has had its storage freed", "gather the module's parameters first")
    if tensor.numel() and overlaps_itself(tuple(tensor.shape), tensor.stride()):
        _refuse(name, "has several elements in one place", "give it memory with .contiguous()")
    return tensor.detach()


def _memory(tensor: torch.Tensor) -> MemoryView:
    """Where the elements lie; dimensions of one element have no stride that matters."""
    dimensions = [
        (size, stride * tensor.element_size())
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size != 1
    ]
    return MemoryView(
        str(tensor.device),
        tensor.data_ptr(),
        tuple(size for size, _ in dimensions),
        tuple(stride for _, stride in dimensions),
        tensor.element_size(),
    )


def _refuse_overlap(views: Mapping[str, MemoryView]) -> None:
    names = list(views)
    pair = find_overlap(list(views.values()))
    if pair is not None:
        first, second = names[pair[0]], names[pair[1]]
        _refuse(
            second,
            f"shares a part of its storage with {first!r}",
            "tie them wholly, or give one its own memory with .clone()",
        )


def _refuse(name: str, what: str, hint: str) -> NoReturn:
    raise InvalidInputError(f"tensor {name!r} {what}", kind=Kind.TENSOR_STORAGE, hint=hint)
