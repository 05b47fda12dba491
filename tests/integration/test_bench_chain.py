"""The long chain's promises, on a shorter one: what `make bench-chain` measures must hold."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks import chain
from deltastore.testing.checkpoints import TinyShape

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_a_long_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASE C1, C9: 300 versions join within the bound, prove deep, and replay under retention."""
    monkeypatch.chdir(tmp_path)
    assert chain.main(300, TinyShape(vocab=64, hidden=16, intermediate=16, layers=1)) == 0
    document = json.loads((tmp_path / "build" / "bench" / "chain.json").read_text())
    judged = [row for row in document["rows"] if row["ok"] is not None]
    assert len(judged) >= 18
    assert all(row["ok"] for row in judged)
