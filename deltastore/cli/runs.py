"""A run made from the wrong folder is found at the first publish: `init` and `publish` check first.

`publish` is the whole of a trainer's publishing, for one checkpoint: it takes the run over, so that
a trainer that still publishes to it stops with a lease error instead of forking the run.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from deltastore.adapters.safetensors_dir import (
    DirectorySource,
    checkpoint_layout,
    load_state,
    scan_checkpoint,
)
from deltastore.cli.connection import split_relays
from deltastore.cli.history import run_document, version_document
from deltastore.cli.output import Output, share_text, size_text
from deltastore.cli.progress import progress
from deltastore.clock import SystemClock
from deltastore.config import PublisherSettings
from deltastore.errors import InvalidInputError, Kind
from deltastore.format.coverage import match_entries
from deltastore.format.mixing import fingerprint_state
from deltastore.format.signing import unsigned
from deltastore.ids import check_name
from deltastore.pipeline.publisher import Publisher
from deltastore.repository.fetch import load_manifest
from deltastore.repository.run import CheckpointFile, create_run

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from deltastore.cli.connection import Connection
    from deltastore.format.signing import Signer


def init_run(
    run_url: str,
    connection: Connection,
    folder: Path,
    *,
    step: int,
    home_name: str,
    output: Output,
    relays: Sequence[str] = (),
    signer: Signer = unsigned,
) -> None:
    """Make a run whose version 0 is the checkpoint in `folder`, in every region."""
    check_name(home_name, "region")
    relay_urls = split_relays(relays)
    checkpoint = scan_checkpoint(folder)
    layout = checkpoint_layout(checkpoint)
    with ExitStack() as stack:
        store, name = stack.enter_context(connection.store(run_url))
        check_name(name, "run name")
        regions = {}
        for region, url in relay_urls.items():
            regions[region], its_name = stack.enter_context(connection.store(url))
            if its_name != name or region == home_name:
                raise InvalidInputError(
                    f"relay {region} at {url} is no other region of the run {name!r}",
                    kind=Kind.URL,
                    hint="every region holds the run under the same name",
                )
        with progress("fingerprint"):
            fingerprint = fingerprint_state(load_state(checkpoint, layout))
        with progress(f"upload {name}"):
            run = create_run(
                store,
                name,
                layout=layout,
                files=[CheckpointFile(file.name, file.path) for file in checkpoint.files],
                fingerprint=fingerprint,
                clock=SystemClock(),
                regions=regions,
                home_name=home_name,
                step=step,
                signer=signer,
            )
        manifest = load_manifest(run, 0)
        document = {**run_document(run, run_url), "version": version_document(run, manifest)}
        output.emit(
            document,
            lambda: (
                f"made run {run.name} at {store.url}: version 0, {len(layout)} tensors,"
                f" {size_text(manifest.core.delta_bytes)}, policy hash {manifest.policy_hash[:12]}"
            ),
        )


def publish_checkpoint(
    run_url: str,
    connection: Connection,
    folder: Path,
    *,
    step: int,
    streams: int,
    output: Output,
    signer: Signer = unsigned,
) -> None:
    """Publish the checkpoint in `folder` as the next version, taking the run over."""
    checkpoint = scan_checkpoint(folder)
    with connection.run(run_url, streams=streams) as run:
        match_entries(run.layout, checkpoint.entries)
        clock = SystemClock()
        began_s = clock.monotonic_s()
        with progress(f"publish {run.name}"):
            publisher = Publisher.open(
                run,
                DirectorySource(checkpoint),
                clock=clock,
                step=step,
                settings=PublisherSettings(streams=streams),
                signer=signer,
            )
            manifest = publisher.head
            publisher.close()
        document = {
            **run_document(run, run_url),
            "version": version_document(run, manifest),
            "seconds": round(clock.monotonic_s() - began_s, 3),
        }
        core = manifest.core
        output.emit(
            document,
            lambda: (
                f"published version {core.version} of {run.name}: {core.nnz} changes"
                f" ({share_text(core.nnz, run.layout.elements)}), {size_text(core.delta_bytes)},"
                f" policy hash {manifest.policy_hash[:12]}"
            ),
        )
