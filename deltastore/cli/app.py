"""A command that imports everything to print its help is not used: this file only parses words.

Each command names its arguments here and hands them to a module that is imported when it runs.
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - the framework evaluates annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer

from deltastore import __version__
from deltastore.cli.doctor import doctor
from deltastore.cli.fleet import status
from deltastore.cli.group import CommandGroup
from deltastore.cli.options import (
    AsJson,
    RunUrl,
    SignKeys,
    Streams,
    TrustedKeysFile,
    Version,
    reaches_store,
)
from deltastore.cli.output import Output
from deltastore.cli.stage import stage
from deltastore.cli.upkeep import follow, keygen, maintain, verify

if TYPE_CHECKING:
    from deltastore.cli.connection import Connection

app = typer.Typer(
    cls=CommandGroup,
    help="Lossless sparse weight deltas from trainers to rollout actors, through S3 buckets.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,  # its traceback prints local variables: secrets are some
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deltastore {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the traceback of an error too.")
    ] = False,
) -> None:
    """Lossless sparse weight deltas from trainers to rollout actors, through S3 buckets."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Checkpoint folder to start from.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Checkpoint folder to arrive at.")],
    out: Annotated[Path, typer.Option("--out", help="Bundle to write; must not exist.")],
    as_json: AsJson = False,
) -> None:
    """Write what turns checkpoint OLD into checkpoint NEW into one file."""
    from deltastore.cli.bundles import diff_checkpoints

    diff_checkpoints(old, new, out, Output(as_json))


@app.command()
def apply(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="Checkpoint folder it starts from.")],
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A file that `diff` wrote.")],
    out: Annotated[Path, typer.Option("--out", help="Checkpoint folder to write; must not exist.")],
    as_json: AsJson = False,
) -> None:
    """Write the checkpoint that OLD and BUNDLE make; OLD is not changed."""
    from deltastore.cli.bundles import apply_bundle

    apply_bundle(old, bundle, out, Output(as_json))


@app.command()
@reaches_store
def init(
    run_url: RunUrl,
    checkpoint: Annotated[
        Path, typer.Option("--checkpoint", help="Checkpoint folder that becomes version 0.")
    ],
    step: Annotated[
        int, typer.Option("--step", min=0, help="Optimizer steps already in the checkpoint.")
    ] = 0,
    home: Annotated[
        str, typer.Option("--home", help="Name of the region this bucket is.")
    ] = "home",
    relay: Annotated[
        list[str] | None,
        typer.Option(
            "--relay", metavar="NAME=RUN_URL", help="Another region that shall hold the run too."
        ),
    ] = None,
    sign_key: SignKeys = None,
    *,
    connection: Connection,
    streams: Streams = 8,
    as_json: AsJson = False,
) -> None:
    """Make a run whose version 0 is a checkpoint."""
    from deltastore.cli.keys import read_signer
    from deltastore.cli.runs import init_run

    init_run(
        run_url,
        connection,
        checkpoint,
        step=step,
        home_name=home,
        streams=streams,
        relays=relay or (),
        signer=read_signer(sign_key or ()),
        output=Output(as_json),
    )


@app.command()
@reaches_store
def publish(
    run_url: RunUrl,
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint folder to publish.")
    ],
    step: Annotated[int, typer.Option("--step", min=0, help="Optimizer step of the checkpoint.")],
    sign_key: SignKeys = None,
    *,
    connection: Connection,
    streams: Streams = 8,
    as_json: AsJson = False,
) -> None:
    """Publish a checkpoint as the next version of a run."""
    from deltastore.cli.keys import read_signer
    from deltastore.cli.runs import publish_checkpoint

    publish_checkpoint(
        run_url,
        connection,
        checkpoint,
        step=step,
        streams=streams,
        signer=read_signer(sign_key or ()),
        output=Output(as_json),
    )


@app.command()
@reaches_store
def log(
    run_url: RunUrl,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=1_000_000, help="Newest versions to list.")
    ] = 50,
    events: Annotated[
        list[Path] | None,
        typer.Option(
            "--events", metavar="FILE", help="Event log of the trainer: adds the stages' times."
        ),
    ] = None,
    *,
    connection: Connection,
    streams: Streams = 8,
    as_json: AsJson = False,
) -> None:
    """List the versions of a run, newest last."""
    from deltastore.cli.history import list_history

    list_history(
        run_url,
        connection,
        limit=limit,
        streams=streams,
        events=events or (),
        output=Output(as_json),
    )


@app.command()
@reaches_store
def show(
    run_url: RunUrl,
    version: Version = None,
    *,
    connection: Connection,
    as_json: AsJson = False,
) -> None:
    """Show one version of a run: what it is, what it is made of, and what names it."""
    from deltastore.cli.history import show_version

    show_version(run_url, connection, version=version, output=Output(as_json))


@app.command()
@reaches_store
def replay(
    run_url: RunUrl,
    out: Annotated[Path, typer.Option("--out", help="Checkpoint folder to write; must not exist.")],
    version: Version = None,
    trusted_keys: TrustedKeysFile = None,
    *,
    connection: Connection,
    streams: Streams = 8,
    as_json: AsJson = False,
) -> None:
    """Rebuild a version from the bucket alone and write it as a checkpoint."""
    from deltastore.cli.keys import read_trusted
    from deltastore.cli.restore import replay_version

    replay_version(
        run_url,
        connection,
        out,
        version=version,
        streams=streams,
        trusted=read_trusted(trusted_keys),
        output=Output(as_json),
    )


@app.command()
@reaches_store
def probe(
    store_url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="Where runs shall be: s3://bucket/prefix or file:///absolute/folder.",
            show_default=False,
        ),
    ],
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, max=1000, help="Races of each kind.")
    ] = 4,
    *,
    connection: Connection,
    as_json: AsJson = False,
) -> None:
    """Try out what a store does, and whether it can be the home of a run."""
    from deltastore.cli.probe import probe_url

    probe_url(store_url, connection, rounds=rounds, output=Output(as_json))


for _command in (verify, maintain, follow, stage, doctor, keygen, status):
    app.command()(_command)
