"""A backup that cannot be restored is no backup: `replay` makes a checkpoint of the bucket alone.

The checkpoint has the files of version 0 (configuration, tokenizer) and the weights of the version
asked for, in the same shards, names and order; its state is proved by fingerprint before it is
written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.adapters.safetensors_write import write_checkpoint
from deltastore.cli.checkpoint_parts import read_parts
from deltastore.cli.files import refuse_existing
from deltastore.cli.history import run_document, version_document
from deltastore.cli.output import Output, size_text
from deltastore.cli.progress import progress
from deltastore.clock import SystemClock
from deltastore.pipeline.replay import replay

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.cli.connection import Connection
    from deltastore.format.signing import TrustedKeys


def replay_version(
    run_url: str,
    connection: Connection,
    out: Path,
    *,
    version: int | None,
    streams: int,
    output: Output,
    trusted: TrustedKeys | None = None,
) -> None:
    """Rebuild a version (None: HEAD) and write it as the checkpoint folder `out`."""
    refuse_existing(out)
    with connection.run(run_url, streams=streams) as run:
        with progress(f"replay {run.name}") as meter:
            replayed = replay(
                run,
                version,
                clock=SystemClock(),
                streams=streams,
                progress=meter.advance,
                trusted=trusted,
            )
        parts = read_parts(run, streams=streams)
        with progress(f"write {out}"):
            write_checkpoint(replayed.state, out, headers=parts.headers, extras=parts.extras)
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
