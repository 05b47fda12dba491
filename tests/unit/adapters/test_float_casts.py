"""Halves and their exact widenings, over all 65,536 patterns, against torch and by definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltastore.adapters.float_casts import is_narrowing, narrow, narrow_exact, widen
from deltastore.format.dtypes import DType

HALVES = pytest.mark.parametrize(
    ("dtype", "torch_dtype"),
    [(DType.BF16, torch.bfloat16), (DType.F16, torch.float16)],
    ids=["BF16", "F16"],
)
ALL = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)


def nan_of(patterns: torch.Tensor, torch_dtype: torch.dtype) -> torch.Tensor:
    """Which patterns are NaNs."""
    return patterns.view(torch_dtype).isnan()


@HALVES
def test_widening_is_exact_on_all_patterns(dtype: DType, torch_dtype: torch.dtype) -> None:
    """CASE R4: every pattern widens to the same value, NaNs with sign and payload, and back."""
    wide = widen(ALL, dtype)
    nan = nan_of(ALL, torch_dtype)
    expected = ALL.view(torch_dtype).to(torch.float32).view(torch.int32)
    assert torch.equal(wide[~nan], expected[~nan])
    assert bool(wide.view(torch.float32)[nan].isnan().all())
    assert wide.unique().numel() == 1 << 16
    back = narrow_exact(wide, dtype)
    assert back is not None
    assert torch.equal(back, ALL)


@HALVES
def test_narrowing_rounds_as_torch_on_all_halves_and_ties(
    dtype: DType, torch_dtype: torch.dtype
) -> None:
    """CASE N13: each half, the tie above it, and one step to both sides round as torch rounds."""
    bits = widen(ALL, dtype)
    half = 1 << (15 if dtype is DType.BF16 else 12)
    steps = torch.tensor([0, 1, half - 1, half, half + 1, 2 * half - 1], dtype=torch.int32)
    wide = (bits[:, None] + steps).reshape(-1)
    wide = wide[~wide.view(torch.float32).isnan()]
    expected = wide.view(torch.float32).to(torch_dtype).view(torch.int16)
    assert wide.numel() > 300_000
    assert torch.equal(narrow(wide, dtype), expected)


def test_ties_go_to_even() -> None:
    """CASE N13: the rule itself, by hand: 1 + ulp/2 goes down, 1 + 3 ulp/2 goes up."""
    wide = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF], dtype=torch.int32)
    assert narrow(wide, DType.BF16).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80]


@HALVES
def test_narrowed_nans_do_not_depend_on_place(dtype: DType, torch_dtype: torch.dtype) -> None:
    """CASE R4: a NaN narrows to one pattern wherever it stands, so unchanged it is no change."""
    rng = np.random.default_rng(3)
    payloads = rng.integers(1, 1 << 23, 1000, np.uint32)
    signs = rng.integers(0, 2, 1000, np.uint32) << 31
    wide = torch.from_numpy((signs | 0x7F800000 | payloads).view(np.int32))
    together = narrow(wide, dtype)
    alone = torch.cat([narrow(one, dtype) for one in wide.split(1)])
    assert torch.equal(together, alone)
    assert bool(nan_of(together, torch_dtype).all())
    assert torch.equal(together < 0, wide < 0)


@pytest.mark.parametrize("count", [1, 7, 16, 33])
def test_one_nan_is_found_at_any_place(count: int) -> None:
    """CASE R5: a real NaN among numbers and infinities travels, from every position."""
    for place in range(count):
        values = torch.full((count,), float("inf"))
        wide = values.view(torch.int32)
        wide[place] = 0x7F800001
        patterns = narrow(wide, DType.BF16)
        expected = [0x7F80] * count
        expected[place] = 0x7FC0
        assert patterns.tolist() == expected


@HALVES
@pytest.mark.parametrize("low_bit", [1, 1 << 11], ids=["lowest bit", "upper bit"])
def test_inexact_values_are_not_narrowed(
    dtype: DType, torch_dtype: torch.dtype, low_bit: int
) -> None:
    """A value between two halves is never taken for one of them, NaNs included."""
    assert torch_dtype.itemsize == 2
    for pattern in (0x3C00, 0x0001, 0x8000 - 0x10000, 0x7FC1):
        wide = widen(torch.tensor([pattern], dtype=torch.int16), dtype)
        assert narrow_exact(wide | low_bit, dtype) is None


def test_only_halves_of_fp32_are_narrowed() -> None:
    """CASE R10: no other pair of dtypes is ever cast."""
    pairs = [(a, b) for a in DType for b in DType if is_narrowing(a, b)]
    assert pairs == [(DType.F32, DType.F16), (DType.F32, DType.BF16)]
