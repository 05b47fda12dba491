"""A version number alone names nothing: `log` and `show` print what a version is and its hash.

Both read manifests only: no weights are fetched. What publishing took comes from event logs.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from deltastore.cli.history_table import history_table, version_table
from deltastore.cli.stages import read_stages, stages_document
from deltastore.errors import FormatError, IntegrityError, Kind, NotFoundError
from deltastore.repository.fetch import load_manifest
from deltastore.repository.resolve import find_head
from deltastore.repository.shortcuts import (
    list_anchors,
    list_composites,
    load_anchor,
    load_composite,
    point_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from deltastore.cli.connection import Connection
    from deltastore.cli.output import Document, Output
    from deltastore.format.manifest import VersionManifest
    from deltastore.format.shortcut import AnchorManifest, CompositeManifest
    from deltastore.repository.run import Run


def list_history(
    run_url: str,
    connection: Connection,
    *,
    limit: int,
    streams: int,
    output: Output,
    events: Sequence[Path] = (),
) -> None:
    """Print the newest `limit` versions, newest last, with the times that event logs have."""
    with connection.run(run_url, streams=streams) as run:
        head = find_head(run)
        first = max(0, head - limit + 1)
        with ThreadPoolExecutor(streams) as pool:
            manifests = list(pool.map(lambda v: load_manifest(run, v), range(first, head + 1)))
        stages = read_stages(events, manifests)
        document = {
            **run_document(run, run_url),
            "head": head,
            "versions": [version_document(run, manifest) for manifest in manifests],
            "stages": [stages_document(v, event) for v, event in sorted(stages.items())],
        }
        output.emit(document, lambda: history_table(run, manifests, stages))


def show_version(
    run_url: str, connection: Connection, *, version: int | None, output: Output
) -> None:
    """Print one version (None: HEAD)."""
    with connection.run(run_url) as run:
        head = find_head(run)
        manifest = load_manifest(run, head if version is None else version)
        document = {
            **run_document(run, run_url),
            "head": head,
            "version": version_document(run, manifest),
            "segments": [
                {"key": s.key, "size_bytes": s.size_bytes, "sha256": s.sha256, "nnz": s.nnz}
                for s in manifest.core.segments
            ],
            "files": [
                {"name": f.name, "key": f.key, "size_bytes": f.size_bytes, "sha256": f.sha256}
                for f in manifest.core.files
            ],
            "signed_by": [signature.key_id for signature in manifest.signatures],
            "shortcuts": _shortcuts_to(run, manifest),
        }
        output.emit(document, lambda: version_table(run, head, manifest, document["shortcuts"]))


def _shortcuts_to(run: Run, target: VersionManifest) -> list[Document]:
    """The shortcuts that lead to a version; one that does not hold is `verify`'s to name."""
    version = target.core.version
    listed = [one for one in list_anchors(run) if one.version == version]
    listed += [one for one in list_composites(run) if one.version == version]
    found: list[Document] = []
    for one in listed:
        try:
            if one.base is None:
                anchor = load_anchor(run, target)
                found.append(_shortcut_document(anchor, None, len(anchor.core.files)))
            else:
                start = point_of(load_manifest(run, one.base))
                composite = load_composite(run, start, target)
                objects = len(composite.core.segments)
                found.append(_shortcut_document(composite, one.base, objects))
        except (FormatError, IntegrityError, NotFoundError) as err:
            if err.kind is Kind.BUCKET_MISSING:
                raise
    return found


def _shortcut_document(
    manifest: AnchorManifest | CompositeManifest, base: int | None, objects: int
) -> Document:
    core = manifest.core
    return {
        "kind": "anchor" if base is None else "composite",
        "base_version": base,
        "version": core.target.version,
        "size_bytes": core.size_bytes,
        "objects": objects,
        "created_ms": core.created_ms,
        "signed_by": [signature.key_id for signature in manifest.signatures],
    }


def run_document(run: Run, run_url: str) -> Document:
    """What names a run, in every command's document."""
    return {
        "run_url": run_url,
        "run": run.name,
        "run_id": run.record.run_id,
        "layout_digest": run.layout.digest,
        "home": run.record.home,
        "created_ms": run.record.created_ms,
        "tensors": len(run.layout),
        "elements": run.layout.elements,
        "dense_bytes": run.dense_bytes,
    }


def version_document(run: Run, manifest: VersionManifest) -> Document:
    """What a version is, in every command's document."""
    core = manifest.core
    before = core.fingerprint_before
    return {
        "version": core.version,
        "kind": core.kind.value,
        "policy_hash": manifest.policy_hash,
        "base_version": core.base_version,
        "base_policy_hash": core.base_policy_hash,
        "fingerprint_before": None if before is None else str(before),
        "fingerprint_after": str(core.fingerprint_after),
        "step_first": core.step_first,
        "step_last": core.step_last,
        "nnz": core.nnz,
        "density": core.nnz / run.layout.elements if run.layout.elements else 0.0,
        "size_bytes": core.delta_bytes,
        "objects": len(core.segments) + len(core.files),
        "encodings": list(core.encodings),
        "generation": core.generation,
        "created_ms": core.created_ms,
    }
