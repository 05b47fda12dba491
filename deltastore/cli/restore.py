"""A backup that cannot be restored is no backup: `replay` makes a checkpoint of the bucket alone.

The checkpoint has the files of version 0 (configuration, tokenizer) and the weights of the version
asked for, in the same shards, names and order; its state is proved by fingerprint before it is
written.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from deltastore.adapters.safetensors_write import write_checkpoint
from deltastore.cli.files import refuse_existing
from deltastore.cli.history import run_document, version_document
from deltastore.cli.output import Output, size_text
from deltastore.cli.progress import progress
from deltastore.clock import SystemClock
from deltastore.format.checkpoint_file import LENGTH_BYTES, header_bytes, parse_header
from deltastore.pipeline.replay import replay
from deltastore.repository.fetch import load_manifest
from deltastore.repository.full import WEIGHTS_SUFFIX, download_files
from deltastore.storage.store import ByteRange

if TYPE_CHECKING:
    from deltastore.cli.connection import Connection
    from deltastore.format.checkpoint_file import CheckpointHeader
    from deltastore.format.manifest import VersionManifest
    from deltastore.repository.run import Run


def replay_version(
    run_url: str,
    connection: Connection,
    out: Path,
    *,
    version: int | None,
    streams: int,
    output: Output,
) -> None:
    """Rebuild a version (None: HEAD) and write it as the checkpoint folder `out`."""
    refuse_existing(out)
    with connection.run(run_url, streams=streams) as run:
        with progress(f"replay {run.name}") as meter:
            replayed = replay(
                run, version, clock=SystemClock(), streams=streams, progress=meter.advance
            )
        start = load_manifest(run, 0)
        with tempfile.TemporaryDirectory(prefix="deltastore-") as folder:
            extras = download_files(run, start, Path(folder), weights=False, streams=streams)
            with progress(f"write {out}"):
                write_checkpoint(
                    replayed.state,
                    out,
                    headers=_remote_headers(run, start),
                    extras={path.name: path for path in extras},
                )
        report = replayed.report
        document = {
            **run_document(run, run_url),
            "version": version_document(run, replayed.manifest),
            "out": str(out),
            "via": report.via,
            "read_bytes": report.size_bytes,
            "links": report.links,
            "seconds": round(report.seconds, 3),
        }
        output.emit(
            document,
            lambda: (
                f"version {replayed.manifest.core.version} of {run.name} is in {out}:"
                f" {report.via}, {size_text(report.size_bytes)} read, proved by fingerprint"
            ),
        )


def _remote_headers(run: Run, start: VersionManifest) -> dict[str, CheckpointHeader]:
    """The headers of a full version's shards, by file name, read by range."""
    headers: dict[str, CheckpointHeader] = {}
    for file in start.core.files:
        if file.name.endswith(WEIGHTS_SUFFIX) and file.key is not None:
            length = run.store.get(file.key, ByteRange(0, LENGTH_BYTES))
            head = run.store.get(file.key, ByteRange(0, header_bytes(length)))
            headers[file.name] = parse_header(head, file_bytes=file.size_bytes)
    return headers
