"""Arrows point down only: the import contracts of pyproject.toml hold."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_import_contracts_hold() -> None:
    """Every contract that `lint-imports` reads from pyproject.toml is kept."""
    program = shutil.which("lint-imports", path=sysconfig.get_path("scripts"))
    assert program is not None
    done = subprocess.run(
        [program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
