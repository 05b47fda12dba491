"""Of requests made in five places one forgets the retry, one the permit: all go through here."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from deltastore.errors import InvalidInputError, Kind
from deltastore.storage.retry import Retrier, RetrySchedule
from deltastore.storage.s3_errors import BOTO_ERRORS, translate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mypy_boto3_s3 import S3Client

    from deltastore.storage.s3_client import Connection, ConnectionSource
    from deltastore.storage.s3_settings import S3Settings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class S3Calls:
    """How this store makes requests."""

    settings: S3Settings
    source: ConnectionSource
    retrier: Retrier

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

    @contextmanager
    def permit(self, key: str | None = None) -> Iterator[S3Client]:
        """The client, once fewer than `max_connections` requests are in flight."""
        connection = self.connection(key)
        with connection.permits:
            yield connection.client

    def once(self, request: Callable[[S3Client], T]) -> T:
        """One request, with boto's own errors: for callers that must look at them."""
        with self.permit() as client:
            return request(client)

    def attempt(self, key: str | None, request: Callable[[S3Client], T]) -> T:
        """One request, with this library's errors."""
        try:
            return self.once(request)
        except BOTO_ERRORS as err:
            raise translate(err, self.settings, key) from err

    def retried(self, key: str | None, request: Callable[[S3Client], T]) -> T:
        """The request, repeated as the schedule says."""
        return self.retrier.run(lambda: self.attempt(key, request))

    def without_retries(self) -> S3Calls:
        """The same with one try each, for use inside a loop that retries."""
        return replace(self, retrier=replace(self.retrier, schedule=RetrySchedule(attempts=1)))
