"""Progress is for whoever watches: on a terminal a bar, anywhere else nothing."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from deltastore.cli.progress import progress

if TYPE_CHECKING:
    import pytest


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal the bar says what is going on, on stderr."""
    terminal = _Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress("replay r1", total=10) as meter:
        meter.advance(4)
        meter.reached(10, 10)
    assert "replay r1" in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_nothing_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """When stderr is no terminal nothing is drawn, and the meter still takes note."""
    with progress("replay r1") as meter:
        meter.advance(4)
        meter.reached(4, 8)
    assert capsys.readouterr() == ("", "")
