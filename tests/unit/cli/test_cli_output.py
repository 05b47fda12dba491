"""What people and scripts read: sizes, shares, stamps, and text that cannot steer a terminal."""

from __future__ import annotations

import pytest

from deltastore.cli.output import one_line, share_text, size_text, stamp_text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (202_345_678, "202 MB"),
        (15_600_000_000, "15.6 GB"),
        (999_600_000, "1 GB"),
        (5 * 10**18, "5e+03 PB"),
    ],
)
def test_size_text(size_bytes: int, text: str) -> None:
    """Sizes are decimal, with three digits."""
    assert size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 0, "-"), (0, 10, "0 %"), (96, 10_000, "0.96 %"), (1, 10**8, "1e-06 %"), (3, 3, "100 %")],
)
def test_share_text(part: int, whole: int, text: str) -> None:
    """A share that is not zero is never shown as zero, and nothing divides by zero."""
    assert share_text(part, whole) == text


def test_stamp_text() -> None:
    """Stamps are UTC, whatever the machine's zone."""
    assert stamp_text(1_700_000_000_123) == "2023-11-14 22:13:20Z"


def test_one_line() -> None:
    """Text from a bucket becomes one line in which no control character is left."""
    assert one_line("a\n  b\x1b[31mc\u202e") == "a b\\x1b[31mc\\x202e"
