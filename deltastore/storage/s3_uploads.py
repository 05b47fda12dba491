"""A janitor that goes by the day an upload began ends the one that is at its last part.

Lists what was begun and not completed, with the date of the newest part of each, and aborts. Both
dates and "now" come from the store's own answers: this machine's clock may be wrong.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from deltastore.errors import Kind, StorageError
from deltastore.storage.rules import is_key
from deltastore.storage.s3_errors import BOTO_ERRORS, error_code, translate
from deltastore.storage.uploads import IncompleteUpload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deltastore.storage.s3_calls import S3Calls

_PAGE_UPLOADS = 1000  # the most that one answer has


@dataclass(frozen=True, slots=True)
class LiveUploads:
    """The uploads that this process is making now: no age makes one of them an orphan."""

    _ids: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def began(self, upload_id: str) -> None:
        """It is running."""
        with self._lock:
            self._ids.add(upload_id)

    def ended(self, upload_id: str) -> None:
        """It is running no more, however it ended."""
        with self._lock:
            self._ids.discard(upload_id)

    def __contains__(self, upload_id: object) -> bool:
        with self._lock:
            return upload_id in self._ids


@dataclass(frozen=True, slots=True)
class S3Uploads:
    """Uploads in parts that were begun and not completed."""

    calls: S3Calls
    live: LiveUploads
    page_uploads: int = _PAGE_UPLOADS

    def incomplete(self, prefix: str) -> Iterator[IncompleteUpload]:
        """Every one of a key that begins with `prefix`."""
        skip = len(self.calls.name(""))
        for entry in self._entries(self.calls.name(prefix)):
            key = entry["Key"][skip:]
            if not is_key(key):
                continue
            started_s = entry["Initiated"].timestamp()
            idle_s = self._idle_s(key, entry["UploadId"], started_s)
            if idle_s is not None:
                yield IncompleteUpload(key, entry["UploadId"], started_s, idle_s)

    def abort(self, upload: IncompleteUpload) -> bool:
        """Remove its parts; False when it is running here, or gone already."""
        if upload.upload_id in self.live:
            return False
        calls = self.calls

        def attempt() -> bool:
            try:
                calls.once(
                    lambda client: client.abort_multipart_upload(
                        Bucket=calls.settings.bucket,
                        Key=calls.name(upload.key),
                        UploadId=upload.upload_id,
                    )
                )
            except BOTO_ERRORS as err:
                if error_code(err) == "NoSuchUpload":
                    return False
                raise translate(err, calls.settings, upload.key) from err
            return True

        return calls.retrier.run(attempt)

    def _entries(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        arguments: dict[str, Any] = {
            "Bucket": self.calls.settings.bucket,
            "Prefix": prefix,
            "MaxUploads": self.page_uploads,
        }
        while True:
            page = self._page(arguments)
            yield from page.get("Uploads", ())
            if not page.get("IsTruncated"):
                return
            # What the store names, no more: SeaweedFS goes by the upload alone, and a key that it
            # did not name hides the others from it.
            named = {
                "KeyMarker": page.get("NextKeyMarker"),
                "UploadIdMarker": page.get("NextUploadIdMarker"),
            }
            marker = {name: value for name, value in named.items() if value}
            if not marker or marker.items() <= arguments.items():
                raise StorageError(
                    f"{self.calls.settings.where} sends a listing of uploads without end",
                    kind=Kind.REFUSED,
                    hint="use a lifecycle rule for incomplete uploads there",
                )
            arguments |= marker

    def _page(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.calls.retried(None, lambda client: client.list_multipart_uploads(**arguments))

    def _idle_s(self, key: str, upload_id: str, started_s: float) -> float | None:
        """Seconds since anything happened to it; None when it ended meanwhile."""
        calls, touched_s, marker = self.calls, started_s, 0
        while True:
            arguments: dict[str, Any] = {
                "Bucket": calls.settings.bucket,
                "Key": calls.name(key),
                "UploadId": upload_id,
                "PartNumberMarker": marker,
            }
            page = self._parts(key, arguments)
            if page is None:
                return None
            now_s = _answered_s(page, calls.settings.where)
            parts = page.get("Parts", ())
            touched_s = max(touched_s, *(float(p["LastModified"].timestamp()) for p in parts), 0.0)
            following = int(page.get("NextPartNumberMarker") or 0)
            if not page.get("IsTruncated") or following <= marker:
                return now_s - touched_s
            marker = following

    def _parts(self, key: str, arguments: Mapping[str, Any]) -> Mapping[str, Any] | None:
        calls = self.calls

        def attempt() -> Mapping[str, Any] | None:
            try:
                return calls.once(lambda client: client.list_parts(**arguments))
            except BOTO_ERRORS as err:
                if error_code(err) == "NoSuchUpload":
                    return None
                raise translate(err, calls.settings, key) from err

        return calls.retrier.run(attempt)


def _answered_s(response: Mapping[str, Any], where: str) -> float:
    """When the store answered, by its own clock."""
    date = response["ResponseMetadata"].get("HTTPHeaders", {}).get("date")
    try:
        return parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError) as err:
        raise StorageError(
            f"{where} does not date its answers: {date!r}",
            kind=Kind.REFUSED,
            hint="use a lifecycle rule for incomplete uploads there",
        ) from err
