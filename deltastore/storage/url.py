"""A mistyped URL that opens an empty store looks like a run without versions: it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit

import fsspec

from deltastore.errors import InvalidInputError, Kind
from deltastore.ids import check_name
from deltastore.storage.fs import FileStore
from deltastore.storage.fsspec_store import FsspecStore
from deltastore.storage.parts import MIB
from deltastore.storage.s3 import S3Store
from deltastore.storage.s3_settings import MAX_CONNECTIONS, S3Settings

if TYPE_CHECKING:
    from deltastore.clock import Clock
    from deltastore.storage.retry import OnRetry
    from deltastore.storage.s3_writer import OnPart
    from deltastore.storage.store import ObjectStore

_USE = "use s3://bucket/prefix or file:///folder"


def open_store(
    url: str,
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    access_key: str | None = None,
    secret_key: str | None = None,
    session_token: str | None = None,
    streams: int = 8,
    part_bytes: int = 8 * MIB,
    checksums: bool = False,
    clock: Clock | None = None,
    on_retry: OnRetry | None = None,
    on_part: OnPart | None = None,
) -> ObjectStore:
    """The store at `url`: `s3://bucket/prefix`, `file:///folder`, or any other fsspec URL.

    The keyword arguments other than `clock` concern `s3://` only. Opening makes no request.
    """
    parts = _split(url)
    if parts.scheme == "s3":
        return S3Store(
            S3Settings(
                bucket=parts.netloc,
                prefix=parts.path.strip("/"),
                endpoint_url=endpoint_url,
                region=region,
                profile=profile,
                access_key=access_key,
                secret_key=secret_key,
                session_token=session_token,
                streams=streams,
                max_connections=max(MAX_CONNECTIONS, streams),
                part_bytes=part_bytes,
                checksums=checksums,
            ),
            clock=clock,
            on_retry=on_retry,
            on_part=on_part,
        )
    if parts.scheme == "file":
        return FileStore(_folder(url, parts))
    return FsspecStore(url)


def split_run_url(url: str) -> tuple[str, str]:
    """The store's URL and the run's name: `s3://bucket/team/run7` is `run7` in `s3://bucket/team`."""
    parts = _split(url)
    path = parts.path.rstrip("/")
    above, _, run = path.rpartition("/")
    if not run or (parts.scheme == "file" and not above.strip("/")):
        raise InvalidInputError(
            f"{url!r} names no run: its last part is the run's name",
            kind=Kind.URL,
            hint="e.g. s3://bucket/run7 or file:///data/runs/run7",
        )
    return f"{parts.scheme}://{parts.netloc}{above}", check_name(unquote(run), "run name")


def _split(url: str) -> SplitResult:
    scheme, separator, _ = url.partition("://")
    if not separator or not scheme:
        raise InvalidInputError(
            f"{url!r} is not a URL",
            kind=Kind.URL,
            hint="a folder is file:///folder, a bucket s3://bucket/prefix",
        )
    if "::" in url:
        raise InvalidInputError(
            f"{url!r} chains file systems", kind=Kind.URL, hint="name one store only"
        )
    try:
        parts = urlsplit(url)
    except ValueError as err:
        raise InvalidInputError(f"{url!r} is not a URL: {err}", kind=Kind.URL, hint=_USE) from err
    # First: the messages after this one repeat the URL.
    if "@" in parts.netloc and parts.password is not None:
        raise InvalidInputError(
            f"the {scheme}:// URL carries a password, which would be logged",
            kind=Kind.URL,
            hint="give credentials as options, a profile or a role",
        )
    if parts.query or parts.fragment:
        raise InvalidInputError(
            f"{url!r} has a query or a fragment",
            kind=Kind.URL,
            hint="give options as options, not in the URL",
        )
    if scheme == "memory":
        raise InvalidInputError(
            f"{url!r} would be lost when this process ends",
            kind=Kind.URL,
            hint="use file:///folder; tests use MemoryStore directly",
        )
    if scheme == "s3":
        if not parts.netloc:
            raise InvalidInputError(f"{url!r} names no bucket", kind=Kind.URL, hint=_USE)
    elif scheme == "file":
        _folder(url, parts)
    elif scheme not in fsspec.available_protocols():
        raise InvalidInputError(f"{url!r} is of an unknown kind", kind=Kind.URL, hint=_USE)
    return parts


def _folder(url: str, parts: SplitResult) -> Path:
    if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
        raise InvalidInputError(
            f"{url!r} is not an absolute folder",
            kind=Kind.URL,
            hint="three slashes and an absolute path, e.g. file://$PWD/runs",
        )
    path = unquote(parts.path)
    if "\0" in path:
        raise InvalidInputError(
            f"{url!r} has a null byte in it", kind=Kind.URL, hint="no folder has such a name"
        )
    return Path(path)
