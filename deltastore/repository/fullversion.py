"""A trainer whose baseline cannot be proved must not stop the run: it publishes the whole state.

Uploads a state as the files of a Hugging Face checkpoint, for a `full` version or an anchor: shards
with an index, every name that the template stores (both of tied tensors where it has both),
configuration and tokenizer files. Nothing exists by that: the caller's manifest names the files.

Memory, beside the state: two shards.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import numpy as np

from deltastore.format.checkpoint_file import build_header
from deltastore.format.coverage import match_entries
from deltastore.format.manifest import FileRef
from deltastore.ids import new_token
from deltastore.repository.full import read_file
from deltastore.storage.store import PutMode
from deltastore.storage.transfer import Uploader

if TYPE_CHECKING:
    from concurrent.futures import Future

    from deltastore.format.layout import BitState, TensorEntry
    from deltastore.repository.run import Run
    from deltastore.repository.template import Template
    from deltastore.storage.store import PutOutcome
    from deltastore.storage.transfer import OnBytes

SHARD_MAX_BYTES = 1 << 30
INDEX_NAME = "model.safetensors.index.json"


def upload_full(
    run: Run,
    version: int,
    state: BitState,
    template: Template,
    *,
    attempt: str | None = None,
    shard_max_bytes: int = SHARD_MAX_BYTES,
    streams: int = 2,
    on_bytes: OnBytes | None = None,
) -> tuple[FileRef, ...]:
    """Put a state's files under an attempt of their own; return what a manifest names them by.

    Args:
        attempt: the folder's name; random by default.
        shard_max_bytes: a single tensor above it has a file of its own.
        on_bytes: told of every file when it is ready, and again when it has been put.

    All files are confirmed when this returns. Raises StorageError, InvalidInputError (a template
    that does not cover the layout).
    """
    match_entries(state.layout, template.entries)
    attempt = attempt or new_token()
    shards = _split(template.entries, shard_max_bytes)
    refs: list[FileRef] = []
    weight_map: dict[str, str] = {}
    room_bytes = 2 * shard_max_bytes
    with Uploader(streams=streams, max_pending_bytes=room_bytes, on_bytes=on_bytes) as uploader:
        pending: list[Future[PutOutcome]] = []

        def put(name: str, body: bytes | bytearray) -> None:
            key = run.keys.anchor_file(version, attempt, name)
            digest = hashlib.sha256(body).hexdigest()
            pending.append(uploader.submit(run.store, key, body, mode=PutMode.CREATE))
            refs.append(FileRef(name, key, len(body), digest))

        for number, entries in enumerate(shards, 1):
            name = "model.safetensors"
            if len(shards) > 1:
                name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            weight_map |= dict.fromkeys((entry.name for entry in entries), name)
            put(name, _shard(state, entries, template))
        if len(shards) > 1:
            put(INDEX_NAME, _index(state, weight_map))
        for extra in template.extras:
            put(extra.name, read_file(run, extra))
        for future in pending:
            future.result()
    return tuple(refs)


def _split(entries: tuple[TensorEntry, ...], shard_max_bytes: int) -> list[list[TensorEntry]]:
    shards: list[list[TensorEntry]] = [[]]
    held_bytes = 0
    for entry in entries:
        size_bytes = _size_bytes(entry)
        if shards[-1] and held_bytes + size_bytes > shard_max_bytes:
            shards.append([])
            held_bytes = 0
        shards[-1].append(entry)
        held_bytes += size_bytes
    return shards


def _shard(state: BitState, entries: list[TensorEntry], template: Template) -> bytearray:
    header = build_header(entries, template.metadata)
    body = bytearray(header.file_bytes)
    body[: header.data_start] = header.raw
    for tensor in header.data_order():
        begin, end = header.file_range(tensor.name)
        body[begin:end] = state[tensor.name].view(np.uint8).data
    return body


def _index(state: BitState, weight_map: dict[str, str]) -> bytes:
    document = {
        "metadata": {"total_size": sum(state[name].nbytes for name in weight_map)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"


def _size_bytes(entry: TensorEntry) -> int:
    items = 1
    for size in entry.shape:
        items *= size
    return items * entry.dtype.item_bytes
