"""A repacked tensor has no places to write to: its checkpoint bits are kept, and loaded anew.

*Dense-only* tensors have a shadow on the host, in checkpoint bits, in a mapped file without a name:
deltas, fingerprints and undo act on it. The engine's own loader then loads their *closures* anew
from there: all checkpoint tensors that share a runtime module, always together, because loading one
leaves its siblings uninitialised. What the modules hold afterwards is digested: a later check finds
what was changed behind the shadow's back, and an undo proves that it is what it was.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import tempfile
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from deltastore.errors import IntegrityError, InvalidInputError, Kind, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from pathlib import Path

    from deltastore.format.dtypes import Bits
    from deltastore.format.layout import Layout

_ALIGNMENT = 64


class Closure(Protocol):
    """Checkpoint tensors that are only ever loaded together."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Runtime names of the modules that they end up in."""
        ...

    @property
    def tensors(self) -> tuple[int, ...]:
        """Positions in the layout: of all of them, dense-only or placed."""
        ...


class DenseShadows:
    """The dense-only tensors of one process.

    Args:
        dense: positions of the layout that have a shadow.
        closures: that hold them; each of `dense` is in one.
        read: the bits that the engine was loaded with, flat.
        reload: loads exactly these checkpoint tensors, all of one closure, through the engine's own
            loader.
        runtime: the parameters and buffers of modules, with their names, in a fixed order.
        folder: where the mapped file is made; None for the system's own.
        max_bytes: of all shadows.

    Raises InvalidInputError (limit, tensor_names), StorageError(disk_full).
    """

    def __init__(
        self,
        layout: Layout,
        dense: Collection[int],
        closures: Sequence[Closure],
        read: Callable[[int], Bits],
        *,
        reload: Callable[[Sequence[tuple[str, torch.Tensor]]], None],
        runtime: Callable[[Sequence[str]], Iterable[tuple[str, torch.Tensor]]],
        folder: Path | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self._layout = layout
        self._closures = [one for one in closures if set(one.tensors) & set(dense)]
        self._reload = reload
        self._runtime = runtime
        orphans = set(dense) - {tensor for one in self._closures for tensor in one.tensors}
        if orphans:
            raise InvalidInputError(
                f"{len(orphans)} dense-only tensors are in no closure:"
                f" {[layout.tensors[tensor].name for tensor in sorted(orphans)][:5]}",
                kind=Kind.TENSOR_NAMES,
            )
        self.arrays = _mapped(layout, sorted(dense), folder, max_bytes)
        for tensor, bits in self.arrays.items():
            bits[:] = read(tensor)
        self._digests = [self._digest(closure) for closure in self._closures]
        self._before: dict[int, str] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of all shadows."""
        return sum(bits.nbytes for bits in self.arrays.values())

    def begin(self) -> None:
        """Writing begins: an undo from now on goes back to what the modules hold now."""
        self._before.clear()

    def reload(
        self,
        tensors: Collection[int],
        read_tensor: Callable[[int], torch.Tensor],
        *,
        undoing: bool,
    ) -> None:
        """Load the closures anew of which some tensor is among `tensors`.

        Args:
            read_tensor: what this process holds of a tensor, in checkpoint shape.
            undoing: load again those that were loaded since `begin`, or begun to be.

        Raises IntegrityError(digest) when undoing ends in other bytes than there were before, or a
        placed tensor was changed by loading what it holds.
        """
        changed = frozenset(tensors)
        for number, closure in enumerate(self._closures):
            if not changed.intersection(closure.tensors):
                continue
            if undoing and number not in self._before:
                continue  # nothing was derived from what has been undone
            self._before.setdefault(number, self._digests[number])
            self._load(closure, read_tensor)
            self._digests[number] = self._digest(closure)
            if undoing:
                if self._digests[number] != self._before[number]:
                    raise self._differs(closure)
                del self._before[number]  # it is as before: what comes next starts from here

    def check(self) -> None:
        """IntegrityError(digest) when a module holds other bytes than after it was loaded."""
        for digest, closure in zip(self._digests, self._closures, strict=True):
            if self._digest(closure) != digest:
                raise self._differs(closure)

    def _load(self, closure: Closure, read_tensor: Callable[[int], torch.Tensor]) -> None:
        held = {tensor: read_tensor(tensor) for tensor in closure.tensors}
        names = [spec.name for spec in self._layout.tensors]
        self._reload([(names[tensor], bits) for tensor, bits in held.items()])
        for tensor, bits in held.items():
            if tensor not in self.arrays and not _equal_bytes(bits, read_tensor(tensor)):
                raise IntegrityError(
                    f"loading {names[tensor]!r} anew changed it: it is not what was placed",
                    kind=Kind.DIGEST,
                    hint="this model is not supported in part: load it whole",
                )

    def _digest(self, closure: Closure) -> str:
        """Of all that the closure's modules hold, bytes and names."""
        whole = hashlib.sha256()
        for name, tensor in self._runtime(closure.modules):
            whole.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            whole.update(_bytes_of(tensor))
        return whole.hexdigest()

    def _differs(self, closure: Closure) -> IntegrityError:
        return IntegrityError(
            f"modules {list(closure.modules)[:5]} do not hold what was loaded from their shadow",
            kind=Kind.DIGEST,
            hint="something else writes to them: re-anchor, or start the engine again",
        )


def _mapped(
    layout: Layout, dense: Sequence[int], folder: Path | None, max_bytes: int | None
) -> dict[int, Bits]:
    """Writable bits of each tensor, in one mapped file that goes with the process."""
    starts: dict[int, int] = {}
    size = 0
    for tensor in dense:
        starts[tensor] = size
        size += -(-layout.tensors[tensor].size_bytes // _ALIGNMENT) * _ALIGNMENT
    if max_bytes is not None and size > max_bytes:
        raise InvalidInputError(
            f"{len(dense)} dense-only tensors need {size} bytes of shadows, more than"
            f" shadow_max_bytes, {max_bytes}",
            kind=Kind.LIMIT,
            hint="raise shadow_max_bytes if the folder has room for it, for each rank of the host",
        )
    if not size:
        return {}
    with tempfile.TemporaryFile(dir=folder, prefix="dense-shadow-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # else a full disk kills at a write
        except OSError as err:
            full = err.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
            raise StorageError(
                f"no room for {size} bytes of shadows in {folder or tempfile.gettempdir()}:"
                f" {err.strerror}",
                kind=Kind.DISK_FULL if full else Kind.UNAVAILABLE,
                hint="name a folder with more room",
            ) from err
        window = mmap.mmap(file.fileno(), size)
    arrays: dict[int, Bits] = {}
    for tensor, start in starts.items():
        spec = layout.tensors[tensor]
        arrays[tensor] = np.frombuffer(window, spec.dtype.bits_dtype, spec.elements, start)
    return arrays


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    found: memoryview = flat.view(torch.uint8).numpy().data
    return found


def _equal_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    return _bytes_of(first) == _bytes_of(second)
