"""tokens/s rises with the share when decoding is memory-bound: a split by it chases its own tail.

A lease of n tokens takes t = a + b n: `a` is what every lease pays (prompt, transfer, the steps of
the longest answer), `b` what a token adds. An actor given more then measures faster, is given
more again, and reaches its fair share only after many steps, with every noise amplified by t / bn.
The line does not change with the share: planned from it, shares are right once it is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_POINTS = 6
MAX_TOKENS = 1e12  # above these two no lease ever was; their squares must stay numbers
MAX_S = 1e9
MIN_SPREAD = 1.25  # largest over smallest n: below this the slope is noise
MIN_SLOPE_OVER_ERROR = 4.0  # a line through noise splits worse than the plain average


@dataclass(frozen=True, slots=True)
class TimeFit:
    """t = overhead_s + s_per_token * n."""

    overhead_s: float
    s_per_token: float

    def time_s(self, tokens: float) -> float:
        """The expected time of a lease of `tokens`."""
        return self.overhead_s + self.s_per_token * tokens


def fit_time(points: Sequence[tuple[float, float]]) -> TimeFit | None:
    """The least-squares line through (tokens, elapsed_s), or None where they do not tell one.

    None: too few points, too little spread, or a slope that is not positive beyond its noise.
    """
    usable = [(n, t) for n, t in points if 1 <= n <= MAX_TOKENS and 0 < t <= MAX_S]
    if len(usable) < MIN_POINTS:
        return None
    sizes = [n for n, _ in usable]
    if max(sizes) < MIN_SPREAD * min(sizes):
        return None
    mean_n = math.fsum(sizes) / len(usable)
    mean_t = math.fsum(t for _, t in usable) / len(usable)
    spread = math.fsum((n - mean_n) ** 2 for n in sizes)
    slope = math.fsum((n - mean_n) * (t - mean_t) for n, t in usable) / spread
    if not math.isfinite(slope) or slope <= 0:
        return None
    overhead_s = mean_t - slope * mean_n
    residual = math.fsum((t - overhead_s - slope * n) ** 2 for n, t in usable)
    error = math.sqrt(residual / (len(usable) - 2) / spread)
    if slope < MIN_SLOPE_OVER_ERROR * error:
        return None
    if overhead_s < 0:  # superlinear inside the noise: a line through the origin
        return TimeFit(0.0, mean_t / mean_n)
    return TimeFit(overhead_s, slope)
