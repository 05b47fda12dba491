"""The page a run leaves behind."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from deltastore.observability.report import Check, Page, render
from deltastore.observability.svg import Chart, Series, draw
from deltastore.observability.view import RunView

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = Page(
    "demo <run>",
    [("wall time", "3 min"), ("peak memory", "8.1 GB")],
    [Check("same fingerprint", True, "3 actors"), Check("verify", False, "1 finding & more")],
)
VOID = {"meta", "br", "hr", "img", "link", "circle", "path", "line"}


class _Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        names = {"src", "href", "xlink:href"}
        self.loads += [f"{tag} {value}" for name, value in attrs if name in names]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(view: RunView) -> None:
    """Every element is closed, and nothing is fetched from anywhere, script or style included."""
    text = render(view, PAGE)
    parser = _Balanced()
    parser.feed(text)
    assert parser.open == []
    assert parser.loads == []
    assert "<script" not in text
    assert "@import" not in text
    assert "url(" not in text


def test_the_page_shows_plots_joins_and_checks(view: RunView) -> None:
    """Five plots with points, the late joiner's bytes, and each check with its verdict."""
    text = render(view, PAGE)
    assert text.count("<svg") == 5
    assert text.count("<circle") > 15
    assert "no values" not in text
    assert "anchor 0 and 2 deltas" in text
    assert "269 MB" in text
    assert '<li class="yes"><b>same fingerprint</b>' in text
    assert '<li class="no"><b>verify</b>' in text


def test_names_cannot_inject_markup(view: RunView) -> None:
    """Text from a run (names, messages) is escaped."""
    text = render(view, PAGE)
    assert "demo &lt;run&gt;" in text
    assert "fingerprint &lt;differs&gt;" in text
    assert "<differs>" not in text


def test_an_empty_run_has_a_page_too() -> None:
    """A run that failed before its first event still gets its page with the checks."""
    text = render(RunView(), PAGE)
    assert text.count("no values") == 5
    assert "1 finding &amp; more" in text


@pytest.mark.parametrize(
    "points",
    [
        [(0.0, 5.0)],
        [(0.0, 0.0), (1.0, 0.0)],
        [(0.0, 1e-9), (1.0, 1e12)],
        [(0.0, None), (1.0, math.nan), (2.0, math.inf), (3.0, 2.0)],
        [(0.0, -3.0), (1.0, 4.0)],
    ],
)
@pytest.mark.parametrize("logarithmic", [False, True])
def test_no_values_break_a_chart(
    points: Sequence[tuple[float, float | None]], logarithmic: bool
) -> None:
    """One point, zeros, gaps, NaN and huge ranges give well-formed SVG inside the paper."""
    text = draw(Chart("t", "x", [Series("s", points)], logarithmic=logarithmic))
    ElementTree.fromstring(text)
    for left, top in re.findall(r'cx="([-\d.]+)" cy="([-\d.]+)"', text):
        assert 0 <= float(left) <= 560
        assert 0 <= float(top) <= 260


def test_counts_have_no_ticks_in_between() -> None:
    """A chart of whole numbers has whole ticks."""
    text = draw(Chart("t", "x", [Series("s", [(0, 0), (5, 2)])], whole=True))
    labels = re.findall(r'text-anchor="end">([^<]+)<', text)
    assert labels == ["0", "1", "2"]
