"""A model that a run cannot be followed with is none that is damaged: it serves what it loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deltastore.adapters.vllm import holdings, reload
from deltastore.errors import ApplyError, IntegrityError, InvalidInputError, Kind
from tests.vllm.kit import close_engine, start_engine, tiny_qwen3, tiny_qwen3_moe
from tests.vllm.runs import TinyRun, digests, generate, initialise, statuses

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.vllm


def test_an_untied_model_is_refused_by_a_tied_run(tmp_path: Path) -> None:
    """CASE R22: an engine whose checkpoint is not the run's model says so, however often it is
    asked, is not in doubt, and serves on what it loaded."""
    run = TinyRun(tmp_path, tiny_qwen3(tmp_path / "tied", tied=True))
    engine = start_engine(tiny_qwen3(tmp_path / "untied", tied=False), **run.arguments())
    try:
        before = generate(engine), digests(engine)
        for _ in range(2):
            with pytest.raises(InvalidInputError, match="tied tensors") as caught:
                initialise(engine)
            assert caught.value.kind is Kind.ALIAS_DRIFT
            (status,) = statuses(engine)
            assert (status["poisoned"], status["active"]) == ("", None)
        assert (generate(engine), digests(engine)) == before
    finally:
        close_engine(engine)
        run.close()


def test_only_weights_that_were_changed_put_an_engine_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASE R8, R22: a reload that brings other bytes is refused, with all weights put back, and the
    engine serves on; after a trace that has changed weights it does not, until it is at a version
    that is proved."""
    checkpoint = tiny_qwen3_moe(tmp_path / "model")
    run = TinyRun(tmp_path, checkpoint)
    engine = start_engine(checkpoint, **run.arguments(allow_dense=True))

    def changes_weights(*_arguments: object) -> None:
        raise IntegrityError("a loader that writes", kind=Kind.DIGEST)

    try:
        before = generate(engine), digests(engine)
        with monkeypatch.context() as patch:
            patch.setattr(reload, "reload_tensors", lambda *_arguments: None)
            with pytest.raises(InvalidInputError, match="reloading what was loaded") as caught:
                initialise(engine)
        assert caught.value.kind is Kind.COVERAGE
        assert statuses(engine)[0]["poisoned"] == ""
        assert (generate(engine), digests(engine)) == before
        with monkeypatch.context() as patch:
            patch.setattr(holdings, "trace_engine", changes_weights)
            with pytest.raises(ApplyError, match="a loader that writes") as doubted:
                initialise(engine)
        assert doubted.value.kind is Kind.POISONED
        assert "a loader that writes" in statuses(engine)[0]["poisoned"]
        with pytest.raises(ApplyError, match="does not serve"):
            generate(engine)
        initialise(engine)
        assert statuses(engine)[0]["poisoned"] == ""
        assert (generate(engine), digests(engine)) == before
    finally:
        close_engine(engine)
        run.close()
