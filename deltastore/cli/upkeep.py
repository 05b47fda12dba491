"""Commands that look after a run: verify and repair it, maintain it, follow it, make keys for it.

As in `app.py`, a command only names its arguments here; its module is imported when it runs.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - the framework evaluates annotations at run time
from typing import TYPE_CHECKING, Annotated

import typer

from deltastore.cli.options import (
    AsJson,
    RegionName,
    RunUrl,
    SignKeys,
    Streams,
    TrustedKeysFile,
    reaches_store,
)
from deltastore.cli.output import Output
from deltastore.errors import InvalidInputError, Kind
from deltastore.pipeline.engine_control import PauseMode

if TYPE_CHECKING:
    from deltastore.cli.connection import Connection


class Only(StrEnum):
    """What `maintain --only` names."""

    REPLICATE = "replicate"
    ANCHORS = "anchors"
    COMPOSITES = "composites"
    RETENTION = "retention"
    JANITOR = "janitor"


@reaches_store
def verify(
    run_url: RunUrl,
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Also read every object and replay every version."),
    ] = False,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Mend what can be mended; without it that is only listed."),
    ] = False,
    source: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="RUN_URL", help="The same run in another region, to copy from."
        ),
    ] = None,
    from_endpoint_url: Annotated[
        str | None,
        typer.Option("--from-endpoint-url", metavar="URL", help="Endpoint of --from, if another."),
    ] = None,
    trusted_keys: TrustedKeysFile = None,
    sign_key: SignKeys = None,
    *,
    connection: Connection,
    streams: Streams = 8,
    as_json: AsJson = False,
) -> None:
    """Check a run: manifests, chain, objects, and with --deep every bit of every version."""
    from deltastore.cli.keys import read_signer, read_trusted
    from deltastore.cli.verify import Verifying, verify_run

    endpoint_url = from_endpoint_url or connection.endpoint_url
    other = replace(connection, endpoint_url=endpoint_url)
    verifying = Verifying(
        deep=deep,
        repair=repair,
        source=None if source is None else (source, other),
        streams=streams,
        trusted=read_trusted(trusted_keys),
        signer=read_signer(sign_key or ()),
    )
    verify_run(run_url, connection, verifying, Output(as_json))


@reaches_store
def maintain(
    run_url: RunUrl,
    only: Annotated[
        list[Only] | None, typer.Option("--only", help="Do only this; may be given several times.")
    ] = None,
    execute: Annotated[
        bool | None,
        typer.Option(
            "--execute/--dry-run",
            help="Delete what is to be deleted / write nothing at all. By default shortcuts are"
            " made and deletions are only shown.",
            show_default=False,
        ),
    ] = None,
    keep_versions: Annotated[
        int, typer.Option("--keep-versions", min=1, help="Newest versions to keep replayable.")
    ] = 256,
    grace_s: Annotated[
        float,
        typer.Option("--grace-s", min=0.001, help="Seconds that readers are told beforehand."),
    ] = 6 * 3600.0,
    join_seconds_max: Annotated[
        float,
        typer.Option("--join-seconds-max", min=0, help="What a chain may cost a joiner."),
    ] = 60.0,
    anchor_multiple: Annotated[
        int, typer.Option("--anchor-multiple", min=1, help="Anchors stand on multiples of this.")
    ] = 64,
    relay: Annotated[
        list[str] | None,
        typer.Option("--relay", metavar="NAME=RUN_URL", help="Another region, if this is home."),
    ] = None,
    behind: Annotated[
        list[str] | None,
        typer.Option(
            "--behind", metavar="NAME", help="A relay that will start again: do not wait for it."
        ),
    ] = None,
    wait_s: Annotated[
        float, typer.Option("--wait-s", min=0, help="How long relays may take to catch up.")
    ] = 600.0,
    trusted_keys: TrustedKeysFile = None,
    sign_key: SignKeys = None,
    *,
    connection: Connection,
    streams: Streams = 8,
    as_json: AsJson = False,
) -> None:
    """Make anchors and composites, and show (or do) what retention and the janitor delete."""
    from deltastore.cli.keys import read_signer, read_trusted
    from deltastore.cli.maintain import Mode, Task, Upkeep, maintain_run
    from deltastore.maintenance.anchors import AnchorPolicy
    from deltastore.maintenance.retention_plan import RetentionPolicy

    mode = Mode.MAKE if execute is None else Mode.EXECUTE if execute else Mode.PLAN
    upkeep = Upkeep(
        tasks=[Task(name.value) for name in only or ()],
        mode=mode,
        anchors=AnchorPolicy(join_seconds_max=join_seconds_max, multiple=anchor_multiple),
        retention=RetentionPolicy(keep_versions=keep_versions, grace_s=grace_s),
        relays=relay or (),
        behind=behind or (),
        wait_s=wait_s,
        streams=streams,
        signer=read_signer(sign_key or ()),
        trusted=read_trusted(trusted_keys),
    )
    maintain_run(run_url, connection, upkeep, Output(as_json))


@reaches_store
def follow(
    run_url: RunUrl,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Keep DIR/latest at the newest version."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once, then end.")] = False,
    keep: Annotated[
        int, typer.Option("--keep", min=1, max=10_000, help="Versions to keep in DIR.")
    ] = 2,
    poll_s: Annotated[
        float, typer.Option("--poll-s", min=0.05, help="Seconds between looks.")
    ] = 2.0,
    vllm: Annotated[
        str | None,
        typer.Option(
            "--vllm",
            metavar="URL",
            help="Keep this vLLM server at the newest version, through its development endpoints:"
            " http://127.0.0.1:8000 or unix:///path.",
        ),
    ] = None,
    policy: Annotated[
        PauseMode,
        typer.Option("--policy", help="With --vllm: what becomes of requests in flight."),
    ] = PauseMode.KEEP,
    within_s: Annotated[
        float,
        typer.Option("--within-s", min=1, help="With --vllm and --once: how long it may take."),
    ] = 600.0,
    events: Annotated[
        Path | None,
        typer.Option("--events", metavar="FILE", help="With --vllm: append events to this file."),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            min=0,
            max=65535,
            help="With --vllm: answer GET /metrics on 127.0.0.1; 0: any.",
        ),
    ] = None,
    region_name: RegionName = None,
    trusted_keys: TrustedKeysFile = None,
    *,
    connection: Connection,
    streams: Streams = 8,
    as_json: AsJson = False,
) -> None:
    """Follow a run: print each newest version, keep a folder at it, or a vLLM server."""
    from deltastore.cli.follow import Following, follow_run
    from deltastore.cli.keys import read_trusted

    if vllm is not None:
        from deltastore.cli.follow_engine import EngineFollowing, follow_engine
        from deltastore.cli.observing import Observing

        _refuse_together("--vllm", "--out", out is not None)
        engine = EngineFollowing(
            vllm,
            policy,
            once,
            poll_s,
            within_s=within_s,
            trusted=trusted_keys,
            observing=Observing(events, metrics_port),
            region_name=region_name,
        )
        follow_engine(run_url, connection, engine, Output(as_json))
        return
    if any(given is not None for given in (events, metrics_port, region_name)):
        raise InvalidInputError(
            "--events, --metrics-port and --region-name tell of a server's safe points",
            kind=Kind.SETTING,
            hint="give --vllm URL, too",
        )
    following = Following(out, once, keep, poll_s, streams, read_trusted(trusted_keys))
    follow_run(run_url, connection, following, Output(as_json))


def _refuse_together(option: str, other: str, given: bool) -> None:
    if given:
        raise InvalidInputError(
            f"{option} and {other} are two things to follow with",
            kind=Kind.SETTING,
            hint="run the command twice",
        )


def keygen(
    out: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Private key to write; FILE.pub is the public one."),
    ],
    role: Annotated[
        list[str] | None,
        typer.Option("--role", help="What readers shall let it sign: versions or shortcuts."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make an Ed25519 key that signs manifests."""
    from deltastore.cli.keys import make_keys

    make_keys(out, role or ["versions", "shortcuts"], Output(as_json))
