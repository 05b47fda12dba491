"""A trace that left a weight changed would serve garbage: what a module holds is compared here.

All parameters and buffers of a module, by the memory they are views of: digests of every byte,
which tensor a place in memory belongs to, and the bindings as they were before a loader ran.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deltastore.adapters.lineage import StandIn
from deltastore.adapters.loader_recorder import storage_key
from deltastore.adapters.readback import memory_of
from deltastore.errors import IntegrityError, Kind
from deltastore.format.coverage import list_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deltastore.adapters.region_overlap import Strided

CHUNK_BYTES = 32 << 20
"""Bytes digested at once: temporaries on a device are a few times as large."""
KEPT_OTHERWISE = "kept in another form after loading"
FREED = "freed after loading"
"""Not even a reload can bring such a tensor back."""
_KEYS = ((0x27D4EB2F165667C5, 0x9E3779B97F4A7C15), (0x85EBCA77C2B2AE63, 0xD6E8FEB86659FD93))
_WRAP = 1 << 64


@dataclass(frozen=True, slots=True, eq=False)
class Owner:
    """One parameter or buffer under one of its names.

    Args:
        holder, module: that holds it, and its runtime name.
        parameter: its full runtime name.
        tensor: the very object that is bound there.
        data: a plain view of its memory.
        place: its bytes, counted from the start of its storage; None if it overlaps itself.
        buffer: whether it is bound as a buffer.
        form: if it only stands for a parameter: why that one cannot be written.
    """

    holder: torch.nn.Module
    module: str
    parameter: str
    tensor: torch.Tensor
    data: torch.Tensor
    place: Strided | None
    buffer: bool = False
    form: str = ""

    @property
    def key(self) -> str:
        """Its name in its module."""
        return self.parameter.rpartition(".")[2]

    @property
    def slots(self) -> dict[str, Any]:
        """The module's table that it is bound in."""
        return self.holder._buffers if self.buffer else self.holder._parameters


class ModuleMemory:
    """What a module holds, as it was when this was made."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.owners = tuple(
            _owner(holder, name, key, tensor, buffer=table == "_buffers")
            for table in ("_parameters", "_buffers")
            for name, holder in module.named_modules()
            for key, tensor in getattr(holder, table).items()
            if tensor is not None and not tensor.is_meta
        )
        self._formed: dict[str, torch.Tensor] = {}
        self._slots = tuple(
            (slots, frozenset(slots))
            for holder in module.modules()
            for slots in (holder._parameters, holder._buffers)
        )
        self._by_storage: dict[int, list[Owner]] = {}
        for owner in self.owners:
            if owner.data.numel():
                self._by_storage.setdefault(storage_key(owner.data), []).append(owner)

    @contextmanager
    def bound(self, forms: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Bind tensors without memory in place of parameters that are kept in another form.

        What a loader writes into them is known to belong to the parameter, and to be no copy.
        """
        holders = dict(self._module.named_modules())
        bound: list[tuple[Owner, Any]] = []
        self._formed = dict(forms)
        try:
            for parameter, tensor in forms.items():
                module, _, key = parameter.rpartition(".")
                live = holders[module]._parameters.get(key)
                reason = FREED if live is not None and live.numel() == 0 else KEPT_OTHERWISE
                owner = _owner(holders[module], module, key, tensor, form=reason)
                bound.append((owner, live))
                owner.slots[key] = tensor
                self._by_storage.setdefault(storage_key(owner.data), []).append(owner)
            yield
        finally:
            self._formed = {}
            for owner, before in bound:
                if before is None:
                    del owner.slots[owner.key]
                else:
                    owner.slots[owner.key] = before

    @property
    def storages(self) -> frozenset[int]:
        """Keys of all storages."""
        return frozenset(self._by_storage)

    @property
    def device(self) -> torch.device:
        """Where the parameters are; the CPU if there are none."""
        return next((owner.data.device for owner in self.owners), torch.device("cpu"))

    def owners_of(self, storage: int, place: Strided | None) -> list[Owner]:
        """The parameters in whose memory a place lies; if there are none, the buffers."""
        found = [
            owner
            for owner in self._by_storage.get(storage, ())
            if place is None
            or owner.place is None
            or (owner.place.offset <= place.offset and place.end <= owner.place.end)
        ]
        return [owner for owner in found if not owner.buffer] or found

    def digests(self) -> dict[int, bytes]:
        """Per storage a digest of all of its bytes; one pass over the module."""
        return {
            key: digest_memory(owners[0].data)
            for key, owners in self._by_storage.items()
            if not owners[0].form
        }

    def restore(self) -> list[tuple[Owner | None, Any]]:
        """Put back every tensor that was bound anew, and take out what was not there.

        Returns the tensors with what was bound in their place; None with a stand-in that was kept
        in an attribute or as a parameter of its own.
        """
        changed: list[tuple[Owner | None, Any]] = []
        for holder in self._module.modules():
            kept = [key for key, value in vars(holder).items() if isinstance(value, StandIn)]
            changed += [(None, vars(holder).pop(key)) for key in kept]
        formed = {id(form) for form in self._formed.values()}
        for slots, before in self._slots:
            new = [key for key in slots if key not in before and id(slots[key]) not in formed]
            changed += [(None, slots.pop(key)) for key in new]
        for owner in self.owners:
            if owner.parameter in self._formed:
                continue
            found = owner.slots.get(owner.key)
            if found is not owner.tensor:
                changed.append((owner, found))
                owner.slots[owner.key] = owner.tensor
            elif _moved(owner):
                changed.append((owner, owner.tensor.detach()))
                owner.tensor.data = owner.data
        return changed

    def require_unchanged(self, before: Mapping[int, bytes]) -> None:
        """Raise IntegrityError(digest) that names the tensors whose memory is not as before."""
        after = self.digests()
        names = [self._by_storage[key][0].parameter for key in before if before[key] != after[key]]
        if names:
            raise IntegrityError(
                f"the loader changed {len(names)} tensors while it was traced: {list_names(names)}",
                kind=Kind.DIGEST,
                hint="load the checkpoint again; this model's loader cannot be traced",
            )


def digest_memory(tensor: torch.Tensor) -> bytes:
    """A digest of all bytes of the storage that a tensor is a view of, in chunks.

    On the CPU SHA-256; elsewhere two sums of mixed 64-bit words, computed on the device.
    """
    storage = tensor.untyped_storage()
    octets = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    octets.set_(storage, 0, (storage.nbytes(),), (1,))
    chunks = torch.split(octets, CHUNK_BYTES)
    if tensor.device.type == "cpu":
        digest = hashlib.sha256()
        for chunk in chunks:
            digest.update(chunk.numpy().data)
        return digest.digest()
    return mix_chunks(chunks)


def mix_chunks(chunks: tuple[torch.Tensor, ...]) -> bytes:
    """Two 64-bit sums over mixed words, each word mixed with its position."""
    lanes = [torch.zeros((), dtype=torch.int64, device=chunks[0].device) for _ in _KEYS]
    first = 0
    for chunk in chunks:
        pad = -chunk.numel() % 8
        words = torch.nn.functional.pad(chunk, (0, pad)) if pad or chunk.data_ptr() % 8 else chunk
        words = words.view(torch.int64)
        places = torch.arange(first, first + words.numel(), device=words.device)
        first += words.numel()
        for lane, keys in zip(lanes, _KEYS, strict=True):
            place_key, word_key = (_signed(key) for key in keys)
            mixed = (words ^ (places * place_key)) * word_key
            mixed ^= mixed >> 29
            mixed *= place_key
            mixed ^= mixed >> 32
            lane += mixed.sum()
    return b"".join((int(lane) % _WRAP).to_bytes(8, "little") for lane in lanes)


def _signed(key: int) -> int:
    return key - _WRAP if key >= _WRAP >> 1 else key


def _owner(
    holder: torch.nn.Module,
    module: str,
    key: str,
    tensor: torch.Tensor,
    *,
    buffer: bool = False,
    form: str = "",
) -> Owner:
    data = tensor.detach()
    place = memory_of(data) if data.numel() else None
    name = f"{module}.{key}" if module else key
    return Owner(holder, module, name, tensor, data, place, buffer, form)


def _moved(owner: Owner) -> bool:
    """Whether the tensor is a view of other memory than it was."""
    now, then = owner.tensor.detach(), owner.data
    return (
        now.shape != then.shape
        or now.stride() != then.stride()
        or now.storage_offset() != then.storage_offset()
        or now.dtype != then.dtype
        or storage_key(now) != storage_key(then)
    )
