"""The event file survives its writer: whole lines, every value, and garbage is named."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltastore import events
from deltastore.errors import FormatError, Kind
from deltastore.events import ActorJoined, Event, ResultSettled, VersionStaged
from deltastore.observability import jsonl
from deltastore.observability.jsonl import (
    EventTail,
    JsonlSink,
    StampedEvent,
    decode_line,
    encode_line,
    read_events,
)
from deltastore.testing.clock import FakeClock

if TYPE_CHECKING:
    from pathlib import Path

EVENT_TYPES = [
    value
    for value in vars(events).values()
    if isinstance(value, type) and issubclass(value, Event) and value is not Event
]


def _values(wanted: Any) -> st.SearchStrategy[Any]:
    if get_origin(wanted) is tuple:
        parts = get_args(wanted)
        if parts[1:] == (Ellipsis,):
            return st.lists(_values(parts[0]), max_size=3).map(tuple)
        return st.tuples(*map(_values, parts))
    return {
        int: st.integers(),
        str: st.text(),
        float: st.floats(allow_nan=False),
    }[wanted]


@st.composite
def _events(draw: st.DrawFn) -> Event:
    event_type = draw(st.sampled_from(EVENT_TYPES))
    hints = get_type_hints(event_type)
    return event_type(**{name: draw(_values(wanted)) for name, wanted in hints.items()})


@given(_events(), st.integers(0, 2**53))
def test_every_event_returns_as_it_was(event: Event, at_ms: int) -> None:
    """Whatever event of whatever kind is written is read back equal, from one line of JSON."""
    line = encode_line(StampedEvent(at_ms, event))
    assert line.count(b"\n") == 1
    assert decode_line(line.rstrip(b"\n")) == StampedEvent(at_ms, event)
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_loss_of_nan_is_still_json() -> None:
    """A NaN field travels as a string, so that any JSON reader takes the line."""
    event = ActorJoined("a", 1, "chain", 2, math.nan)
    line = encode_line(StampedEvent(0, event))
    assert json.loads(line)["seconds"] == "NaN"
    read = decode_line(line)
    assert read is not None
    assert isinstance(read.event, ActorJoined)
    assert math.isnan(read.event.seconds)


def test_a_line_cut_off_by_a_kill_is_waited_for(tmp_path: Path) -> None:
    """A last line without its newline is not an error, and is read once it is whole."""
    path = tmp_path / "events.jsonl"
    first, second = ActorJoined("a", 1, "local", 0, 0.5), ActorJoined("b", 1, "chain", 9, 1.5)
    lines = encode_line(StampedEvent(1, first)) + encode_line(StampedEvent(2, second))
    path.write_bytes(lines[:-5])
    tail = EventTail(path)
    assert [stamped.event for stamped in tail.read_new()] == [first]
    assert tail.read_new() == []
    path.write_bytes(lines)
    assert [stamped.event for stamped in tail.read_new()] == [second]


def test_a_long_file_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call reads a bounded part, wherever it cuts a line; nothing is lost or read twice, and
    parts of events that nobody knows end nothing."""
    path = tmp_path / "events.jsonl"
    written = [ActorJoined(f"a{number}", number, "local", 0, 0.5) for number in range(40)]
    lines = [encode_line(StampedEvent(number, event)) for number, event in enumerate(written)]
    newer = b'{"at_ms":1,"event":"SunRose","where":"east"}\n'
    path.write_bytes(b"".join(lines[:20]) + 40 * newer + b"".join(lines[20:]))
    part_bytes = 2 * len(lines[-1]) + 7
    monkeypatch.setattr(jsonl, "READ_MAX_BYTES", part_bytes)
    tail, calls = EventTail(path), []
    while len(seen := [one.event for call in calls for one in call]) < len(written):
        before = tail.offset
        calls.append(tail.read_new())
        assert 0 < tail.offset - before <= part_bytes
    assert seen == written
    assert tail.unknown == 40
    assert [one.event for one in read_events(path)] == written


def test_events_of_a_newer_writer_are_counted_and_passed_over(tmp_path: Path) -> None:
    """A kind of event that this version does not know stops no reader."""
    path = tmp_path / "events.jsonl"
    known = encode_line(StampedEvent(2, ActorJoined("a", 1, "local", 0, 0.5)))
    path.write_bytes(b'{"at_ms":1,"event":"SunRose","where":"east"}\n' + known)
    tail = EventTail(path)
    assert len(tail.read_new()) == 1
    assert tail.unknown == 1


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{",
        b'{"event":"ActorJoined"}',
        b'{"at_ms":true,"event":"ActorJoined"}',
        b'{"at_ms":1,"event":"ActorJoined","actor":"a"}',
        (
            b'{"at_ms":1,"event":"ActorJoined","actor":"a","version":1.5,"via":"x","size_bytes":1,'
            b'"seconds":1}'
        ),
        (
            b'{"at_ms":1,"event":"ActorJoined","actor":"a","version":1,"via":"x","size_bytes":1,'
            b'"seconds":"soon"}'
        ),
        b'{"at_ms":1,"event":"BatchDealt","step":1,"shares":[["a",1,2]]}',
        b"[" * 100_000,
    ],
)
def test_garbage_is_a_format_error(tmp_path: Path, line: bytes) -> None:
    """A whole line that is no event is a FormatError that names the file and the place."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(line + b"\n")
    with pytest.raises(FormatError, match="byte 0") as caught:
        read_events(path)
    assert caught.value.kind in {Kind.FIELD, Kind.LIMIT}


def test_lines_of_many_threads_do_not_mix(tmp_path: Path) -> None:
    """Two sinks on one file and several threads each leave only whole lines, none lost."""
    path = tmp_path / "deep" / "events.jsonl"
    clock = FakeClock()
    with JsonlSink(path, clock) as one, JsonlSink(path, clock) as two:

        def report(sink: JsonlSink, name: str) -> None:
            for number in range(200):
                sink(ResultSettled(f"job{number}", name, "admitted", number, 0.25))

        threads = [
            threading.Thread(target=report, args=(sink, f"{name}{index}"))
            for index in range(2)
            for name, sink in (("one", one), ("two", two))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    read = [stamped.event for stamped in read_events(path)]
    assert len(read) == 800
    assert {dataclasses.astuple(event)[1] for event in read} == {"one0", "one1", "two0", "two1"}


def test_a_closed_sink_takes_no_more(tmp_path: Path) -> None:
    """An event that arrives after close is dropped, not written to somebody else's descriptor."""
    sink = JsonlSink(tmp_path / "e.jsonl", FakeClock())
    sink.close()
    sink.close()
    sink(ActorJoined("a", 1, "local", 0, 0.5))
    assert read_events(tmp_path / "e.jsonl") == []


def test_lines_of_an_older_writer_are_read(tmp_path: Path) -> None:
    """A field that came later has its default; one that nobody knows is still an error."""
    old = b'"event":"VersionStaged","actor":"a","version":1,"size_bytes":2,"nnz":3,"stage_s":0.5}'
    assert decode_line(b'{"at_ms":1,' + old) == StampedEvent(1, VersionStaged("a", 1, 2, 3, 0.5))
    with pytest.raises(FormatError, match="colour"):
        decode_line(b'{"at_ms":1,"colour":"red",' + old)
    with pytest.raises(FormatError, match="fields: nnz"):
        decode_line(b'{"at_ms":1,' + old.replace(b'"nnz":3,', b""))


def test_a_missing_file_has_no_events(tmp_path: Path) -> None:
    """A process that has not reported yet is no error."""
    assert read_events(tmp_path / "none.jsonl") == []
