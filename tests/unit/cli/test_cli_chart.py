"""Bars say which version was large, in any number of them and in any terminal."""

from __future__ import annotations

import pytest

from deltastore.cli.chart import BLOCKS, MAX_BARS, PLAIN, sparkline


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([0, 0], BLOCKS[0] * 2),
        ([1], BLOCKS[-1]),
        ([0, 4, 8], BLOCKS[0] + BLOCKS[4] + BLOCKS[-1]),
    ],
)
def test_bars(values: list[float], expected: str) -> None:
    """Bars begin at 0 and end at the largest value."""
    assert sparkline(values) == expected


def test_many_values_keep_their_peak() -> None:
    """More values than bars are grouped, and the largest of a group is what shows."""
    values = [1.0] * 1000
    values[500] = 8.0
    bars = sparkline(values)
    assert len(bars) <= MAX_BARS
    assert bars.count(BLOCKS[-1]) == 1


def test_plain_terminals() -> None:
    """A terminal without block elements gets characters that it has."""
    assert sparkline([1, 2], encoding="ascii") == PLAIN[4] + PLAIN[-1]
