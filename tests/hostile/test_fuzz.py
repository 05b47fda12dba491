"""The reader under a fuzzer: briefly in every run, for more than ten minutes in the slow one."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.hostile import fuzz_segments

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 125
PARTS = 5


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_fuzzed_reader_never_crashes_hangs_or_strays(
    part: int, tmp_path_factory: pytest.TempPathFactory
):
    """Ten minutes of damaged segments on bounds-checked kernels: refused, or read as the second
    reader reads them."""
    cache = tmp_path_factory.getbasetemp() / "bounds-checked"
    assert fuzz(part, SECONDS, cache) == 0


def fuzz(seed: int, seconds: float, cache: Path) -> int:
    """Exit status of the fuzzer in a process of its own."""
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.hostile.fuzz_segments", str(seed), str(seconds)]
    return subprocess.run(command, check=False, env=environment, timeout=280).returncode


def test_the_corpus_holds():
    """Golden segments are read, damaged ones are refused in the words they were kept for, and
    every input that once broke the reader is taken as it should be."""
    kept = 0
    for seed in SEEDS:
        assert fuzz_segments.try_one(seed, seed.data) is None, seed.name
        if seed.taken is not None:
            assert fuzz_segments.taken(seed, seed.data) == seed.taken, seed.name
            kept += 1
    assert kept >= 20


@pytest.mark.parametrize("number", range(300))
def test_damaged_segments_are_taken_alike(number: int):
    """A few hundred fixed inputs of the fuzzer, in every run."""
    chance = fuzz_segments.random.Random(number)
    seed = chance.choice(SEEDS)
    assert fuzz_segments.try_one(seed, fuzz_segments.mutate(chance, seed.data)) is None


SEEDS = fuzz_segments.load_seeds()
