"""A put whose answer was lost is neither done nor failed: retried blindly it meets itself as a foe.

The store decides a CREATE (If-None-Match: *); whatever it says of an existing object, the bytes
that are there are read back and compared before anything is called a conflict (S1). A body above
`part_bytes` goes in parts: begin, parts, complete. A crash before complete leaves an upload that
only a lifecycle rule or the janitor removes; complete is the point where the object exists. An
answer to complete that does not say "no" clearly is resolved by reading, and such an upload is
never aborted: that could be the object (S4). Several stores do not make a CREATE of a body in parts
atomic (PROVIDERS.md), so what decides anything must be smaller than `part_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from deltastore.errors import DeltastoreError, Kind, StorageError
from deltastore.storage.parts import PartPlan, plan_upload, run_parts
from deltastore.storage.retry import is_retryable
from deltastore.storage.rules import object_exists
from deltastore.storage.s3_errors import (
    BOTO_ERRORS,
    error_code,
    is_ambiguous,
    precondition_failed,
    status_of,
    translate,
)
from deltastore.storage.s3_reader import S3Reader
from deltastore.storage.store import Body, PutMode, PutOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

    from deltastore.storage.s3_calls import S3Calls
    from deltastore.storage.s3_uploads import LiveUploads

OnPart: TypeAlias = "Callable[[int], None]"
"""Told, on many threads, the bytes of every part of a large body that the store has taken."""

_UPLOADS = 3  # each sends the whole body


class _StartAgainError(Exception):
    """The store refuses to complete this upload, and says that another one may succeed."""


@dataclass(frozen=True, slots=True)
class S3Writer:
    """Writes objects, whole or in parts."""

    calls: S3Calls
    reader: S3Reader
    live: LiveUploads
    on_part: OnPart | None = None

    def put(self, key: str, body: Body, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        """Store `body` under `key`."""
        view = memoryview(body).cast("B")
        if len(view) <= self.calls.settings.part_bytes:
            return self._put_whole(key, view, mode, sha256)
        return self._put_parts(key, view, mode)

    def _put_whole(
        self, key: str, body: memoryview, mode: PutMode, sha256: str | None
    ) -> PutOutcome:
        calls = self.calls
        arguments: dict[str, Any] = {"Bucket": calls.settings.bucket, "Key": calls.name(key)}
        if mode is PutMode.CREATE:
            arguments["IfNoneMatch"] = "*"
        arguments |= calls.checksum(body)

        def attempt() -> PutOutcome:
            try:
                calls.once(
                    lambda client: client.put_object(Body=calls.body(body, sha256), **arguments)
                )
            except BOTO_ERRORS as err:
                if mode is PutMode.CREATE and precondition_failed(err):
                    return self._already_there(key, body)
                if mode is PutMode.CREATE and status_of(err) == 501:
                    raise StorageError(
                        f"{calls.settings.where} knows no create-only put",
                        kind=Kind.NO_CONDITIONAL_PUT,
                        key=key,
                        hint="use another store; see storage/PROVIDERS.md",
                    ) from err
                raise translate(err, calls.settings, key) from err
            return PutOutcome.WRITTEN

        return calls.retrier.run(attempt)

    def _already_there(self, key: str, body: memoryview) -> PutOutcome:
        found = S3Reader(self.calls.without_retries()).holds(key, body)
        if found is None:  # the store has just said that it exists: a deletion, or a racing put
            raise StorageError(
                f"{self.calls.settings.where} says the object exists, and does not find it",
                kind=Kind.UNAVAILABLE,
                key=key,
            )
        if not found:
            raise object_exists(self.calls.settings.where, key)
        return PutOutcome.ALREADY_OURS

    def _put_parts(self, key: str, body: memoryview, mode: PutMode) -> PutOutcome:
        if mode is PutMode.CREATE:  # else it would be known only after the whole upload
            found = self.reader.holds(key, body)
            if found is not None:
                if not found:
                    raise object_exists(self.calls.settings.where, key)
                return PutOutcome.ALREADY_OURS
        plan = plan_upload(len(body), self.calls.settings.part_bytes)
        for _ in range(_UPLOADS):
            try:
                return self._upload(key, body, mode, plan)
            except _StartAgainError:
                continue
        raise StorageError(
            f"{self.calls.settings.where} answered {_UPLOADS} uploads with 409",
            kind=Kind.UNAVAILABLE,
            key=key,
            hint="somebody writes the same object all the time",
        )

    def _upload(self, key: str, body: memoryview, mode: PutMode, plan: PartPlan) -> PutOutcome:
        calls, settings = self.calls, self.calls.settings
        arguments: dict[str, Any] = {"Bucket": settings.bucket, "Key": calls.name(key)}
        arguments |= calls.checksum_kind()
        begun = calls.retried(key, lambda client: client.create_multipart_upload(**arguments))
        upload = _Upload(key, begun["UploadId"], plan)
        self.live.began(upload.upload_id)
        try:
            try:
                sent = self._send_parts(upload, body)
            except BaseException as err:
                self._abort(upload, err)
                raise
            return self._complete(upload, body, mode, sent)
        finally:
            self.live.ended(upload.upload_id)

    def _send_parts(self, upload: _Upload, body: memoryview) -> list[CompletedPartTypeDef]:
        calls, settings = self.calls, self.calls.settings
        sent: dict[int, CompletedPartTypeDef] = {}

        def send(index: int) -> None:
            part = upload.plan.part(index)
            piece = body[part.start : part.end]  # a view: parts in flight cost no copy (S20)
            checksum = calls.checksum(piece)
            arguments: dict[str, Any] = {
                "Bucket": settings.bucket,
                "Key": calls.name(upload.key),
                "UploadId": upload.upload_id,
                "PartNumber": index + 1,
                **checksum,
            }
            response = calls.retried(
                upload.key,
                lambda client: client.upload_part(Body=calls.body(piece), **arguments),
            )
            tag = response.get("ETag")
            if not tag:
                raise StorageError(
                    f"{settings.where} took part {index + 1} and gave no tag for it",
                    kind=Kind.REFUSED,
                    key=upload.key,
                    hint="use another store; see storage/PROVIDERS.md",
                )
            sent[index] = {"ETag": tag, "PartNumber": index + 1}
            if checksum:
                sent[index]["ChecksumCRC32"] = checksum["ChecksumCRC32"]
            if self.on_part is not None:
                self.on_part(part.size_bytes)

        pool = calls.connection(upload.key).pool
        run_parts(pool, upload.plan.parts, send, window=settings.streams)
        return [sent[index] for index in range(upload.plan.parts)]

    def _complete(
        self, upload: _Upload, body: memoryview, mode: PutMode, sent: list[CompletedPartTypeDef]
    ) -> PutOutcome:
        calls = self.calls
        arguments: dict[str, Any] = {
            "Bucket": calls.settings.bucket,
            "Key": calls.name(upload.key),
            "UploadId": upload.upload_id,
            "MultipartUpload": {"Parts": sent},
        }
        if mode is PutMode.CREATE:
            arguments["IfNoneMatch"] = "*"
        ambiguous = False

        def attempt() -> PutOutcome:
            nonlocal ambiguous
            try:
                calls.once(lambda client: client.complete_multipart_upload(**arguments))
            except BOTO_ERRORS as err:
                refused = precondition_failed(err)
                if is_ambiguous(err):
                    ambiguous = True
                elif not (refused or status_of(err) == 409 or error_code(err) == "NoSuchUpload"):
                    raise translate(err, calls.settings, upload.key) from err
                return self._resolve(upload, body, mode, err)
            return PutOutcome.WRITTEN

        try:
            return calls.retrier.run(attempt)
        except BaseException as err:
            if not ambiguous:
                self._abort(upload, err)
            raise

    def _resolve(
        self, upload: _Upload, body: memoryview, mode: PutMode, err: Exception
    ) -> PutOutcome:
        """What is under the key after a complete that did not succeed clearly."""
        settings = self.calls.settings
        try:
            found = S3Reader(self.calls.without_retries()).holds(upload.key, body)
        except DeltastoreError as unreadable:
            if not is_retryable(unreadable):
                raise
            raise translate(err, settings, upload.key) from err
        if found:
            return PutOutcome.ALREADY_OURS
        if found is False and mode is PutMode.CREATE:
            raise object_exists(settings.where, upload.key) from err
        if status_of(err) == 409:  # AWS: begin again and send every part
            raise _StartAgainError from err
        if error_code(err) == "NoSuchUpload":
            raise StorageError(
                f"the upload to {settings.where} was removed before it was complete",
                kind=Kind.REFUSED,
                key=upload.key,
                hint="put it again; lifecycle rules for unfinished uploads need at least a day",
            ) from err
        if precondition_failed(err):
            raise StorageError(
                f"{settings.where} says the object exists, and does not find it",
                kind=Kind.UNAVAILABLE,
                key=upload.key,
            ) from err
        raise translate(err, settings, upload.key) from err

    def _abort(self, upload: _Upload, reason: BaseException) -> None:
        """Remove the parts (S14). What hinders that is noted on the error that is being raised."""
        calls = self.calls
        try:
            calls.retried(
                upload.key,
                lambda client: client.abort_multipart_upload(
                    Bucket=calls.settings.bucket,
                    Key=calls.name(upload.key),
                    UploadId=upload.upload_id,
                ),
            )
        except DeltastoreError as err:
            reason.add_note(f"upload {upload.upload_id} of {upload.key} is left behind: {err}")


@dataclass(frozen=True, slots=True)
class _Upload:
    key: str
    upload_id: str
    plan: PartPlan
