"""A checkpoint folder read on trust yields half a model: every name, byte and shard is accounted.

Reads the headers of a Hugging Face checkpoint folder: `model.safetensors`, or several files and
their index. What cannot be told for sure (two saves in one folder, a tensor in two files, an index
that disagrees with the files) is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from deltastore.adapters.tied_names import find_tied_pair
from deltastore.errors import FormatError, InvalidInputError, Kind
from deltastore.format.checkpoint_file import LENGTH_BYTES, header_bytes, parse_header
from deltastore.format.layout import TensorEntry
from deltastore.ids import MAX_NAME_CHARS, check_name
from deltastore.repository.run import CheckpointFile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from deltastore.format.checkpoint_file import CheckpointHeader, StoredTensor

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
MAX_EXTRA_FILE_BYTES = 64 << 20
"""Tokenizers reach 35 MB; what is larger is no configuration."""
MAX_JSON_BYTES = 64 << 20
_OTHER_WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
    ".pkl",
)


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file of a checkpoint."""

    name: str
    path: Path
    header: CheckpointHeader


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file of the folder that does not travel, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint folder holds; its tensors' bytes have not been read.

    Args:
        folder: where it lies.
        shards: its safetensors files, by name.
        entries: its tensors, shard by shard, in the order of their bytes. Tied names are one.
        files: everything that travels: shards, index, configuration and tokenizer files.
        left_out: everything else in the folder.
    """

    folder: Path
    shards: tuple[Shard, ...]
    entries: tuple[TensorEntry, ...]
    files: tuple[CheckpointFile, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def extras(self) -> tuple[CheckpointFile, ...]:
        """The files that are not shards."""
        shards = {shard.name for shard in self.shards}
        return tuple(file for file in self.files if file.name not in shards)


def scan_checkpoint(folder: Path) -> Checkpoint:
    """Read and check the headers of a checkpoint folder.

    Raises InvalidInputError(checkpoint) naming the file and the way out: no such folder, no
    safetensors in it, an index that names an absent file or tensor, a damaged or truncated file.
    """
    try:
        return _scan(folder)
    except OSError as err:
        raise unreadable_file(folder, err) from err


def _scan(folder: Path) -> Checkpoint:
    if not folder.is_dir():
        refuse_checkpoint(f"there is no checkpoint folder {str(folder)!r}", "check the path")
    weight_map = _read_index(folder)
    names = sorted(set(weight_map.values())) if weight_map is not None else [SINGLE_NAME]
    shards = tuple(_open_shard(folder, name) for name in names)
    _check_index(shards, weight_map)
    entries = _entries(shards, _read_json(folder / CONFIG_NAME))
    extras, left_out = _sort_files(folder, set(names), indexed=weight_map is not None)
    files = (*(CheckpointFile(s.name, s.path) for s in shards), *extras)
    return Checkpoint(folder, shards, entries, files, left_out)


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor to shard as the index says; None when the checkpoint is one file."""
    has_index, has_single = (folder / INDEX_NAME).exists(), (folder / SINGLE_NAME).exists()
    if has_index and has_single:
        refuse_checkpoint(
            f"{folder} has both {SINGLE_NAME} and {INDEX_NAME}",
            "remove the one that is left over from an older save",
        )
    if has_single:
        return None
    if not has_index:
        others = sorted(p.name for p in folder.iterdir() if p.name.endswith(_OTHER_WEIGHTS))
        found = f"; it has {', '.join(others[:4])}" if others else ""
        refuse_checkpoint(
            f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}{found}",
            "save the model in safetensors format (save_pretrained does)",
        )
    weight_map = _read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        refuse_checkpoint(f"{folder / INDEX_NAME} has no weight_map", "save the checkpoint again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            refuse_checkpoint(
                f"{folder / INDEX_NAME} puts {name[:80]!r} into {str(file)[:80]!r}",
                "an index names safetensors files of its own folder",
            )
        check_name(file, f"file name in {INDEX_NAME}")
    return weight_map


def _open_shard(folder: Path, name: str) -> Shard:
    path = folder / name
    _refuse_special(path)
    try:
        with path.open("rb") as handle:
            size = handle.seek(0, 2)
            handle.seek(0)
            head = handle.read(LENGTH_BYTES)
            if head == b"version ":
                refuse_checkpoint(
                    f"{path} is a Git LFS pointer, not the file", "run `git lfs pull`"
                )
            head += handle.read(header_bytes(head) - LENGTH_BYTES)
        return Shard(name, path, parse_header(head, file_bytes=size))
    except FileNotFoundError as err:
        raise InvalidInputError(
            f"{folder / INDEX_NAME} names {name!r}, which is not there",
            kind=Kind.CHECKPOINT,
            hint="fetch the missing file, or save the checkpoint again",
        ) from err
    except OSError as err:
        raise unreadable_file(path, err) from err
    except FormatError as err:
        raise InvalidInputError(
            f"{path}: {err.message}",
            kind=Kind.CHECKPOINT,
            hint=err.hint or "fetch the file again, or save the checkpoint again",
        ) from err


def _check_index(shards: Sequence[Shard], weight_map: Mapping[str, str] | None) -> None:
    """Every tensor in exactly one shard, and where the index says it is."""
    stored: dict[str, str] = {}
    for shard in shards:
        for name in shard.header.tensors:
            if name in stored:
                refuse_checkpoint(
                    f"tensor {name[:120]!r} is in both {stored[name]} and {shard.name}",
                    "save the checkpoint again into an empty folder",
                )
            stored[name] = shard.name
    if weight_map is None or weight_map == stored:
        return
    for name in sorted({*weight_map, *stored}):
        said, found = weight_map.get(name), stored.get(name)
        if said != found:
            refuse_checkpoint(
                f"tensor {name[:120]!r} is in {found or 'no file'},"
                f" the index says {said or 'nothing of it'}",
                "save the checkpoint again into an empty folder",
            )


def _entries(shards: Sequence[Shard], config: Mapping[str, Any]) -> tuple[TensorEntry, ...]:
    stored = {name: tensor for shard in shards for name, tensor in shard.header.tensors.items()}
    pair = find_tied_pair(config, stored)
    entries: list[TensorEntry] = []
    for shard in shards:
        for tensor in shard.header.data_order():
            aliases: tuple[str, ...] = ()
            if pair is not None and tensor.name == pair.embedding:
                aliases = (pair.head,)
                _check_twins(tensor, stored.get(pair.head))
            elif pair is not None and tensor.name == pair.head:
                if pair.embedding in stored:
                    continue  # an alias of the embedding's entry
                aliases = (pair.embedding,)
            entries.append(TensorEntry(tensor.name, tensor.dtype, tensor.shape, aliases))
    return tuple(entries)


def _check_twins(embedding: StoredTensor, head: StoredTensor | None) -> None:
    if head is not None and (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        refuse_checkpoint(
            f"tied tensors {embedding.name!r} and {head.name!r} differ in shape or dtype",
            "say tie_word_embeddings false in config.json if they are meant to differ",
        )


def _sort_files(
    folder: Path, shards: set[str], *, indexed: bool
) -> tuple[tuple[CheckpointFile, ...], tuple[LeftOut, ...]]:
    extras: list[CheckpointFile] = []
    left_out: list[LeftOut] = []
    for path in sorted(folder.iterdir()):
        if path.name in shards:
            continue
        is_index = indexed and path.name == INDEX_NAME
        reason = None if is_index else _reason_to_leave(path)
        if reason is None:
            extras.append(CheckpointFile(path.name, path))
        else:
            left_out.append(LeftOut(path.name, reason))
    return tuple(extras), tuple(left_out)


def _reason_to_leave(path: Path) -> str | None:
    if not path.is_file():
        return "not a regular file"
    if path.name.startswith("."):
        return "hidden"
    if path.name.endswith(_OTHER_WEIGHTS):
        return "weights that the checkpoint does not name"
    if path.stat().st_size > MAX_EXTRA_FILE_BYTES:
        return f"larger than {MAX_EXTRA_FILE_BYTES >> 20} MiB"
    try:
        check_name(path.name)
    except InvalidInputError:
        return f"its name has more than {MAX_NAME_CHARS} characters, or others than A-Za-z0-9._-"
    return None


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object of the checkpoint; {} when there is no such file."""
    _refuse_special(path)
    try:
        with path.open("rb") as handle:
            text = handle.read(MAX_JSON_BYTES + 1)
        document = json.loads(text)  # of a longer file it is cut, and so no JSON
    except FileNotFoundError:
        return {}
    except OSError as err:
        raise unreadable_file(path, err) from err
    except (ValueError, RecursionError) as err:
        raise InvalidInputError(
            f"{path} is not JSON: {err}", kind=Kind.CHECKPOINT, hint="save the checkpoint again"
        ) from err
    if not isinstance(document, dict):
        refuse_checkpoint(f"{path} is not a JSON object", "save the checkpoint again")
    return document


def _refuse_special(path: Path) -> None:
    """Opening a pipe that nobody writes to would wait for ever."""
    if path.exists() and not path.is_file() and not path.is_dir():
        refuse_checkpoint(f"{path} is a pipe or a device", "a checkpoint consists of plain files")


def refuse_checkpoint(message: str, hint: str) -> NoReturn:
    """Raise InvalidInputError(checkpoint)."""
    raise InvalidInputError(message, kind=Kind.CHECKPOINT, hint=hint)


def unreadable_file(path: Path, err: OSError) -> InvalidInputError:
    """What to raise for a file that the operating system does not give."""
    return InvalidInputError(
        f"{path} cannot be read: {err.strerror}",
        kind=Kind.CHECKPOINT,
        hint="check the path and its permissions",
    )
