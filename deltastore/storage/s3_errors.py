"""A ClientError tells a user neither whose fault it is nor what to do: here it gets kind and hint.

One table from what S3 and boto say to the error tree. What a retry may cure is `unavailable`,
`throttled` or `timeout`; nothing else is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError as Urllib3Error

from deltastore.errors import DeltastoreError, InvalidInputError, Kind, NotFoundError, StorageError
from deltastore.storage.rules import object_missing
from deltastore.storage.s3_body import BodyTooSlowError

if TYPE_CHECKING:
    from deltastore.storage.s3_settings import S3Settings

BOTO_ERRORS = (ClientError, BotoCoreError, Urllib3Error)
"""What a call of the client, or reading a body, may raise."""

_CREDENTIALS = frozenset(
    {
        "AccessDenied",
        "AllAccessDisabled",
        "AccountProblem",
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidToken",
        "NotSignedUp",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
        "UnrecognizedClientException",
    }
)
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
_DAMAGED = frozenset(
    {
        "BadDigest",
        "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
    }
)
"""The bytes that arrived are not those that were signed or summed: send them again."""
_THROTTLED = frozenset(
    {
        "BandwidthLimitExceeded",
        "RequestLimitExceeded",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "TooManyRequestsException",
    }
)
_WRONG_REGION = frozenset(
    {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"}
)
_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.SSOError,
)
_TIMEOUTS = (boto.ConnectTimeoutError, boto.ReadTimeoutError)
_SETTINGS = (
    boto.InvalidRegionError,
    boto.NoRegionError,
    boto.ProfileNotFound,
    boto.ConfigParseError,
    boto.ParamValidationError,
)


def error_code(err: Exception) -> str:
    """The S3 error code, or the status as text where a HEAD sent no body, or ''."""
    return (
        str(err.response.get("Error", {}).get("Code", "")) if isinstance(err, ClientError) else ""
    )


def status_of(err: Exception) -> int:
    """The HTTP status, or 0 when there was no response."""
    if not isinstance(err, ClientError):
        return 0
    return int(err.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def precondition_failed(err: Exception) -> bool:
    """Whether the store said that If-Match or If-None-Match does not hold."""
    return status_of(err) == 412 or error_code(err) == "PreconditionFailed"


def credentials_expired(err: Exception) -> bool:
    """Whether new credentials from the same place may be accepted."""
    return error_code(err) in _EXPIRED


def is_ambiguous(err: Exception) -> bool:
    """Whether the request may have been carried out although it failed: no clear refusal came."""
    return not isinstance(err, ClientError) or status_of(err) >= 500 or status_of(err) == 200


def translate(err: Exception, settings: S3Settings, key: str | None) -> DeltastoreError:
    """The library's error for what boto raised about `key`."""
    if isinstance(err, ClientError):
        return _from_response(err, settings, key)
    where = settings.where
    if isinstance(err, _NO_CREDENTIALS):
        return StorageError(
            f"no usable credentials for {where}: {err}",
            kind=Kind.CREDENTIALS,
            key=key,
            hint="set an access key and secret key, a profile, or a role",
        )
    if isinstance(err, _SETTINGS):
        return InvalidInputError(
            f"the settings for {where} do not work: {err}",
            kind=Kind.SETTING,
            key=key,
            hint="check profile, region and endpoint",
        )
    if isinstance(err, boto.HTTPClientError) and isinstance(
        err.kwargs.get("error"), BodyTooSlowError
    ):
        return StorageError(
            f"a body for {where} took longer than {settings.part_deadline_s:g} s: "
            f"{err.kwargs['error']}",
            kind=Kind.TIMEOUT,
            key=key,
            hint="lower `streams`, so that each has more of the link, or `part_bytes`",
        )
    if isinstance(err, _TIMEOUTS):
        return StorageError(
            f"{where} did not answer in time",
            kind=Kind.TIMEOUT,
            key=key,
            hint="check the network and the endpoint; raise the timeouts on a slow link",
        )
    return StorageError(
        f"{where} cannot be reached: {err}",
        kind=Kind.UNAVAILABLE,
        key=key,
        hint="check that the endpoint is right and running",
    )


def _from_response(err: ClientError, settings: S3Settings, key: str | None) -> DeltastoreError:
    code, status, where = error_code(err), status_of(err), settings.where
    said = f"{status} {code}: {err.response.get('Error', {}).get('Message', '')}".rstrip(": ")
    if code == "NoSuchBucket":
        return NotFoundError(
            f"bucket {settings.bucket!r} does not exist ({where})",
            kind=Kind.BUCKET_MISSING,
            key=key,
            hint="create it, or correct the URL, the endpoint or the region",
        )
    if code in {"NoSuchKey", "404", "NotFound"}:
        return object_missing(where, key or "")
    if code == "RequestTimeTooSkewed":
        return StorageError(
            f"this machine's clock differs from that of {where} by more than 15 minutes",
            kind=Kind.CLOCK_SKEW,
            key=key,
            hint="set the clock (NTP); a part slower than 15 minutes also looks like this",
        )
    if status == 409:
        return StorageError(
            f"another request for the same object is in progress: {said}",
            kind=Kind.UNAVAILABLE,
            key=key,
        )
    if code == "RequestTimeout":
        return StorageError(f"{where} gave up waiting: {said}", kind=Kind.TIMEOUT, key=key)
    if code in _THROTTLED or status in {429, 503}:
        return StorageError(
            f"{where} asks for fewer requests: {said}",
            kind=Kind.THROTTLED,
            key=key,
            hint="lower `streams`, raise `part_bytes`, or wait",
        )
    if code in _WRONG_REGION or status in {301, 307, 308}:
        own = _own_region(err)
        return InvalidInputError(
            f"bucket {settings.bucket!r} is not in region {settings.region!r}: {said}",
            kind=Kind.SETTING,
            key=key,
            hint=f"its region is {own!r}: give that one"
            if own
            else "give the bucket's own region; or the endpoint redirects: http instead of https?",
        )
    if code in _DAMAGED:
        return StorageError(
            f"bytes for {where} were damaged on their way: {said}", kind=Kind.UNAVAILABLE, key=key
        )
    if code in _CREDENTIALS or status in {401, 403}:
        return _credentials(code, said, where, key)
    if (status >= 500 and status != 501) or status == 200:
        return StorageError(f"{where} failed: {said}", kind=Kind.UNAVAILABLE, key=key)
    return StorageError(
        f"{where} refused the request: {said}",
        kind=Kind.REFUSED,
        key=key,
        hint="a retry will not help; see storage/PROVIDERS.md for what stores do differently",
    )


def _own_region(err: ClientError) -> str:
    """The region that the store says the bucket is in, or ''."""
    headers = err.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    named = headers.get("x-amz-bucket-region") or err.response.get("Error", {}).get("Region", "")
    return str(named)


def _credentials(code: str, said: str, where: str, key: str | None) -> StorageError:
    hint = "check the access key and the secret key"
    if code in {"AccessDenied", "403", "Forbidden", ""}:
        hint = (
            "check the policy of this identity; without s3:ListBucket even a missing key "
            "answers 403"
        )
    elif code.startswith(("Expired", "Token", "InvalidToken")):
        hint = "the session has expired: renew it"
    return StorageError(
        f"{where} refuses these credentials: {said}", kind=Kind.CREDENTIALS, key=key, hint=hint
    )
