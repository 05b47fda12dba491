"""A condition that holds for a put need not hold for the completion of an upload in parts (S2).

What only an S3 store can be asked: whether a create-only completion is refused onto an object, and
which of two racing ones wins; whether a wrong checksum is refused, also that of a part. The uploads
have one small part each, which S3 allows for the last one.
"""

from __future__ import annotations

import threading
import zlib
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltastore.storage.probe import Finding
from deltastore.storage.s3_errors import (
    BOTO_ERRORS,
    error_code,
    precondition_failed,
    status_of,
    translate,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltastore.storage.s3_calls import S3Calls

_RACE_WAIT_S = 30.0
_UNKNOWN = frozenset({400, 501})
"""What a store answers that does not know a header or its value."""


@dataclass(frozen=True, slots=True)
class S3Probe:
    """Tries that need S3's own words. Keys are the store's, under the probe's prefix."""

    calls: S3Calls
    prefix: str

    def findings(self, race_rounds: int) -> Mapping[str, Finding]:
        """By name."""
        return {
            "create_only_complete": self._create_only_complete(),
            "create_only_complete_race": self._complete_race(race_rounds),
            "checksums": self.checksums(),
        }

    def _create_only_complete(self) -> Finding:
        key = self.prefix + "complete"
        self._complete(key, b"one")
        if self._complete(key, b"two"):
            return Finding(False, "a second create-only completion was accepted")
        return Finding(True, "a create-only completion onto an object is refused")

    def _complete_race(self, rounds: int) -> Finding:
        for number in range(rounds):
            key = f"{self.prefix}complete-race-{number}"
            barrier = threading.Barrier(2)
            with ThreadPoolExecutor(2, thread_name_prefix="probe") as pool:
                racers = [
                    pool.submit(self._complete, key, letter * 1000, barrier)
                    for letter in (b"a", b"b")
                ]
                winners = sum(racer.result() for racer in racers)
            if winners != 1:
                return Finding(
                    False, f"{winners} of 2 racing create-only completions won in round {number}"
                )
        return Finding(
            True, f"exactly one of two racing create-only completions won, {rounds} times"
        )

    def _complete(self, key: str, body: bytes, barrier: threading.Barrier | None = None) -> bool:
        """Upload in one part and complete create-only; whether the store says that it wrote."""
        target: dict[str, Any] = {
            "Bucket": self.calls.settings.bucket,
            "Key": self.calls.name(key),
        }
        begun = self.calls.retried(key, lambda client: client.create_multipart_upload(**target))
        upload = {**target, "UploadId": begun["UploadId"]}
        part = self.calls.retried(
            key, lambda client: client.upload_part(PartNumber=1, Body=body, **upload)
        )
        arguments: dict[str, Any] = {
            **upload,
            "IfNoneMatch": "*",
            "MultipartUpload": {"Parts": [{"ETag": part["ETag"], "PartNumber": 1}]},
        }
        if barrier is not None:
            barrier.wait(_RACE_WAIT_S)
        try:
            self.calls.once(lambda client: client.complete_multipart_upload(**arguments))
        except BOTO_ERRORS as err:
            if not (precondition_failed(err) or status_of(err) in {409, *_UNKNOWN}):
                raise translate(err, self.calls.settings, key) from err
            self._abort(key, upload)
            return False
        return True

    def _abort(self, key: str, upload: Mapping[str, Any]) -> None:
        try:
            self.calls.once(lambda client: client.abort_multipart_upload(**upload))
        except BOTO_ERRORS as err:
            if error_code(err) != "NoSuchUpload":  # some end it themselves when they refuse it
                raise translate(err, self.calls.settings, key) from err

    def checksums(self) -> Finding:
        """Whether a wrong checksum is refused and a right one taken."""
        key, body = self.prefix + "checksum", b"checksum"
        right = zlib.crc32(body)
        refusal = self._sum_refused(key, body, right)
        if refusal:
            return Finding(False, f"a right checksum is refused: {refusal}")
        if not self._sum_refused(key, body, right ^ 1):
            return Finding(False, "a wrong checksum is accepted")
        return Finding(True, "a wrong checksum is refused")

    def _sum_refused(self, key: str, body: bytes, crc32: int) -> str:
        """What the store says against these bytes with this checksum; '' when it takes them."""
        checksum = b64encode(crc32.to_bytes(4, "big")).decode()
        try:
            self.calls.once(
                lambda client: client.put_object(
                    Bucket=self.calls.settings.bucket,
                    Key=self.calls.name(key),
                    Body=body,
                    ChecksumCRC32=checksum,
                )
            )
        except BOTO_ERRORS as err:
            if status_of(err) not in _UNKNOWN:
                raise translate(err, self.calls.settings, key) from err
            return f"{status_of(err)} {error_code(err)}"
        return ""
