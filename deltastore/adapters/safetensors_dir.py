"""Weights read through a float type or a mapping lose bits or the process: here they are patterns.

A Hugging Face checkpoint folder as a source of weights. Elements are read as unsigned integers
straight into arrays: no numpy or torch float type is involved, and a file that shrinks meanwhile
is an error, where a mapped one would end the process. The folder as a target is `write_state`.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from deltastore.adapters.safetensors_scan import (
    Checkpoint,
    LeftOut,
    Shard,
    refuse_checkpoint,
    scan_checkpoint,
    unreadable_file,
)
from deltastore.adapters.safetensors_write import write_checkpoint, write_state
from deltastore.errors import IntegrityError, Kind
from deltastore.format.box import MAX_BOX_ELEMENTS, Box
from deltastore.format.coverage import match_entries
from deltastore.format.layout import BitState, Layout
from deltastore.pipeline.protocols import SourceBox

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from io import FileIO

    from deltastore.format.checkpoint_file import StoredTensor
    from deltastore.format.dtypes import Bits
    from deltastore.format.layout import TensorEntry

__all__ = [
    "Checkpoint",
    "DirectorySource",
    "LeftOut",
    "Shard",
    "checkpoint_layout",
    "load_state",
    "scan_checkpoint",
    "write_checkpoint",
    "write_state",
]


def checkpoint_layout(checkpoint: Checkpoint) -> Layout:
    """The layout that a run starting from this checkpoint has.

    Its order is that of the bytes on disk (shards by name, then data offset), so that the
    checkpoint is read front to back.
    """
    return Layout.build(checkpoint.entries)


def load_state(checkpoint: Checkpoint, layout: Layout) -> BitState:
    """The checkpoint's bits in the layout's order; nothing but the result is held in memory.

    Raises InvalidInputError (tensor_names, tensor_shape, tensor_dtype, checkpoint) and
    IntegrityError(alias_drift) when it stores both names of a tied tensor with different bits.
    """
    arrays: list[Bits] = [np.empty(s.elements, s.dtype.bits_dtype) for s in layout.tensors]
    with CheckpointReader(checkpoint, layout) as reader:
        for tensor, bits in enumerate(arrays):
            for start in range(0, bits.size, MAX_BOX_ELEMENTS):
                reader.read(tensor, start, bits[start : start + MAX_BOX_ELEMENTS])
    return BitState(layout, arrays)


class DirectorySource:
    """A checkpoint folder as a WeightSource: streamed, at most one box in memory."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def entries(self) -> Sequence[TensorEntry]:
        """The checkpoint's tensors."""
        return self.checkpoint.entries

    def boxes(self, layout: Layout) -> Iterator[SourceBox]:
        """Flat runs of at most 2^22 elements, in layout order; raises what `load_state` raises."""
        with CheckpointReader(self.checkpoint, layout) as reader:
            for tensor, spec in enumerate(layout.tensors):
                for start in range(0, spec.elements, MAX_BOX_ELEMENTS):
                    count = min(MAX_BOX_ELEMENTS, spec.elements - start)
                    bits = np.empty(count, spec.dtype.bits_dtype)
                    reader.read(tensor, start, bits)
                    yield SourceBox(tensor, Box.run(start, count), bits)


class CheckpointReader:
    """Runs of a layout's tensors out of a checkpoint's files; compares all copies of tied ones.

    A context manager: files are open inside it. Raises InvalidInputError (tensor_names,
    tensor_shape, tensor_dtype) when the checkpoint is of another layout.
    """

    def __init__(self, checkpoint: Checkpoint, layout: Layout) -> None:
        stored = {name: (s, t) for s in checkpoint.shards for name, t in s.header.tensors.items()}
        self._layout = layout
        self._copies = [
            [
                stored[name]
                for position in found
                for name in (
                    checkpoint.entries[position].name,
                    *checkpoint.entries[position].aliases,
                )
                if name in stored
            ]
            for found in match_entries(layout, checkpoint.entries)
        ]
        self._files: dict[str, FileIO] = {}
        self._open = ExitStack()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def tensor(self, position: int) -> Bits:
        """All patterns of the tensor at that position of the layout, flat."""
        spec = self._layout.tensors[position]
        bits: Bits = np.empty(spec.elements, spec.dtype.bits_dtype)
        for start in range(0, bits.size, MAX_BOX_ELEMENTS):
            self.read(position, start, bits[start : start + MAX_BOX_ELEMENTS])
        return bits

    def read(self, tensor: int, start: int, out: Bits) -> None:
        """Fill `out` with the patterns of a tensor from element `start`."""
        (shard, first), *others = self._copies[tensor]
        self._read_one(shard, first, start, out)
        for other_shard, other in others:
            twin = np.empty_like(out)
            self._read_one(other_shard, other, start, twin)
            if not np.array_equal(out, twin):
                raise IntegrityError(
                    f"tied tensors {first.name!r} and {other.name!r} hold different bits",
                    kind=Kind.ALIAS_DRIFT,
                    hint="store one of them; or, if they are meant to differ, say"
                    " tie_word_embeddings false in config.json and start a new run",
                )

    def _read_one(self, shard: Shard, stored: StoredTensor, start: int, out: Bits) -> None:
        handle = self._file(shard)
        begin, _ = shard.header.file_range(stored.name)
        view = out.view(np.uint8).data
        handle.seek(begin + start * out.itemsize)
        filled = 0
        while filled < len(view):
            got = handle.readinto(view[filled:])
            if not got:
                refuse_checkpoint(
                    f"{shard.path} was cut while it was read", "let nobody write to it"
                )
            filled += got

    def _file(self, shard: Shard) -> FileIO:
        handle = self._files.get(shard.name)
        if handle is None:
            try:
                handle = self._open.enter_context(shard.path.open("rb", buffering=0))
            except OSError as err:
                raise unreadable_file(shard.path, err) from err
            if handle.seek(0, 2) != shard.header.file_bytes:
                refuse_checkpoint(
                    f"{shard.path} has changed since it was scanned", "let nobody write to it"
                )
            self._files[shard.name] = handle
        return handle
