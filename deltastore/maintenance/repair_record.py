"""A region whose run.json or layout is damaged cannot be opened to be checked: these come first.

The layout is named by its digest, so the other region's is right or it is not used. run.json has no
digest anywhere; the other region's is taken only if a version manifest here is of the same run, id
and layout: a bucket of another run is never made to look like this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.errors import (
    DeltastoreError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    Kind,
    NotFoundError,
)
from deltastore.format.keys import KeyKind, RunKeys, parse_key
from deltastore.format.layout import Layout
from deltastore.format.manifest import RunRecord, VersionManifest
from deltastore.storage.store import PutMode

if TYPE_CHECKING:
    from deltastore.repository.run import Run
    from deltastore.storage.store import ObjectStore


def damaged_opening(store: ObjectStore, name: str, source: Run) -> list[str]:
    """Keys of run.json and the layout that are missing or damaged, as far as `source` shows.

    Raises IntegrityError(broken_chain) when nothing here says that this is the source's run.
    """
    keys, theirs = RunKeys(name), source.record
    damaged = []
    record = _read_record(store, keys)
    if record is None or (record.run_id, record.layout_digest) != (
        theirs.run_id,
        theirs.layout_digest,
    ):
        _require_witness(store, keys, source)
        damaged.append(keys.run_json)
    layout_key = keys.layout(theirs.layout_digest)
    if not _layout_holds(store, layout_key, theirs.layout_digest):
        damaged.append(layout_key)
    return damaged


def restore_opening(store: ObjectStore, name: str, source: Run) -> list[str]:
    """Copy what `damaged_opening` names, and raises, from another region; return the keys."""
    bodies = {
        RunKeys(name).run_json: source.record.to_bytes(),
        RunKeys(name).layout(source.layout.digest): source.layout.canonical_bytes(),
    }
    written = damaged_opening(store, name, source)
    for key in written:
        store.put(key, bodies[key], mode=PutMode.OVERWRITE)
    return written


def _read_record(store: ObjectStore, keys: RunKeys) -> RunRecord | None:
    try:
        return RunRecord.from_bytes(store.get(keys.run_json))
    except (FormatError, InvalidInputError):
        return None
    except NotFoundError as err:
        _require_object_missing(err)
        return None


def _layout_holds(store: ObjectStore, key: str, digest: str) -> bool:
    try:
        return Layout.from_bytes(store.get(key)).digest == digest
    except (FormatError, InvalidInputError):
        return False
    except NotFoundError as err:
        _require_object_missing(err)
        return False


def _require_witness(store: ObjectStore, keys: RunKeys, source: Run) -> None:
    """Raise unless a version manifest in this bucket is of the source's run."""
    for info in store.list(keys.versions):
        try:
            if parse_key(info.key).kind is not KeyKind.VERSION:
                continue
            core = VersionManifest.from_bytes(store.get(info.key)).core
        except FormatError:
            continue  # damaged as well: the next one is as good a witness
        record = source.record
        ours = (core.run, core.run_id, core.layout_digest)
        if ours != (record.run, record.run_id, record.layout_digest):
            raise _another_run(source)
        return
    raise _another_run(source)


def _require_object_missing(err: DeltastoreError) -> None:
    if err.kind is not Kind.OBJECT_MISSING:
        raise err


def _another_run(source: Run) -> IntegrityError:
    return IntegrityError(
        f"nothing in this bucket says that it holds the run of {source.store.url}",
        kind=Kind.BROKEN_CHAIN,
        run=source.name,
        hint="name another region of the same run",
    )
