"""A client library's defaults overwrite, herd on retries and lose answers: each request is ours.

The reads are in s3_reader.py, the writes (and their order) in s3_writer.py; this is the store they
make up, with listing and deletion.
"""

from __future__ import annotations

import random
from itertools import islice
from typing import TYPE_CHECKING, Any

from deltastore.clock import Clock, SystemClock
from deltastore.errors import Kind, StorageError
from deltastore.storage.retry import Jitter, OnRetry, Retrier
from deltastore.storage.rules import check_key, check_prefix, is_key
from deltastore.storage.s3_calls import S3Calls, Switch
from deltastore.storage.s3_client import ConnectionSource
from deltastore.storage.s3_probe import S3Probe
from deltastore.storage.s3_reader import S3Reader
from deltastore.storage.s3_uploads import LiveUploads, S3Uploads
from deltastore.storage.s3_writer import OnPart, S3Writer
from deltastore.storage.store import Body, ByteRange, ObjectInfo, PutMode, PutOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from deltastore.storage.probe import Finding
    from deltastore.storage.s3_settings import S3Settings
    from deltastore.storage.uploads import IncompleteUpload

_DELETE_KEYS = 1000  # the most that one request takes


class S3Store:
    """An ObjectStore in a bucket of an S3-compatible service.

    Args:
        settings: the bucket and how to use it.
        jitter: random numbers in [0, 1) that spread retries out.
        on_retry: told of the error each time a request is made again.
        on_part: told the bytes of every part of a large body that has arrived.
    """

    def __init__(
        self,
        settings: S3Settings,
        *,
        clock: Clock | None = None,
        jitter: Jitter | None = None,
        on_retry: OnRetry | None = None,
        on_part: OnPart | None = None,
    ) -> None:
        self._settings = settings
        self._source = ConnectionSource(settings)
        retrier = Retrier(
            settings.retry,
            clock or SystemClock(),
            jitter or random.SystemRandom().random,
            on_retry,
        )
        self._calls = S3Calls(settings, self._source, retrier, Switch(settings.checksums))
        self._reader = S3Reader(self._calls)
        live = LiveUploads()
        self._writer = S3Writer(self._calls, self._reader, live, on_part)
        self._uploads = S3Uploads(self._calls, live)

    def __repr__(self) -> str:
        return f"S3Store({self._settings.where})"

    @property
    def url(self) -> str:
        """Where this store is, for people."""
        return self._settings.url

    @property
    def where(self) -> str:
        """The URL and, unless it is AWS, the endpoint; see ChecksBodies."""
        return self._settings.where

    def put(self, key: str, body: Body, *, mode: PutMode, sha256: str | None = None) -> PutOutcome:
        """Store `body` under `key`; see ObjectStore."""
        return self._writer.put(check_key(key), body, mode, sha256)

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """The object's bytes, or that range of them; see ObjectStore."""
        return self._reader.read(check_key(key), byte_range)

    def head(self, key: str) -> ObjectInfo:
        """Size and age of the object; see ObjectStore."""
        return self._reader.head(check_key(key))

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix`, in key order; see ObjectStore."""
        check_prefix(prefix)
        arguments: dict[str, Any] = {
            "Bucket": self._settings.bucket,
            "Prefix": self._calls.name(prefix),
        }
        if start_after is not None:
            arguments["StartAfter"] = self._calls.name(start_after)
        return self._pages(arguments)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the objects; absent keys are fine."""
        names = (self._calls.name(check_key(key)) for key in keys)
        while batch := list(islice(names, _DELETE_KEYS)):
            self._delete_batch(batch)

    def incomplete_uploads(self, prefix: str) -> Iterator[IncompleteUpload]:
        """Uploads in parts that were begun and not completed; see IncompleteUploads."""
        return self._uploads.incomplete(check_prefix(prefix))

    def abort_upload(self, upload: IncompleteUpload) -> bool:
        """Remove the parts of one, unless it is running here or gone; see IncompleteUploads."""
        return self._uploads.abort(upload)

    def probe_more(self, prefix: str, race_rounds: int) -> Mapping[str, Finding]:
        """What the probe asks S3 stores beside the rest; see ProbesMore."""
        return S3Probe(self._calls, prefix).findings(race_rounds)

    def enable_checksums(self, prefix: str) -> Finding:
        """Send checksums from now on, if the store checks them; see ChecksBodies."""
        finding = S3Probe(self._calls, prefix).checksums()
        if finding.ok:
            self.use_checksums()
        return finding

    def use_checksums(self) -> None:
        """Send checksums from now on; see ChecksBodies."""
        self._calls.checksums.on = True

    def close(self) -> None:
        """Wait for parts in flight and close the connections."""
        self._source.close()

    def _pages(self, arguments: dict[str, Any]) -> Iterator[ObjectInfo]:
        skip = len(self._calls.name(""))
        while True:
            page = self._page(arguments)
            for entry in page.get("Contents", ()):
                key = entry["Key"][skip:]
                if is_key(key):  # not so a "folder" that some browser made
                    yield ObjectInfo(
                        key,
                        int(entry["Size"]),
                        entry["LastModified"].timestamp(),
                        entry.get("ETag"),
                    )
            if not page.get("IsTruncated"):
                return
            token = page.get("NextContinuationToken")
            if not token or token == arguments.get("ContinuationToken"):
                raise StorageError(
                    f"{self._settings.where} sends a listing without end",
                    kind=Kind.REFUSED,
                    hint="use another store; see storage/PROVIDERS.md",
                )
            arguments = {**arguments, "ContinuationToken": token}

    def _page(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._calls.retried(None, lambda client: client.list_objects_v2(**arguments))

    def _delete_batch(self, names: Sequence[str]) -> None:
        try:
            result: Mapping[str, Any] = self._calls.retried(
                None,
                lambda client: client.delete_objects(
                    Bucket=self._settings.bucket,
                    Delete={"Objects": [{"Key": name} for name in names], "Quiet": True},
                ),
            )
        except StorageError as err:
            if err.kind is not Kind.REFUSED:
                raise
            # Some stores have no batch deletion, or want another checksum for it.
            for name in names:
                self._delete_one(name)
            return
        failed = [e for e in result.get("Errors", ()) if e.get("Code") != "NoSuchKey"]
        if failed:
            first = failed[0]
            denied = "Denied" in str(first.get("Code"))
            raise StorageError(
                f"{self._settings.where} did not delete {len(failed)} objects: "
                f"{first.get('Code')} {first.get('Message', '')}".rstrip(),
                kind=Kind.CREDENTIALS if denied else Kind.UNAVAILABLE,
                key=first.get("Key"),
                hint="check s3:DeleteObject in the policy" if denied else "delete them again",
            )

    def _delete_one(self, name: str) -> None:
        self._calls.retried(
            name,
            lambda client: client.delete_object(Bucket=self._settings.bucket, Key=name),
        )
