"""A log that needs its writer's memory dies with it: events go to a file, one whole line each.

A line is one JSON object: `at_ms` (wall clock, for people and for ordering across processes),
`event` (the class name), then the event's own fields. A number that is not finite is written as the
string "NaN", "Infinity" or "-Infinity", so that every line is JSON for every reader.

Writers MUST append whole lines with one write each. Readers MUST tolerate a last line without its
newline (the writer is at it, or was killed in it), kinds of events they do not know (the writer is
newer) and the absence of fields that have a default (it is older); anything else that does not
parse is a FormatError.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import threading
from dataclasses import MISSING, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from deltastore import events as _events
from deltastore.errors import FormatError, Kind, StorageError
from deltastore.events import Event, EventsLost

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deltastore.clock import Clock

READ_MAX_BYTES = 8 << 20  # several lines, whatever their length
MAX_LINE_BYTES = 1 << 20  # the largest event deals a batch to some thousand actors

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True)
class StampedEvent:
    """An event and when it was written, in milliseconds of wall-clock time since the epoch."""

    at_ms: int
    event: Event


class JsonlSink:
    """An EventSink that appends one line per event to a file. Thread-safe; close when done.

    An EventSink must not raise into the work it reports on: what cannot be written (a full disk) is
    counted, and the count is written as an `EventsLost` as soon as there is room again. `lost` and
    `error` say so meanwhile.

    Several processes may append to one file: each line is one write to a descriptor opened for
    appending, so lines do not mix.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._rest = b""
        self.lost = 0
        """Events that could not be written and are not reported in the file yet."""
        self.error: StorageError | None = None
        """Why the last of them could not be written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor: int | None = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )

    def __call__(self, event: Event) -> None:
        """Append `event`; it is with the operating system when this returns."""
        at_ms = round(self._clock.utc_s() * 1000)
        line = encode_line(StampedEvent(at_ms, event))
        with self._lock:
            if self._descriptor is None:
                return  # a thread reports its end after the run was closed: nobody reads on
            if self.lost:
                line = encode_line(StampedEvent(at_ms, EventsLost(self.lost))) + line
            left, err = _write_some(self._descriptor, self._rest)
            self._rest = left
            if err is None:
                left, err = _write_some(self._descriptor, line)
                begun = len(left) < len(line)
                self._rest = left if begun else b""  # a line that was begun is finished later
                self.lost = 0 if begun else self.lost + 1
            else:
                self.lost += 1
            self.error = None if err is None else self._cannot(err)

    def _cannot(self, err: OSError) -> StorageError:
        return StorageError(
            f"event log {self.path} cannot be written: {err.strerror}",
            kind=Kind.DISK_FULL if err.errno == errno.ENOSPC else Kind.UNAVAILABLE,
            hint="free space there, or point the events folder elsewhere",
        )

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def __enter__(self) -> JsonlSink:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def whole_lines(path: Path, offset: int) -> tuple[bytes, int]:
    """Whole lines from `offset` on, and the length of an unfinished one; none if no file yet.

    At most `READ_MAX_BYTES` are read: a log of days is larger than memory.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read(READ_MAX_BYTES)
    except FileNotFoundError:
        return b"", 0
    whole = text[: text.rfind(b"\n") + 1]
    return whole, len(text) - len(whole)


class EventTail:
    """Reads a growing event file: each `read_new` returns what came since the last one.

    At most `READ_MAX_BYTES` of it: who is further behind has more with the next call.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unknown = 0
        """Lines whose kind of event this version does not know."""
        self.offset = 0
        """Bytes of the file that have been read."""

    def read_new(self) -> list[StampedEvent]:
        """Return the events of whole lines after those of the last call; none if no file yet."""
        whole, left_bytes = whole_lines(self.path, self.offset)
        if left_bytes > MAX_LINE_BYTES:
            raise self._bad("a line is longer than an event can be", Kind.LIMIT)
        stamped: list[StampedEvent] = []
        for line in whole.splitlines():
            try:
                event = decode_line(line)
            except FormatError as err:
                raise self._bad(err.message, err.kind) from err
            self.offset += len(line) + 1
            if event is None:
                self.unknown += 1
            else:
                stamped.append(event)
        return stamped

    def _bad(self, message: str, kind: Kind) -> FormatError:
        return FormatError(
            f"event log {self.path}, byte {self.offset}: {message}",
            kind=kind,
            hint="the file was changed by something else than deltastore",
        )


def iter_events(path: Path) -> Iterator[StampedEvent]:
    """Yield all events of a file, in the order written, with a bounded part of it in memory."""
    tail = EventTail(path)
    offset = -1
    while tail.offset > offset:  # a part may hold nothing but events of a newer writer
        offset = tail.offset
        yield from tail.read_new()


def read_events(path: Path) -> list[StampedEvent]:
    """Return all events of a file, in the order written; none if there is no file."""
    return list(iter_events(path))


def encode_line(stamped: StampedEvent) -> bytes:
    """Return the line of one event, newline included."""
    fields: dict[str, Any] = {"at_ms": stamped.at_ms, "event": type(stamped.event).__name__}
    for field in dataclasses.fields(stamped.event):
        value = getattr(stamped.event, field.name)
        fields[field.name] = _finite(value) if isinstance(value, float) else value
    line = json.dumps(fields, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return line.encode("utf-8", "surrogatepass") + b"\n"


def decode_line(line: bytes) -> StampedEvent | None:
    """Return the event of one line, None if its kind is unknown; FormatError on anything else."""
    if len(line) > MAX_LINE_BYTES:
        raise FormatError("a line is longer than an event can be", kind=Kind.LIMIT)
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise FormatError("a line is not JSON", kind=Kind.FIELD) from err
    if not isinstance(fields, dict):
        raise FormatError("a line is not a JSON object", kind=Kind.FIELD)
    name, at_ms = fields.pop("event", None), fields.pop("at_ms", None)
    if not isinstance(name, str) or type(at_ms) is not int:
        raise FormatError("a line has no event name or no time", kind=Kind.FIELD)
    hints = _event_types().get(name)
    if hints is None:
        return None
    event_type, types = hints
    wanted = {part.name for part in dataclasses.fields(event_type) if part.default is MISSING}
    if not wanted <= fields.keys() <= types.keys():
        wrong = ", ".join(sorted((wanted - fields.keys()) | (fields.keys() - types.keys())))
        raise FormatError(f"event {name} has missing or unknown fields: {wrong}", kind=Kind.FIELD)
    values = {key: _typed(value, types[key], f"{name}.{key}") for key, value in fields.items()}
    return StampedEvent(at_ms, event_type(**values))


@cache
def _event_types() -> dict[str, tuple[type[Event], dict[str, Any]]]:
    found: dict[str, tuple[type[Event], dict[str, Any]]] = {}
    for name, value in vars(_events).items():
        if isinstance(value, type) and issubclass(value, Event) and value is not Event:
            found[name] = (value, get_type_hints(value))
    return found


def _finite(value: float) -> float | str:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _typed(value: object, wanted: Any, where: str) -> Any:
    """Return `value` as the type that the field declares, or raise FormatError naming it."""
    if wanted is float:
        if type(value) in (int, float):
            return float(value)  # type: ignore[arg-type]
        if isinstance(value, str) and value in _NOT_FINITE:
            return _NOT_FINITE[value]
    elif get_origin(wanted) is tuple and isinstance(value, list):
        parts = get_args(wanted)
        if len(parts) == 2 and parts[1] is Ellipsis:
            return tuple(_typed(item, parts[0], where) for item in value)
        if len(parts) == len(value):
            return tuple(_typed(item, part, where) for item, part in zip(value, parts, strict=True))
    elif wanted in (int, str) and type(value) is wanted:
        return value
    raise FormatError(f"field {where} has a value of the wrong type", kind=Kind.FIELD)


def _write_some(descriptor: int, data: bytes) -> tuple[bytes, OSError | None]:
    """Write what can be written; return what is left, and why."""
    left = data
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except OSError as err:
            return left, err
    return left, None
