"""A host without a stager downloads once per rank: `stage` is the host's stager as a command."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - the framework evaluates annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer

from deltastore.cli.options import (
    AsJson,
    RegionName,
    RunUrl,
    Streams,
    TrustedKeysFile,
    reaches_store,
)
from deltastore.cli.output import Output

if TYPE_CHECKING:
    from deltastore.cli.connection import Connection


@reaches_store
def stage(
    run_url: RunUrl,
    folder: Annotated[
        Path,
        typer.Option("--folder", metavar="DIR", help="Where the ranks of this host look for it."),
    ],
    stage_max_bytes: Annotated[
        int, typer.Option("--stage-max-bytes", min=1, help="Most bytes of updates in DIR.")
    ] = 2 << 30,
    poll_s: Annotated[
        float, typer.Option("--poll-s", min=0.05, help="Seconds between looks.")
    ] = 1.0,
    until_stdin_ends: Annotated[
        bool,
        typer.Option(
            "--until-stdin-ends", help="End when stdin is closed: with the process that started it."
        ),
    ] = False,
    events: Annotated[
        Path | None,
        typer.Option("--events", metavar="FILE", help="Append events to this file."),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port", min=0, max=65535, help="Answer GET /metrics on 127.0.0.1; 0: any."
        ),
    ] = None,
    region_name: RegionName = None,
    trusted_keys: TrustedKeysFile = None,
    *,
    connection: Connection,
    streams: Streams = 8,
    as_json: AsJson = False,
) -> None:
    """Fetch, verify and decode each new version once for all engines of this host."""
    from deltastore.cli.keys import read_trusted
    from deltastore.cli.observing import Observing
    from deltastore.cli.staging import Staging, stage_run
    from deltastore.config import FollowerSettings

    hinted_s = max(FollowerSettings().poll_hinted_s, poll_s)
    staging = Staging(
        folder=folder.absolute(),
        settings=FollowerSettings(
            streams=streams,
            poll_min_s=poll_s,
            poll_hinted_s=hinted_s,
            stage_max_bytes=stage_max_bytes,
        ),
        until_stdin_ends=until_stdin_ends,
        observing=Observing(events, metrics_port),
        region_name=region_name,
        trusted=read_trusted(trusted_keys),
    )
    stage_run(run_url, connection, staging, Output(as_json))
