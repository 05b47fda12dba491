"""An option that means two things in two commands is misread: shared ones are defined once."""

from __future__ import annotations

import inspect
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

RunUrl = Annotated[
    str,
    typer.Argument(
        metavar="RUN_URL",
        help="Where the run is: s3://bucket/prefix/run or file:///absolute/folder/run.",
        show_default=False,
    ),
]
EndpointUrl = Annotated[
    str | None,
    typer.Option("--endpoint-url", metavar="URL", help="S3 endpoint, when it is not AWS."),
]
Region = Annotated[
    str | None,
    typer.Option("--region", metavar="NAME", help="S3 region."),
]
Profile = Annotated[
    str | None,
    typer.Option("--profile", metavar="NAME", help="Profile of the AWS configuration files."),
]
AccessKeyEnv = Annotated[
    str | None,
    typer.Option(
        "--access-key-env",
        metavar="VARIABLE",
        help="Environment variable that holds the access key; default: the usual AWS places.",
    ),
]
SecretKeyEnv = Annotated[
    str | None,
    typer.Option(
        "--secret-key-env",
        metavar="VARIABLE",
        help="Environment variable that holds the secret key; default: the usual AWS places.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
RegionName = Annotated[
    str | None,
    typer.Option(
        "--region-name",
        metavar="NAME",
        help="What events and metrics call this bucket; default: as the run calls its home.",
    ),
]
Streams = Annotated[
    int, typer.Option("--streams", min=1, max=256, help="Parallel connections to the store.")
]
Version = Annotated[
    int | None,
    typer.Option("--version", min=0, metavar="V", help="Version; default: the newest."),
]
TrustedKeysFile = Annotated[
    Path | None,
    typer.Option(
        "--trusted-keys",
        metavar="FILE",
        help="Believe only what these keys signed; a line per key: ROLES KEY.",
    ),
]
SignKeys = Annotated[
    list[Path] | None,
    typer.Option(
        "--sign-key",
        metavar="FILE",
        help="Sign with this private key (see keygen); may be given twice while keys change.",
    ),
]

_REACH = {
    "endpoint_url": EndpointUrl,
    "region": Region,
    "profile": Profile,
    "access_key_env": AccessKeyEnv,
    "secret_key_env": SecretKeyEnv,
}
"""The options that say how to reach a store, in the order in which `Connection` takes them."""


def reaches_store(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command have its `connection` parameter from the options that say how to reach a store.

    On the command line they stand where the parameter stands.
    """
    hints = get_type_hints(command, localns={"Connection": Any}, include_extras=True)
    signature = inspect.signature(command)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name != "connection":
            hint = hints[parameter.name]
            parameters.append(parameter.replace(annotation=hint, kind=_NAMED))
            continue
        parameters += [
            inspect.Parameter(name, _NAMED, default=None, annotation=option)
            for name, option in _REACH.items()
        ]

    @wraps(command)
    def parsed(**values: Any) -> None:
        from deltastore.cli.connection import Connection

        connection = Connection(*(values.pop(name) for name in _REACH))
        command(connection=connection, **values)

    parsed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    parsed.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return parsed


_NAMED = inspect.Parameter.KEYWORD_ONLY
