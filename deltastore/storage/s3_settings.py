"""A part size of 4 MiB is accepted by the client and refused by the store, after the upload (S6).

Settings are checked when they are made. Secrets do not show in a repr, so not in a log.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from deltastore.errors import InvalidInputError, Kind
from deltastore.storage.parts import MAX_PART_BYTES, MIB, MIN_PART_BYTES
from deltastore.storage.retry import RetrySchedule
from deltastore.storage.rules import check_key

AddressingStyle = Literal["auto", "path", "virtual"]

MAX_CONNECTIONS = 64
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,253}")


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where a bucket is, who we are, and how hard to use it."""

    bucket: str
    prefix: str = ""
    """Without slashes at its ends; every key of the store lies under it."""
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    addressing_style: AddressingStyle | None = None
    """Default: the bucket in the path for an `endpoint_url`, else what AWS wants."""
    streams: int = 8
    """Parts of one object in flight: one TCP stream does not fill a long link."""
    part_bytes: int = 8 * MIB
    """Larger bodies go in parts. Raise it where requests cost more than latency."""
    max_connections: int = MAX_CONNECTIONS
    """Requests in flight over all threads; more wait for their turn (S10)."""
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 60.0
    """Without a byte for so long a request has failed."""
    part_deadline_s: float = 600.0
    """What sending one body may take; S3 does not take a signature older than 15 min (S12)."""
    checksums: bool = False
    """Send CRC-32 for the store to check (S3); `enable_checksums` finds out whether it does."""
    retry: RetrySchedule = field(default_factory=RetrySchedule)

    def __post_init__(self) -> None:
        if not _BUCKET.fullmatch(self.bucket):
            raise _bad("bucket", self.bucket, "3 to 254 letters, digits, '.', '-' and '_'")
        if self.prefix:
            check_key(self.prefix)
        if self.endpoint_url is not None and not re.match(r"https?://[^/]", self.endpoint_url):
            raise _bad("endpoint_url", self.endpoint_url, "http://host:port or https://host")
        if (self.access_key is None) != (self.secret_key is None):
            raise _bad("access_key", "(half of a pair)", "access_key and secret_key together")
        if not MIN_PART_BYTES <= self.part_bytes <= MAX_PART_BYTES:
            raise _bad("part_bytes", self.part_bytes, "5 MiB to 5 GiB, as S3 demands")
        if not 1 <= self.streams <= 256:
            raise _bad("streams", self.streams, "1 to 256")
        if not self.streams <= self.max_connections <= 4096:
            raise _bad("max_connections", self.max_connections, "from `streams` to 4096")
        for name, value in (
            ("connect_timeout_s", self.connect_timeout_s),
            ("read_timeout_s", self.read_timeout_s),
            ("part_deadline_s", self.part_deadline_s),
        ):
            if not 0 < value <= 840:
                raise _bad(name, value, "above 0 and at most 840 s: S3 ends a request at 900")

    @property
    def url(self) -> str:
        """`s3://bucket/prefix`: for people, without secrets."""
        return f"s3://{self.bucket}/{self.prefix}" if self.prefix else f"s3://{self.bucket}"

    @property
    def where(self) -> str:
        """The URL and, unless it is AWS, the endpoint."""
        return f"{self.url} at {self.endpoint_url}" if self.endpoint_url else self.url


def _bad(name: str, value: object, rule: str) -> InvalidInputError:
    return InvalidInputError(
        f"S3 setting {name} = {value!r} is not possible", kind=Kind.SETTING, hint=f"use {rule}"
    )
