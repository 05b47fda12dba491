"""A download that breaks at 90 % and starts again from 0 never ends on a bad line.

A large object is read as ranges in parallel, each of which resumes where it broke, and all of which
must be of the same object: If-Match on the tag of the first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltastore.errors import InvalidInputError, Kind, NotFoundError, StorageError
from deltastore.storage.parts import PartPlan, run_parts
from deltastore.storage.rules import check_unranged, range_past_end
from deltastore.storage.s3_errors import (
    BOTO_ERRORS,
    credentials_expired,
    precondition_failed,
    status_of,
    translate,
)
from deltastore.storage.store import ByteRange, ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from botocore.response import StreamingBody

    from deltastore.storage.s3_calls import S3Calls
    from deltastore.storage.s3_client import Connection

_RESTARTS = 3
_READ_BYTES = 1 << 20  # between two reads another thread may run, and progress is noted
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class _ChangedError(Exception):
    """The object is not the one that the first range came from."""


class _Stream:
    """An open response. It holds its permit until it is closed."""

    def __init__(self, calls: S3Calls, key: str, byte_range: ByteRange | None, etag: str | None):
        arguments: dict[str, Any] = {"Bucket": calls.settings.bucket, "Key": calls.name(key)}
        if byte_range is not None:
            arguments["Range"] = f"bytes={byte_range.start}-{byte_range.end - 1}"
        if etag is not None:
            arguments["IfMatch"] = etag
        self._connection: Connection = calls.connection(key)
        self._connection.permits.acquire()
        try:
            response: Mapping[str, Any] = self._ask(calls, arguments)
        except BaseException:
            self._connection.permits.release()
            raise
        self._open = True
        self._body: StreamingBody = response["Body"]
        self.etag: str | None = response.get("ETag")
        self.size_bytes = int(response.get("ContentLength", 0))
        span = _CONTENT_RANGE.fullmatch(response.get("ContentRange") or "")
        self.first_byte = int(span[1]) if span else None
        self.object_bytes = int(span[3]) if span else self.size_bytes

    def _ask(self, calls: S3Calls, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        client = self._connection.client
        try:
            return client.get_object(**arguments)
        except BOTO_ERRORS as err:
            if not (credentials_expired(err) and calls.source.renew_credentials(client)):
                raise
        return calls.connection().client.get_object(**arguments)

    def read_into(self, target: memoryview) -> int:
        """The next bytes; 0 at the end."""
        piece = self._body.read(len(target))
        target[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        """Give the permit back; a body that was not read to its end costs its connection."""
        if self._open:
            self._open = False
            try:
                self._body.close()
            finally:
                self._connection.permits.release()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class S3Reader:
    """Reads objects whole or in ranges."""

    calls: S3Calls

    def head(self, key: str) -> ObjectInfo:
        """Size and age of the object."""
        settings = self.calls.settings
        response = self.calls.retried(
            key,
            lambda client: client.head_object(Bucket=settings.bucket, Key=self.calls.name(key)),
        )
        return ObjectInfo(
            key,
            int(response["ContentLength"]),
            response["LastModified"].timestamp(),
            response.get("ETag"),
        )

    def read(self, key: str, byte_range: ByteRange | None) -> bytes:
        """The object's bytes, or that range of them."""
        for _ in range(_RESTARTS):
            try:
                return self._read_once(key, byte_range)
            except _ChangedError:
                continue
        raise StorageError(
            f"the object was replaced {_RESTARTS} times while it was read",
            kind=Kind.UNAVAILABLE,
            key=key,
            hint="nothing but small hints may be overwritten: look for a second writer",
        )

    def holds(self, key: str, body: memoryview) -> bool | None:
        """Whether the key holds exactly these bytes; None when it holds nothing."""
        try:
            info = self.head(key)
            if info.size_bytes != len(body):
                return False
            if not len(body):
                return True
            return self._equal(key, body, info.etag)
        except NotFoundError as err:
            if err.kind is Kind.BUCKET_MISSING:
                raise
            return None
        except _ChangedError:
            return False

    def _equal(self, key: str, body: memoryview, etag: str | None) -> bool:
        plan = PartPlan(len(body), self.calls.settings.part_bytes)
        unequal: list[int] = []

        def compare(index: int) -> None:
            part = plan.part(index)
            buffer = bytearray(part.size_bytes)
            self._fill(key, memoryview(buffer), part.start, etag)
            if buffer != body[part.start : part.end]:
                unequal.append(index)

        if plan.parts == 1:
            compare(0)
        else:
            settings = self.calls.settings
            pool = self.calls.connection(key).pool
            run_parts(pool, plan.parts, compare, window=settings.streams)
        return not unequal

    def _read_once(self, key: str, wanted: ByteRange | None) -> bytes:
        # Of an object of unknown size too, the first part: a response that is left before its end
        # costs its connection, and the store what it has read ahead.
        begin = 0 if wanted is None else wanted.start
        part_end = begin + self.calls.settings.part_bytes
        first = ByteRange(begin, part_end if wanted is None else min(part_end, wanted.end))
        try:
            stream = self.calls.retrier.run(lambda: self._open(key, first, None))
        except InvalidInputError as err:
            if wanted is None and err.kind is Kind.RANGE:
                return b""  # an empty object has no range to ask for (S7)
            raise
        with stream:
            if wanted is None:
                start, size_bytes = 0, stream.object_bytes
                check_unranged(key, size_bytes)
            else:
                start, size_bytes = wanted.start, wanted.size_bytes
                if wanted.end > stream.object_bytes:
                    raise range_past_end(key, wanted, stream.object_bytes)
            if not size_bytes:
                return b""
            buffer = bytearray(size_bytes)
            self._read_parts(key, start, memoryview(buffer), stream)
        return bytes(buffer)

    def _read_parts(self, key: str, start: int, target: memoryview, stream: _Stream) -> None:
        """Fill `target` from byte `start`: the first part from `stream`, the others beside it."""
        settings = self.calls.settings
        plan = PartPlan(len(target), settings.part_bytes)

        def read_first() -> None:
            self._fill(key, target[: plan.part(0).end], start, stream.etag, stream)

        def read_part(index: int) -> None:
            part = plan.part(index)
            self._fill(key, target[part.start : part.end], start + part.start, stream.etag)

        if plan.parts == 1:
            read_first()
            return
        run_parts(
            self.calls.connection(key).pool,
            plan.parts,
            read_part,
            window=settings.streams,
            first=1,
            meanwhile=read_first,
        )

    def _open(self, key: str, byte_range: ByteRange | None, etag: str | None) -> _Stream:
        settings = self.calls.settings
        try:
            stream = _Stream(self.calls, key, byte_range, etag)
        except BOTO_ERRORS as err:
            if etag is not None and precondition_failed(err):
                raise _ChangedError from err
            if byte_range is not None and status_of(err) == 416:
                raise range_past_end(key, byte_range, self.head(key).size_bytes) from err
            raise translate(err, settings, key) from err
        if byte_range is not None and stream.first_byte != byte_range.start:
            with stream:
                raise StorageError(
                    f"{settings.where} does not serve ranges of objects",
                    kind=Kind.REFUSED,
                    key=key,
                    hint="use another store; see storage/PROVIDERS.md",
                )
        return stream

    def _fill(
        self,
        key: str,
        target: memoryview,
        start: int,
        etag: str | None,
        opened: _Stream | None = None,
    ) -> None:
        """Read the object from byte `start` until `target` is full, resuming where it breaks."""
        done = 0
        stream = opened

        def attempt() -> None:
            nonlocal done, stream
            current, stream = stream, None
            if current is None:
                left = ByteRange(start + done, start + len(target))
                current = self._open(key, left, etag)
            try:
                with current:
                    while done < len(target):
                        count = current.read_into(target[done : done + _READ_BYTES])
                        if not count:
                            break
                        done += count
            except BOTO_ERRORS as err:
                raise translate(err, self.calls.settings, key) from err
            if done < len(target):
                raise StorageError(
                    f"{self.calls.settings.where} ended a response early",
                    kind=Kind.UNAVAILABLE,
                    key=key,
                )

        self.calls.retrier.run(attempt, lambda: done)
