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


STRAY = """
import numpy as np
from deltastore.format import kernels_base as base

def tried(call, *args):
    try:
        call(*args)
    except IndexError:
        return "refused"
    return "done"

@base.kernel
def load(array, at):
    return base.load_u64(array, at)

@base.kernel
def store(array, at):
    base.store_u64(array, at, np.uint64(7))

@base.kernel
def ones(array, at):
    base.put_ones(array, at, np.uint64(5))

@base.kernel
def changed(array, at):
    return base.changed_mask(array, array, at)

@base.kernel
def signs(array, at):
    return base.falling_mask(array, at) | base.zero_mask(array, at) | base.beyond_mask(array, at)

for kernel, dtype, count in (
    (load, "u1", 8), (store, "u1", 8), (ones, "u2", 64), (changed, "u4", 64), (signs, "u8", 64),
):
    whole = np.zeros(400, dtype)
    array = whole[100:200]
    for at in (0, 100 - count, 101 - count, -1, 1 << 40):
        print(kernel.__name__, tried(kernel, array, at))
    whole[100:200] = 0
    assert not whole.any(), kernel.__name__
"""


def test_nothing_of_the_fuzzed_kernels_goes_unchecked(tmp_path: Path):
    """What a kernel loads or stores 8 or 64 elements at a time is bounds-checked as single ones
    are: at the edges it works, one element beyond them it is an error and touches nothing."""
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    script = tmp_path / "stray.py"
    script.write_text(STRAY)
    done = subprocess.run(
        [sys.executable, str(script)],
        check=True,
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    taken = ["done", "done", "refused", "refused", "refused"]
    kernels = ("load", "store", "ones", "changed", "signs")
    assert done.stdout.splitlines() == [f"{name} {how}" for name in kernels for how in taken]


SEEDS = fuzz_segments.load_seeds()
