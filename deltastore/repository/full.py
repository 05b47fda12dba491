"""Reading a 16 GB anchor into memory twice needs 32 GB: files stream through, into their tensors.

The whole state of a full version, from the run's own objects: safetensors shards are fetched by
parallel ranged reads, hashed in order and copied to where their tensors lie.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from deltastore.errors import (
    FormatError,
    IntegrityError,
    InvalidInputError,
    Kind,
    NotFoundError,
)
from deltastore.format.checkpoint_file import header_bytes, parse_header
from deltastore.format.layout import BitState
from deltastore.format.manifest import VersionKind
from deltastore.format.mixing import fingerprint_state
from deltastore.storage.store import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from deltastore.format.fingerprint import Fingerprint
    from deltastore.format.manifest import FileRef, VersionManifest
    from deltastore.repository.run import Run

CHUNK_BYTES = 8 << 20
WEIGHTS_SUFFIX = ".safetensors"


def fetch_full_state(
    run: Run,
    manifest: VersionManifest,
    *,
    streams: int,
    progress: Callable[[int], None] | None = None,
) -> BitState:
    """The state of a full version, proved by the digests of its files and by its fingerprint.

    Memory: the state and `streams` x 8 MiB. `progress` is called with the bytes of each chunk.
    Raises IntegrityError (digest, fingerprint), FormatError, NotFoundError(file_missing).
    """
    core = manifest.core
    return fetch_state(
        run,
        core.files,
        version=core.version,
        fingerprint=core.fingerprint_after,
        streams=streams,
        progress=progress,
    )


def fetch_state(
    run: Run,
    files: Sequence[FileRef],
    *,
    version: int,
    fingerprint: Fingerprint,
    streams: int,
    progress: Callable[[int], None] | None = None,
) -> BitState:
    """The state that files hold, of a full version or of an anchor; see `fetch_full_state`."""
    state = BitState.zeros(run.layout)
    filled: set[int] = set()
    for file in files:
        if file.name.endswith(WEIGHTS_SUFFIX):
            filled |= _read_shard(run, file, state, streams, progress)
    absent = [s.name for i, s in enumerate(run.layout.tensors) if i not in filled]
    if absent:
        raise IntegrityError(
            f"the files of version {version} lack {len(absent)} tensors: {absent[:5]}",
            kind=Kind.LAYOUT_MISMATCH,
            run=run.name,
            version=version,
        )
    got = fingerprint_state(state)
    if got != fingerprint:
        raise IntegrityError(
            f"the files of version {version} hold state {got}, not {fingerprint}",
            kind=Kind.FINGERPRINT,
            run=run.name,
            version=version,
        )
    return state


def read_file(run: Run, file: FileRef, *, streams: int = 8) -> bytes:
    """A whole small file (configuration, tokenizer), its SHA-256 checked."""
    return b"".join(stream_file(run, file, streams))


def check_file(run: Run, file: FileRef, *, streams: int = 8) -> None:
    """Read a file of any size and check its SHA-256, keeping nothing."""
    for _ in stream_file(run, file, streams):
        pass


def download_files(
    run: Run, manifest: VersionManifest, folder: Path, *, weights: bool, streams: int = 8
) -> list[Path]:
    """Write a full version's files into an existing folder; verified, config and tokenizer first.

    Args:
        weights: whether to fetch the safetensors shards too.
    """
    if manifest.core.kind is not VersionKind.FULL:
        raise NotFoundError(
            f"version {manifest.core.version} is a delta: it has no files of its own",
            kind=Kind.FILE_MISSING,
            run=run.name,
            version=manifest.core.version,
            hint="take the files of version 0",
        )
    files = [f for f in manifest.core.files if weights or not f.name.endswith(WEIGHTS_SUFFIX)]
    written = []
    for file in sorted(files, key=lambda f: f.name.endswith(WEIGHTS_SUFFIX)):
        path = folder / file.name
        with path.open("xb") as handle:
            for chunk in stream_file(run, file, streams):
                handle.write(chunk)
        written.append(path)
    return written


def _read_shard(
    run: Run,
    file: FileRef,
    state: BitState,
    streams: int,
    progress: Callable[[int], None] | None,
) -> set[int]:
    """Copy one shard's tensors into the state; return the positions it filled."""
    prefix = b""
    places: list[tuple[int, int, NDArray[np.uint8]]] | None = None
    filled: set[int] = set()
    offset = 0
    for chunk in stream_file(run, file, streams):
        if progress is not None:
            progress(len(chunk))
        if places is None:
            prefix += chunk
            offset += len(chunk)
            if offset < file.size_bytes and len(prefix) < header_bytes(prefix):
                continue
            places, filled = _places(run, file, prefix, state)
            _copy(places, 0, prefix)
        else:
            _copy(places, offset, chunk)
            offset += len(chunk)
    if places is None:
        raise FormatError(
            f"file {file.name} ends inside its header", kind=Kind.TRUNCATED, key=file.key
        )
    return filled


def _places(
    run: Run, file: FileRef, head: bytes, state: BitState
) -> tuple[list[tuple[int, int, NDArray[np.uint8]]], set[int]]:
    """Where each tensor of a shard begins and ends in the file, and the bytes it goes to."""
    places = []
    filled = set()
    parsed = parse_header(head, file_bytes=file.size_bytes)
    for tensor in parsed.tensors.values():
        position = run.layout.position(tensor.name)
        if position is None:
            raise IntegrityError(
                f"file {file.name} holds tensor {tensor.name!r}, which the layout has not",
                kind=Kind.LAYOUT_MISMATCH,
                run=run.name,
                key=file.key,
            )
        spec = run.layout.tensors[position]
        if (tensor.dtype, tensor.shape) != (spec.dtype, spec.shape):
            raise IntegrityError(
                f"tensor {tensor.name!r} is {tensor.dtype} {tensor.shape} in {file.name},"
                f" {spec.dtype} {spec.shape} in the layout",
                kind=Kind.LAYOUT_MISMATCH,
                run=run.name,
                key=file.key,
            )
        target = state.arrays[position].view(np.uint8)
        begin, end = parsed.file_range(tensor.name)
        places.append((begin, end, target))
        filled.add(position)
    return sorted(places, key=lambda place: place[0]), filled


def _copy(places: list[tuple[int, int, NDArray[np.uint8]]], offset: int, chunk: bytes) -> None:
    """Copy the parts of the chunk at `offset` of the file that belong to tensors."""
    end = offset + len(chunk)
    source = np.frombuffer(chunk, np.uint8)
    for begin, stop, target in places:
        low, high = max(begin, offset), min(stop, end)
        if low < high:
            target[low - begin : high - begin] = source[low - offset : high - offset]


def stream_file(run: Run, file: FileRef, streams: int) -> Iterator[bytes]:
    """The file's bytes in order, fetched ahead by `streams` ranged reads, its SHA-256 checked."""
    if file.key is None:
        raise NotFoundError(
            f"the run does not hold {file.name}: version 0 is an external checkpoint",
            kind=Kind.FILE_MISSING,
            run=run.name,
            hint="start from a local copy of that checkpoint",
        )
    digest = hashlib.sha256()
    for chunk in _ranges(run, file.key, file.size_bytes, streams):
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != file.sha256:
        raise IntegrityError(
            f"file {file.name} has another SHA-256 than the manifest says",
            kind=Kind.DIGEST,
            run=run.name,
            key=file.key,
            hint="restore the object from another region",
        )


def require_size(run: Run, key: str, size_bytes: int) -> None:
    """Refuse an object of another size unread: whoever can write to the bucket chose that size.

    Raises IntegrityError(digest), and NotFoundError when there is none.
    """
    found = run.store.head(key).size_bytes
    if found != size_bytes:
        raise _wrong_size(run, key, f"has {found} bytes, not the {size_bytes}")


def chunks(size_bytes: int) -> Iterator[ByteRange]:
    """The ranges in which an object of that size is read, in order; an empty one has none."""
    for start in range(0, size_bytes, CHUNK_BYTES):
        yield ByteRange(start, min(start + CHUNK_BYTES, size_bytes))


def _ranges(run: Run, key: str, size_bytes: int, streams: int) -> Iterator[bytes]:
    require_size(run, key, size_bytes)
    try:
        yield from _read_ranges(run, key, size_bytes, streams)
    except InvalidInputError as err:
        if err.kind is not Kind.RANGE:
            raise
        raise _wrong_size(run, key, f"became shorter than the {size_bytes} bytes") from err


def _wrong_size(run: Run, key: str, how: str) -> IntegrityError:
    return IntegrityError(
        f"the object {how} that its manifest names",
        kind=Kind.DIGEST,
        run=run.name,
        key=key,
        hint="restore the object from another region",
    )


def _read_ranges(run: Run, key: str, size_bytes: int, streams: int) -> Iterator[bytes]:
    if size_bytes <= CHUNK_BYTES:  # one request needs no threads; no range fits an empty object
        for only in chunks(size_bytes):
            yield run.store.get(key, only)
        return
    parts = chunks(size_bytes)
    with ThreadPoolExecutor(streams, thread_name_prefix="full") as pool:
        ahead: list[Future[bytes]] = []
        try:
            while True:
                while len(ahead) < streams and (part := next(parts, None)) is not None:
                    ahead.append(pool.submit(run.store.get, key, part))
                if not ahead:
                    return
                yield ahead.pop(0).result()
        finally:
            for future in ahead:
                future.cancel()
