"""A column of forty numbers hides the one that doubled: a line of bars shows it.

Bars for a terminal; plain characters where its encoding has no block elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN = "_.-:=+*#"
MAX_BARS = 64


def sparkline(values: Sequence[float], *, encoding: str = "utf-8") -> str:
    """The values as bars from 0 to the largest; of more than MAX_BARS the largest of each group."""
    bars = BLOCKS if encoding.lower().replace("-", "").startswith("utf") else PLAIN
    if not values:
        return ""
    size = -(-len(values) // MAX_BARS)
    tops = [max(values[i : i + size]) for i in range(0, len(values), size)]
    largest = max(tops)
    if largest <= 0:
        return bars[0] * len(tops)
    return "".join(bars[min(len(bars) - 1, int(top / largest * len(bars)))] for top in tops)
