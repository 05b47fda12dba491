"""A version number alone names nothing: `log` and `show` print what a version is and its hash.

Both read manifests only: no weights are fetched.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from deltastore.cli.output import Document, Output, share_text, size_text, stamp_text
from deltastore.format.manifest import VersionKind
from deltastore.repository.fetch import load_manifest
from deltastore.repository.resolve import find_head

if TYPE_CHECKING:
    from rich.table import Table

    from deltastore.cli.connection import Connection
    from deltastore.format.manifest import VersionManifest
    from deltastore.repository.run import Run


def list_history(
    run_url: str, connection: Connection, *, limit: int, streams: int, output: Output
) -> None:
    """Print the newest `limit` versions, newest last."""
    with connection.run(run_url, streams=streams) as run:
        head = find_head(run)
        first = max(0, head - limit + 1)
        with ThreadPoolExecutor(streams) as pool:
            manifests = list(pool.map(lambda v: load_manifest(run, v), range(first, head + 1)))
        document = {
            **run_document(run, run_url),
            "head": head,
            "versions": [version_document(run, manifest) for manifest in manifests],
        }
        output.emit(document, lambda: _history_table(run, manifests))


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
        }
        output.emit(document, lambda: _version_table(run, head, manifest))


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


def _history_table(run: Run, manifests: list[VersionManifest]) -> Table:
    from rich.table import Table

    title = f"{run.name}: {len(run.layout)} tensors, {size_text(run.dense_bytes)} dense"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("version", "kind", "steps", "changed", "density", "size", "of dense"):
        table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    table.add_column("created", no_wrap=True)
    table.add_column("policy hash", no_wrap=True)
    for manifest in manifests:
        core = manifest.core
        delta = core.kind is VersionKind.DELTA
        table.add_row(
            str(core.version),
            core.kind.value,
            _steps_text(manifest),
            str(core.nnz) if delta else "-",
            share_text(core.nnz, run.layout.elements) if delta else "-",
            size_text(core.delta_bytes),
            share_text(core.delta_bytes, run.dense_bytes),
            stamp_text(core.created_ms),
            manifest.policy_hash[:12],
        )
    return table


def _version_table(run: Run, head: int, manifest: VersionManifest) -> Table:
    from rich.table import Table

    core = manifest.core
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    rows = [
        ("run", f"{run.name} ({run.record.run_id})"),
        ("version", f"{core.version} of {head}, {core.kind.value}"),
        ("policy hash", manifest.policy_hash),
        ("base", "-" if core.base_version is None else str(core.base_version)),
        ("base policy hash", core.base_policy_hash or "-"),
        ("fingerprint", str(core.fingerprint_after)),
        ("steps", _steps_text(manifest)),
        ("changed", f"{core.nnz} ({share_text(core.nnz, run.layout.elements)})"),
        ("size", f"{size_text(core.delta_bytes)} of {size_text(run.dense_bytes)} dense"),
        ("encodings", ", ".join(core.encodings) or "-"),
        ("generation", str(core.generation)),
        ("created", stamp_text(core.created_ms)),
        ("signed by", ", ".join(s.key_id for s in manifest.signatures) or "nobody"),
    ]
    rows += [("segment", f"{s.key}  {size_text(s.size_bytes)}") for s in core.segments]
    rows += [("file", f"{f.name}  {size_text(f.size_bytes)}") for f in core.files]
    for row in rows:
        table.add_row(*row)
    return table


def _steps_text(manifest: VersionManifest) -> str:
    first, last = manifest.core.step_first, manifest.core.step_last
    return str(last) if first == last else f"{first}-{last}"
