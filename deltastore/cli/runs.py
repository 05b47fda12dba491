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
    scan_checkpoint,
)
from deltastore.cli.connection import Watched, split_relays
from deltastore.cli.history import run_document, version_document
from deltastore.cli.output import Output, share_text, size_text
from deltastore.cli.progress import Tally, progress_bars
from deltastore.clock import SystemClock
from deltastore.config import PublisherSettings
from deltastore.errors import InvalidInputError, Kind
from deltastore.format.coverage import match_entries
from deltastore.format.fingerprint import ZERO
from deltastore.format.mixing import fingerprint_run
from deltastore.format.signing import unsigned
from deltastore.ids import check_name
from deltastore.pipeline.publisher import Publisher
from deltastore.repository.fetch import load_manifest
from deltastore.repository.run import CheckpointFile, create_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from deltastore.adapters.safetensors_dir import Checkpoint
    from deltastore.cli.connection import Connection
    from deltastore.cli.progress import Meter
    from deltastore.format.fingerprint import Fingerprint
    from deltastore.format.layout import Layout
    from deltastore.format.signing import Signer
    from deltastore.pipeline.protocols import SourceBox


def init_run(
    run_url: str,
    connection: Connection,
    folder: Path,
    *,
    step: int,
    home_name: str,
    streams: int,
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
        bar = stack.enter_context(progress_bars())
        read = bar(f"fingerprint {folder}", layout.size_bytes)
        total = (1 + len(relay_urls)) * sum(file.path.stat().st_size for file in checkpoint.files)
        sent = Tally(bar("upload", total), total=total)
        watched = Watched(on_part=sent.part)
        store, name = stack.enter_context(
            connection.store(run_url, streams=streams, watched=watched)
        )
        check_name(name, "run name")
        regions = {}
        for region, url in relay_urls.items():
            regions[region], its_name = stack.enter_context(
                connection.store(url, streams=streams, watched=watched)
            )
            if its_name != name or region == home_name:
                raise InvalidInputError(
                    f"relay {region} at {url} is no other region of the run {name!r}",
                    kind=Kind.URL,
                    hint="every region holds the run under the same name",
                )
        run = create_run(
            store,
            name,
            layout=layout,
            files=[CheckpointFile(file.name, file.path) for file in checkpoint.files],
            fingerprint=_fingerprint(checkpoint, layout, read),
            clock=SystemClock(),
            regions=regions,
            home_name=home_name,
            step=step,
            signer=signer,
            on_put=sent.put,
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
        with progress_bars() as bar:
            replayed = bar(f"replay {run.name}", None)
            publisher = Publisher.open(
                run,
                _WatchedFolder(checkpoint, bar(f"compare {folder}", run.dense_bytes)),
                clock=clock,
                step=step,
                settings=PublisherSettings(streams=streams),
                signer=signer,
                on_bytes=Tally(bar("upload", None)).moved,
                on_read=replayed.advance,
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


def _fingerprint(checkpoint: Checkpoint, layout: Layout, read: Meter) -> Fingerprint:
    """Of the checkpoint's state, which is never in memory as a whole."""
    total = ZERO
    for part in _WatchedFolder(checkpoint, read).boxes(layout):
        first = layout.tensors[part.tensor].first_element + part.box.start[0]
        total = total + fingerprint_run(part.bits, first)
    return total


class _WatchedFolder(DirectorySource):
    """A checkpoint folder whose reading is seen."""

    def __init__(self, checkpoint: Checkpoint, read: Meter) -> None:
        super().__init__(checkpoint)
        self._read = read

    def boxes(self, layout: Layout) -> Iterator[SourceBox]:
        """The folder's boxes; each is done with when the next is asked for."""
        for part in super().boxes(layout):
            yield part
            self._read.advance(part.bits.nbytes)
