"""A command about the fleet needs Redis and no bucket: its words are apart from the others'."""

from __future__ import annotations

from typing import Annotated

import typer

from deltastore.cli.output import Output


def status(
    redis_url: Annotated[
        str,
        typer.Argument(
            metavar="REDIS_URL",
            help="redis://HOST:PORT/DB, rediss:// for TLS, redis+cluster:// for a cluster.",
            show_default=False,
        ),
    ],
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False)],
    watch: Annotated[bool, typer.Option("--watch", help="Draw it again until Ctrl-C.")] = False,
    every_s: Annotated[
        float, typer.Option("--every", min=0.2, max=3600.0, metavar="S", help="Seconds between.")
    ] = 2.0,
    user: Annotated[
        str | None, typer.Option("--user", metavar="NAME", help="Redis user; default: `default`.")
    ] = None,
    password_env: Annotated[
        str | None,
        typer.Option(
            "--password-env",
            metavar="VARIABLE",
            help="Environment variable that holds the password of Redis.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout.")
    ] = False,
) -> None:
    """Show a run's fleet: who is there, at which version, how fast, with which leases."""
    from deltastore.cli.status import RedisAccess, show_fleet, watch_fleet
    from deltastore.errors import InvalidInputError, Kind

    access = RedisAccess(redis_url, user, password_env)
    if not watch:
        show_fleet(access, run, output=Output(as_json))
        return
    if as_json:
        raise InvalidInputError(
            "--watch is for people, --json for scripts",
            kind=Kind.SETTING,
            hint="give one of them; a script asks as often as it likes",
        )
    watch_fleet(access, run, every_s=every_s)
