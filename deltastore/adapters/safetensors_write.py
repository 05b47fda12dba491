"""A checkpoint written in place is neither old nor new when the disk fills: write beside, rename.

Order: a hidden folder next to the target, its files, each flushed to disk, the folder itself, then
one rename. A crash before the rename leaves `.<name>.<token>.partial`, which nothing reads and
which may be deleted; after it the checkpoint is whole.
"""

from __future__ import annotations

import errno
import os
import shutil
from typing import TYPE_CHECKING

from deltastore.errors import ConflictError, InvalidInputError, Kind, StorageError
from deltastore.format.checkpoint_file import build_header
from deltastore.format.coverage import match_entries
from deltastore.format.layout import TensorEntry
from deltastore.ids import check_name, new_token

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from deltastore.adapters.safetensors_scan import Checkpoint
    from deltastore.format.checkpoint_file import CheckpointHeader
    from deltastore.format.layout import BitState

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BAD_PATH = {errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EILSEQ}
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}


def write_state(state: BitState, folder: Path, *, template: Checkpoint | None = None) -> None:
    """Write a state as a new checkpoint folder.

    With a template the result has its files: same shards, byte for byte the same headers (order
    of names and metadata), both names of a tied tensor where it stores both, and copies of its
    configuration and tokenizer files. Without, it is one `model.safetensors`.

    Raises what `write_checkpoint` raises, and InvalidInputError (tensor_names, tensor_shape,
    tensor_dtype) when state and template are not of one architecture.
    """
    if template is None:
        entries = [TensorEntry(s.name, s.dtype, s.shape) for s in state.layout.tensors]
        header = build_header(entries, {"format": "pt"})
        write_checkpoint(state, folder, headers={"model.safetensors": header}, extras={})
        return
    write_checkpoint(
        state,
        folder,
        headers={shard.name: shard.header for shard in template.shards},
        extras={file.name: file.path for file in template.extras},
    )


def write_checkpoint(
    state: BitState,
    folder: Path,
    *,
    headers: Mapping[str, CheckpointHeader],
    extras: Mapping[str, Path | bytes],
) -> None:
    """Write a state as a new checkpoint folder of exactly these files.

    Args:
        state: bits by name or alias.
        folder: must not exist.
        headers: of the safetensors files, by file name: together they must name every tensor.
        extras: further files: to be copied, or their bytes.

    Raises ConflictError(output_exists), StorageError(disk_full, unavailable), InvalidInputError.
    """
    stored = [t for header in headers.values() for t in header.tensors.values()]
    match_entries(state.layout, [TensorEntry(t.name, t.dtype, t.shape) for t in stored])
    for name in (*headers, *extras):
        check_name(name, "file name")
    if os.path.lexists(folder):
        raise _taken(folder)
    # Cut: a name that the target can have must not be too long with what is added here.
    partial = folder.parent / f".{folder.name[:50]}.{new_token()}.partial"
    try:
        partial.mkdir(parents=True)
        for name, header in headers.items():
            _write_shard(partial / name, header, state)
        for name, source in extras.items():
            _write_extra(partial / name, source)
        _sync_folder(partial)
        partial.rename(folder)
        _sync_folder(folder.parent)
    except OSError as err:
        if err.errno in _NO_SPACE:
            raise StorageError(
                f"no space left for checkpoint {folder}",
                kind=Kind.DISK_FULL,
                hint=f"it takes {state.layout.size_bytes} bytes",
            ) from err
        if err.errno in _TAKEN and os.path.lexists(folder):
            raise _taken(folder) from err
        message = f"checkpoint {folder} cannot be written: {err.strerror} ({err.filename})"
        hint = "check the path and its permissions"
        if err.errno in _BAD_PATH:
            raise InvalidInputError(message, kind=Kind.CHECKPOINT, hint=hint) from err
        raise StorageError(message, kind=Kind.UNAVAILABLE, hint=hint) from err
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # nothing is left of it after the rename


def _write_shard(path: Path, header: CheckpointHeader, state: BitState) -> None:
    with path.open("xb") as handle:
        handle.write(header.raw)
        for tensor in header.data_order():
            handle.write(state[tensor.name].data)
        handle.flush()
        os.fsync(handle.fileno())


def _write_extra(path: Path, source: Path | bytes) -> None:
    with path.open("xb") as handle:
        if isinstance(source, bytes):
            handle.write(source)
        else:
            with source.open("rb") as original:
                shutil.copyfileobj(original, handle)
        handle.flush()
        os.fsync(handle.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _taken(folder: Path) -> ConflictError:
    return ConflictError(
        f"{folder} exists already",
        kind=Kind.OUTPUT_EXISTS,
        hint="name a new folder: a checkpoint is never written in place",
    )
