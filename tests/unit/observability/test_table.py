"""What people see while it runs."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from deltastore.observability import table
from deltastore.observability.view import RunView

if TYPE_CHECKING:
    from deltastore.observability.view import ActorLive


def _text(renderable: object, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_live_view_says_everything_that_matters(view: RunView, live: list[ActorLive]) -> None:
    """Versions, actors, the late joiner's source and bytes, the kill and the failure all show."""
    text = _text(table.live_view(view, live, "step 2 of 2"))
    for wanted in (
        "step 2 of 2",
        "160x",
        "1.00 %",
        "1.25 kB",
        "0.25 s",
        "50.0 ms",
        "6.0 ms",
        "empty",
        "v2 from anchor 0 and 2 deltas, 269 MB, 3.00 s",
        "gone",
        "a2 was killed (SIGKILL)",
        "rolled_back",
    ):
        assert wanted in text


def test_the_tables_fit_a_narrow_terminal(view: RunView, live: list[ActorLive]) -> None:
    """On 80 columns no figure of the versions table is cut."""
    text = _text(table.versions_table(view), width=80)
    assert "…" not in text
    assert "160x" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_version_fits_one_plain_line(view: RunView, live: list[ActorLive]) -> None:
    """Without a terminal each version is one line with the same figures."""
    line = table.version_line(view, view.published()[0])
    assert line == (
        "v1  step 1  accuracy 0.25  density 1.00 %  delta 1.25 kB  ratio 160x  "
        "encode 0.25 s  upload 50.0 ms  stage 50.0 ms  activate 6.0 ms"
    )
    assert "a1@east active v1 stale 1 52 tok/s share 2" in table.actors_line(view, live)


def test_nothing_yet_is_still_a_view() -> None:
    """Before the first event there are tables without rows, not an error."""
    text = _text(table.live_view(RunView(), [], "starting"))
    assert "starting" in text
    assert table.join_note(RunView(), "a1") == table.NOTHING


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0 B"), (999, "999 B"), (1_240_000, "1.24 MB"), (2.69e8, "269 MB")],
)
def test_sizes_are_readable(value: float | None, text: str) -> None:
    """Bytes are written with three figures and a decimal unit."""
    assert table.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0 us"),
        (58e-6, "58 us"),
        (0.0123, "12.3 ms"),
        (0.5, "0.50 s"),
        (75, "75 s"),
    ],
)
def test_times_are_readable(value: float | None, text: str) -> None:
    """Seconds are written in the unit that needs no exponent."""
    assert table.seconds(value) == text
