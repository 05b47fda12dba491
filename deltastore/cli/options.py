"""An option that means two things in two commands is misread: shared ones are defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
