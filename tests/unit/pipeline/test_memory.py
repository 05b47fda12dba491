"""Memory is what the formulas say, measured from outside on processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from deltastore.format.box import MAX_BOX_ELEMENTS
from tests.unit.pipeline.memory_probe import SETTINGS

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
ALLOWANCE_BYTES = 64 * MIB
"""For what the allocator, the stacks of threads and the client take beside the formula."""


def _measure(what: str, size: int, folder: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.pipeline.memory_probe", what, str(size), str(folder)],
        cwd=ROOT,
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout), done.stderr


def test_publishing_four_gigabytes(tmp_path):
    """A version of a 4 GB state needs what publisher.py's formula says: no share of the state."""
    grown_bytes, printed = _measure("publish", 4, tmp_path)
    nnz = int(printed.splitlines()[-1])
    promoted = nnz * 2 * 2  # pages of the zero baseline that become memory of its own
    limit = (
        nnz * (4 + 2)
        + 2 * SETTINGS.diff_threads * MAX_BOX_ELEMENTS * (4 + 2)
        + SETTINGS.encode_threads * 4 * SETTINGS.segment_max_bytes
        + SETTINGS.spool_max_bytes
        + promoted
        + ALLOWANCE_BYTES
    )
    assert grown_bytes < limit
    assert limit < 4 << 30 >> 2  # the bound itself says something


def test_one_changed_element_costs_one_element(tmp_path):
    """CASE R15: staging and activating one change in 256 MiB makes no temporary of its shape."""
    grown_bytes, _printed = _measure("activate_one", 128 << 20, tmp_path)
    assert grown_bytes < 24 * MIB


def test_two_hundred_rounds_leave_nothing(tmp_path):
    """CASE R17: 200 rounds of publish and activate: resident memory is flat."""
    grown_bytes, _printed = _measure("many_rounds", 200, tmp_path)
    assert grown_bytes < 6 * MIB
