"""Of requests made in five places one forgets the retry, one the permit: all go through here."""

from __future__ import annotations

import zlib
from base64 import b64encode
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, TypeVar, cast

from deltastore.errors import InvalidInputError, Kind
from deltastore.storage.retry import Retrier, RetrySchedule
from deltastore.storage.s3_body import TimedBody
from deltastore.storage.s3_errors import BOTO_ERRORS, credentials_expired, translate

if TYPE_CHECKING:
    from collections.abc import Callable

    from mypy_boto3_s3 import S3Client

    from deltastore.storage.s3_client import Connection, ConnectionSource
    from deltastore.storage.s3_settings import S3Settings

T = TypeVar("T")

_PIECE_BYTES = 1 << 17  # what the client reads and sends at a time: smaller bodies are one piece


@dataclass(slots=True)
class Switch:
    """What may be turned on after a store was opened."""

    on: bool


@dataclass(frozen=True, slots=True)
class S3Calls:
    """How this store makes requests."""

    settings: S3Settings
    source: ConnectionSource
    retrier: Retrier
    checksums: Switch
    """Whether the store gets a checksum to check with every body."""

    def name(self, key: str) -> str:
        """The key in the bucket."""
        return f"{self.settings.prefix}/{key}" if self.settings.prefix else key

    def connection(self, key: str | None = None) -> Connection:
        """This process's connection; what boto refuses in the settings is translated."""
        try:
            return self.source.get()
        except BOTO_ERRORS as err:
            raise translate(err, self.settings, key) from err
        except ValueError as err:  # botocore's answer to a malformed endpoint or bucket name
            raise InvalidInputError(
                f"the settings for {self.settings.where} do not work: {err}",
                kind=Kind.SETTING,
                hint="check endpoint and region",
            ) from err

    def once(self, request: Callable[[S3Client], T]) -> T:
        """One request, with boto's own errors: for callers that must look at them.

        It waits while `max_connections` are in flight, and is made again with new credentials when
        the old ones have expired and others are to be had (S13).
        """
        connection = self.connection()
        with connection.permits:
            try:
                return request(connection.client)
            except BOTO_ERRORS as err:
                expired = credentials_expired(err)
                if not (expired and self.source.renew_credentials(connection.client)):
                    raise
            return request(self.connection().client)

    def body(self, view: memoryview, sha256: str | None = None) -> bytes | IO[bytes]:
        """What to give the client for these bytes: large ones must pass before their deadline.

        `sha256` is theirs, if it is known: what is large is not hashed again to sign it.
        """
        if len(view) <= _PIECE_BYTES:
            return bytes(view)
        body = TimedBody(
            view,
            clock=self.retrier.clock,
            deadline_s=self.settings.part_deadline_s,
            sha256=sha256,
        )
        return cast("IO[bytes]", body)  # as much of a file as the client uses

    def attempt(self, key: str | None, request: Callable[[S3Client], T]) -> T:
        """One request, with this library's errors."""
        try:
            return self.once(request)
        except BOTO_ERRORS as err:
            raise translate(err, self.settings, key) from err

    def retried(self, key: str | None, request: Callable[[S3Client], T]) -> T:
        """The request, repeated as the schedule says."""
        return self.retrier.run(lambda: self.attempt(key, request))

    def checksum(self, body: memoryview) -> dict[str, str]:
        """The argument that makes the store check these bytes, where it can."""
        if not self.checksums.on:
            return {}
        return {"ChecksumCRC32": b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()}

    def checksum_kind(self) -> dict[str, str]:
        """The argument that says at the begin of an upload what its parts are checked by."""
        return {"ChecksumAlgorithm": "CRC32"} if self.checksums.on else {}

    def without_retries(self) -> S3Calls:
        """The same with one try each, for use inside a loop that retries."""
        return replace(
            self,
            retrier=replace(self.retrier, schedule=RetrySchedule(attempts=1, throttled_attempts=1)),
        )
