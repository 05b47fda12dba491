"""A cast done twice in two ways makes changes nobody made: how floats are narrowed is fixed here.

A trainer with FP32 masters serves BF16 or FP16: `narrow` rounds as `torch.Tensor.to` does, to
nearest, ties to even. What torch makes of a NaN depends on its version and on whether the element
falls into a vector or the rest of one, so NaNs are narrowed here: sign and the top of the payload
stay. An actor that computes in FP32 holds exact widenings: `widen` and `narrow_exact` are inverses
on all 65,536 patterns, NaN payloads included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deltastore.format.dtypes import DType


@dataclass(frozen=True, slots=True)
class _Half:
    """A 16-bit float and how its NaNs sit in an FP32 pattern."""

    torch_dtype: torch.dtype
    mantissa_shift: int
    infinity: int
    quiet: int


_HALVES = {
    DType.BF16: _Half(torch.bfloat16, 16, 0x7F80, 0x0040),
    DType.F16: _Half(torch.float16, 13, 0x7C00, 0x0200),
}


def is_narrowing(source: DType, target: DType) -> bool:
    """Whether `target` is a half of `source`: the only cast there is."""
    return source is DType.F32 and target in _HALVES


def narrow(wide: torch.Tensor, target: DType) -> torch.Tensor:
    """The patterns (int16) of FP32 patterns (int32) rounded to BF16 or FP16."""
    half = _HALVES[target]
    values = wide.view(torch.float32)
    patterns = values.to(half.torch_dtype).view(torch.int16)
    if wide.numel() and bool(values.amax().isnan()):  # one pass: amax passes any NaN on
        nan = values.isnan()
        bits = wide[nan]
        sign = (bits >> 16) & 0x8000
        payload = (bits >> half.mantissa_shift) & (half.infinity ^ 0x7FFF)
        payload = torch.where(payload == 0, half.quiet, payload)  # else it would be an infinity
        patterns[nan] = (sign | half.infinity | payload).to(torch.int16)
    return patterns


def widen(patterns: torch.Tensor, source: DType) -> torch.Tensor:
    """The FP32 patterns (int32) of BF16 or FP16 patterns (int16), exactly."""
    if source is DType.BF16:
        return patterns.to(torch.int32) << 16
    wide = patterns.view(torch.float16).to(torch.float32).view(torch.int32)
    nan = (patterns & 0x7FFF) > 0x7C00
    if bool(nan.any()):  # hardware would make signalling NaNs quiet
        bits = patterns[nan].to(torch.int32)
        wide[nan] = ((bits & 0x8000) << 16) | 0x7F800000 | ((bits & 0x3FF) << 13)
    return wide


def narrow_exact(wide: torch.Tensor, target: DType) -> torch.Tensor | None:
    """The patterns (int16) of which `wide` are the exact widenings; None if any is none.

    `wide` is one-dimensional and contiguous. This runs over every weight when an actor proves what
    it holds, so BF16 is taken apart without any arithmetic (little-endian halves).
    """
    if target is DType.BF16:
        halves = wide.view(torch.int16).view(-1, 2)
        exact = int(torch.count_nonzero(halves[:, 0])) == 0
        return halves[:, 1].contiguous() if exact else None
    patterns = narrow(wide, target)
    return patterns if torch.equal(widen(patterns, target), wide) else None
