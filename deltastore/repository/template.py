"""A rebuilt checkpoint without its tokenizer, or with one of two tied names, does not load.

Version 0 says how a checkpoint of this run looks: which names its files store and in which order,
and which further files (configuration, tokenizer) it has. Where retention took version 0's files,
the newest anchor or full version that is there says it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.errors import DeltastoreError, FormatError, IntegrityError, Kind, NotFoundError
from deltastore.format.checkpoint_file import (
    LENGTH_BYTES,
    CheckpointHeader,
    header_bytes,
    parse_header,
)
from deltastore.format.layout import TensorEntry
from deltastore.repository.fetch import load_manifest
from deltastore.repository.full import WEIGHTS_SUFFIX
from deltastore.repository.shortcuts import list_anchors, load_anchor
from deltastore.storage.store import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from deltastore.format.manifest import FileRef
    from deltastore.repository.run import Run

INDEX_SUFFIX = ".safetensors.index.json"
DEFAULT_METADATA = {"format": "pt"}
"""What Hugging Face tools write, and transformers asks for."""


@dataclass(frozen=True, slots=True)
class Template:
    """How a checkpoint of a run looks.

    Args:
        entries: the tensors that files store, under each name they are stored, in order.
        metadata: strings of the safetensors headers.
        headers: of the shards, by file name; empty when no file is in this bucket.
        extras: configuration and tokenizer files, as this bucket has them.
    """

    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    headers: Mapping[str, CheckpointHeader]
    extras: tuple[FileRef, ...]


def read_template(run: Run) -> Template:
    """The template of a run, from the first whole state whose files are all there.

    A run whose version 0 lies elsewhere and that has no anchor yet has no files: then the layout's
    own names are all there is.
    """
    cause: DeltastoreError | None = None
    for files in _candidates(run):
        try:
            return _read(run, files)
        except (NotFoundError, FormatError) as err:
            if err.kind is Kind.BUCKET_MISSING:
                raise
            cause = cause or err  # gone or damaged: the next one is as good
    if cause is not None:
        raise cause
    entries = tuple(TensorEntry(s.name, s.dtype, s.shape) for s in run.layout.tensors)
    return Template(entries, DEFAULT_METADATA, {}, ())


def _candidates(run: Run) -> Iterator[Sequence[FileRef]]:
    """Files of whole states: of version 0, then of anchors, newest first."""
    try:
        zero = load_manifest(run, 0)
    except NotFoundError as err:
        if err.kind is not Kind.VERSION_MISSING:
            raise
    else:
        if all(file.key is not None for file in zero.core.files):
            yield zero.core.files
    for listed in reversed(list_anchors(run)):
        try:
            target = load_manifest(run, listed.version)
            yield load_anchor(run, target).core.files
        except (NotFoundError, FormatError, IntegrityError):
            continue  # fsck's business; an older anchor serves


def _read(run: Run, files: Sequence[FileRef]) -> Template:
    headers: dict[str, CheckpointHeader] = {}
    entries: list[TensorEntry] = []
    extras: list[FileRef] = []
    metadata: dict[str, str] = {}
    for file in files:
        if file.key is None:
            continue
        if file.name.endswith(INDEX_SUFFIX):
            continue  # says which tensor is in which shard: made anew
        if not file.name.endswith(WEIGHTS_SUFFIX):
            run.store.head(file.key)
            extras.append(file)
            continue
        length = run.store.get(file.key, ByteRange(0, LENGTH_BYTES))
        head = run.store.get(file.key, ByteRange(0, header_bytes(length)))
        header = parse_header(head, file_bytes=file.size_bytes)
        headers[file.name] = header
        metadata = metadata or dict(header.metadata)
        entries += [TensorEntry(t.name, t.dtype, t.shape) for t in header.data_order()]
    return Template(tuple(entries), metadata or DEFAULT_METADATA, headers, tuple(extras))
