"""A run opened on the wrong bucket or half created corrupts both: opening checks, creating resumes.

Write order of `create_run` (each step create-only, each safe to repeat):
  1. layout table        a crash leaves an unreferenced object
  2. anchor files        under an attempt of their own: orphans of a crash are never referenced
  3. run.json            the run exists; `create_run` by anyone with the same layout finishes it
  4. versions/0          the run is usable; in every other region steps 1 to 4 follow
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.errors import ConflictError, IntegrityError, InvalidInputError, Kind, NotFoundError
from deltastore.format.keys import RunKeys
from deltastore.format.layout import Layout
from deltastore.format.manifest import (
    FileRef,
    RunRecord,
    VersionCore,
    VersionKind,
    VersionManifest,
)
from deltastore.format.signing import Signer, unsigned
from deltastore.ids import check_name, new_token
from deltastore.repository.body_checks import have_bodies_checked
from deltastore.storage.mapped import mapped_body
from deltastore.storage.probe import probe_store, require_home
from deltastore.storage.store import ObjectStore, PutMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from deltastore.clock import Clock
    from deltastore.format.fingerprint import Fingerprint

HASH_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """One run as one region's bucket holds it.

    Args:
        region: what events and metrics call that region.
    """

    store: ObjectStore
    keys: RunKeys
    record: RunRecord
    layout: Layout
    region: str = ""

    @property
    def name(self) -> str:
        """The run's name."""
        return self.record.run

    @property
    def dense_bytes(self) -> int:
        """Bytes of a whole state: what a dense broadcast would send."""
        return self.layout.size_bytes


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A local file of version 0 and the name under which a Hugging Face tool looks for it."""

    name: str
    path: Path


def _nobody(size_bytes: int) -> None:
    """Told of bytes that nobody watches."""


def open_run(store: ObjectStore, name: str, *, region: str | None = None) -> Run:
    """Open an existing run.

    Args:
        region: what events shall call the region of this bucket; None: it is home.

    Raises NotFoundError(run_missing) when the store has none of that name, IntegrityError
    (broken_chain, layout_mismatch) when what lies there is not of it, and whatever the store says
    of credentials or a missing bucket.
    """
    keys = RunKeys(check_name(name, "run name"))
    record = _read_record(store, keys)
    if record is None:
        raise NotFoundError(
            f"there is no run {name!r} at {store.url}",
            kind=Kind.RUN_MISSING,
            run=name,
            hint="check the URL, or make the run with `deltastore init`",
        )
    layout_key = keys.layout(record.layout_digest)
    layout = Layout.from_bytes(store.get(layout_key))
    if layout.digest != record.layout_digest:
        raise IntegrityError(
            "the layout table is not the one that run.json names",
            kind=Kind.LAYOUT_MISMATCH,
            run=name,
            key=layout_key,
            hint="restore the object from another region",
        )
    return Run(store, keys, record, layout, region or record.home)


def create_run(
    home: ObjectStore,
    name: str,
    *,
    layout: Layout,
    files: Sequence[CheckpointFile],
    fingerprint: Fingerprint,
    clock: Clock,
    regions: Mapping[str, ObjectStore] | None = None,
    home_name: str = "home",
    step: int = 0,
    probe: bool = True,
    signer: Signer = unsigned,
    on_put: Callable[[int], None] = _nobody,
) -> Run:
    """Make a run whose version 0 is the checkpoint `files` hold; return it as home has it.

    Args:
        home: store of the region in which versions will be committed.
        layout, fingerprint: of the checkpoint's state.
        files: safetensors shards, index, config and tokenizer files.
        regions: name to store of the other regions.
        step: optimizer steps already in the checkpoint.
        probe: whether to check first that `home` honours create-only puts.
        signer: makes the signatures of version 0's manifest from its core's bytes.
        on_put: told the bytes of every file that a region has got, one after the other.

    Raises ConflictError(run_exists), StorageError(no_conditional_put).
    """
    keys = RunKeys(check_name(name, "run name"))
    if not files:
        raise InvalidInputError("a run needs the files of version 0", kind=Kind.CHECKPOINT)
    if probe:
        require_home(probe_store(home))
        for store in (home, *(regions or {}).values()):
            have_bodies_checked(store, keys)
    record = _read_record(home, keys)
    if record is None:
        record = RunRecord(
            run=name,
            run_id=new_token(),
            layout_digest=layout.digest,
            home=check_name(home_name, "region"),
            created_ms=int(clock.utc_s() * 1000),
        )
        manifest = _upload_version_zero(
            home, keys, record, layout, files, fingerprint, step, signer, on_put, claim=True
        )
    else:
        manifest = _finish(home, keys, record, layout, files, fingerprint, step, signer, on_put)
    for store in (regions or {}).values():
        _copy_version_zero(store, keys, record, layout, files, manifest, on_put)
    return Run(home, keys, record, layout, record.home)


def _finish(
    home: ObjectStore,
    keys: RunKeys,
    record: RunRecord,
    layout: Layout,
    files: Sequence[CheckpointFile],
    fingerprint: Fingerprint,
    step: int,
    signer: Signer,
    on_put: Callable[[int], None],
) -> VersionManifest:
    """Finish a run whose creation was cut after run.json; refuse one that is whole."""
    exists = _object_exists(home, keys.version(0))
    if exists or record.layout_digest != layout.digest:
        raise ConflictError(
            f"run {record.run!r} exists already at {home.url}",
            kind=Kind.RUN_EXISTS,
            run=record.run,
            hint="choose another name, or publish to the run that is there",
        )
    return _upload_version_zero(
        home, keys, record, layout, files, fingerprint, step, signer, on_put, claim=False
    )


def _upload_version_zero(
    home: ObjectStore,
    keys: RunKeys,
    record: RunRecord,
    layout: Layout,
    files: Sequence[CheckpointFile],
    fingerprint: Fingerprint,
    step: int,
    signer: Signer,
    on_put: Callable[[int], None],
    *,
    claim: bool,
) -> VersionManifest:
    home.put(keys.layout(layout.digest), layout.canonical_bytes(), mode=PutMode.CREATE)
    attempt = new_token()
    refs = tuple(
        _upload_file(home, keys.anchor_file(0, attempt, file.name), file, on_put) for file in files
    )
    core = VersionCore(
        run=record.run,
        run_id=record.run_id,
        version=0,
        kind=VersionKind.FULL,
        base_version=None,
        base_policy_hash=None,
        layout_digest=layout.digest,
        segments=(),
        files=refs,
        nnz=0,
        fingerprint_before=None,
        fingerprint_after=fingerprint,
        encodings=(),
        step_first=step,
        step_last=step,
        generation=1,
        writer_nonce=new_token(),
        created_ms=record.created_ms,
    )
    manifest = VersionManifest(core, signer(core.canonical_bytes()))
    try:
        if claim:
            home.put(keys.run_json, record.to_bytes(), mode=PutMode.CREATE)
        home.put(keys.version(0), manifest.to_bytes(), mode=PutMode.CREATE)
    except ConflictError as err:
        raise ConflictError(
            f"run {record.run!r} was made by somebody else at the same time",
            kind=Kind.RUN_EXISTS,
            run=record.run,
            hint="publish to the run that is there, or choose another name",
        ) from err
    return manifest


def _copy_version_zero(
    store: ObjectStore,
    keys: RunKeys,
    record: RunRecord,
    layout: Layout,
    files: Sequence[CheckpointFile],
    manifest: VersionManifest,
    on_put: Callable[[int], None],
) -> None:
    store.put(keys.layout(layout.digest), layout.canonical_bytes(), mode=PutMode.CREATE)
    for ref, file in zip(manifest.core.files, files, strict=True):
        if ref.key is not None:
            with _mapped(file.path) as body:
                store.put(ref.key, body, mode=PutMode.CREATE)
                on_put(len(body))
    store.put(keys.run_json, record.to_bytes(), mode=PutMode.CREATE)
    store.put(keys.version(0), manifest.to_bytes(), mode=PutMode.CREATE)


def _upload_file(
    store: ObjectStore, key: str, file: CheckpointFile, on_put: Callable[[int], None]
) -> FileRef:
    with _mapped(file.path) as body:
        digest = hashlib.sha256()
        for begin in range(0, len(body), HASH_CHUNK_BYTES):
            digest.update(body[begin : begin + HASH_CHUNK_BYTES])
        store.put(key, body, mode=PutMode.CREATE)
        on_put(len(body))
        return FileRef(file.name, key, len(body), digest.hexdigest())


@contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    with path.open("rb") as handle, mapped_body(handle) as body:
        yield body


def _read_record(store: ObjectStore, keys: RunKeys) -> RunRecord | None:
    try:
        text = store.get(keys.run_json)
    except NotFoundError as err:
        if err.kind is not Kind.OBJECT_MISSING:
            raise
        return None
    record = RunRecord.from_bytes(text)
    if record.run != keys.run:
        raise IntegrityError(
            f"run.json at {store.url} is of run {record.run!r}",
            kind=Kind.BROKEN_CHAIN,
            run=keys.run,
            key=keys.run_json,
            hint="a run cannot be renamed: its manifests name it; move it under its own name",
        )
    return record


def _object_exists(store: ObjectStore, key: str) -> bool:
    try:
        store.head(key)
    except NotFoundError as err:
        if err.kind is not Kind.OBJECT_MISSING:
            raise
        return False
    return True
