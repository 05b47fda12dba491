"""A checkpoint without its tokenizer, or with its tensors in other files, is not the one it was.

What a checkpoint of a run is made of beside its weights: the headers of its shards, and its other
files. From version 0, byte for byte; where retention took that, from the newest whole state there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.errors import Kind, NotFoundError
from deltastore.format.checkpoint_file import (
    LENGTH_BYTES,
    build_header,
    header_bytes,
    parse_header,
)
from deltastore.repository.fetch import load_manifest
from deltastore.repository.full import WEIGHTS_SUFFIX, read_file
from deltastore.repository.template import read_template
from deltastore.storage.store import ByteRange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deltastore.format.checkpoint_file import CheckpointHeader
    from deltastore.format.manifest import FileRef
    from deltastore.repository.run import Run

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class CheckpointParts:
    """What makes a checkpoint folder, beside the state.

    Args:
        headers: of the safetensors files, by name.
        extras: the bytes of the other files, by name.
    """

    headers: Mapping[str, CheckpointHeader]
    extras: Mapping[str, bytes]


def read_parts(run: Run, *, streams: int) -> CheckpointParts:
    """The parts of a checkpoint of this run."""
    try:
        files = load_manifest(run, 0).core.files
        if all(file.key is not None for file in files):
            return _of_files(run, files, streams)
    except NotFoundError as err:
        if err.kind is Kind.BUCKET_MISSING:
            raise
    template = read_template(run)
    headers = dict(template.headers)
    if not headers:
        headers["model.safetensors"] = build_header(template.entries, template.metadata)
    extras = {file.name: read_file(run, file, streams=streams) for file in template.extras}
    if len(headers) > 1:
        extras[INDEX_NAME] = _index(run, headers)
    return CheckpointParts(headers, extras)


def _of_files(run: Run, files: Sequence[FileRef], streams: int) -> CheckpointParts:
    headers: dict[str, CheckpointHeader] = {}
    extras: dict[str, bytes] = {}
    for file in files:
        if file.key is None:
            continue
        if file.name.endswith(WEIGHTS_SUFFIX):
            length = run.store.get(file.key, ByteRange(0, LENGTH_BYTES))
            head = run.store.get(file.key, ByteRange(0, header_bytes(length)))
            headers[file.name] = parse_header(head, file_bytes=file.size_bytes)
        else:
            extras[file.name] = read_file(run, file, streams=streams)
    return CheckpointParts(headers, extras)


def _index(run: Run, headers: Mapping[str, CheckpointHeader]) -> bytes:
    """Which tensor is in which shard, as Hugging Face tools write it."""
    weight_map = {name: file for file, header in headers.items() for name in header.tensors}
    document = {
        "metadata": {"total_size": run.dense_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"
