"""`deltastore doctor` says beforehand what an engine would say when it is too late."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from deltastore.cli.app import app
from tests.vllm.kit import tiny_qwen3
from tests.vllm.runs import TinyRun

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.vllm
SMALL = {"dtype": "bfloat16", "max_model_len": 128, "block_size": 32}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    """The run of a tiny model."""
    folder = tmp_path_factory.mktemp("doctor")
    made = TinyRun(folder, tiny_qwen3(folder / "model", tied=True))
    yield made
    made.close()


def doctor(run: TinyRun, model: Any, *words: str) -> Any:
    """The command, in this process."""
    section = run.settings()
    del section["run"]
    line = ["doctor", "--run", run.url, "--model", str(model), "--engine", json.dumps(SMALL)]
    return CliRunner().invoke(app, [*line, "--settings", json.dumps(section), *words])


def test_a_model_that_can_follow(run: TinyRun) -> None:
    """Nothing newer than the folder: covered wholly, and the pause of a made-up 1 % is measured."""
    result = doctor(run, run.checkpoint, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["ok"], found["version"], found["head"]) == (True, 0, 0)
    assert found["coverage"]["placed"] == found["tensors"]
    assert (found["dense_share"], found["shadow_bytes"]) == (0, 0)
    assert found["scratch_bytes"] > 0
    assert found["installed"].startswith(tuple(found["supported"]))
    pause = found["pause"]
    assert pause["source"] == "synthetic"
    assert pause["density"] == pytest.approx(0.01, rel=0.1)
    assert pause["nnz"] == pytest.approx(0.01 * found["elements"], rel=0.1)
    assert 0 < pause["seconds"] < 60


def test_the_pause_of_the_runs_own_versions(run: TinyRun) -> None:
    """What the run has beyond the folder is activated and timed; people get a table."""
    run.publish()
    result = doctor(run, run.checkpoint)
    assert result.exit_code == 0, result.output
    assert "versions 0 to 1 of the run" in result.stdout
    assert "this engine follows the run" in result.stdout


def test_a_model_that_cannot_follow(run: TinyRun) -> None:
    """A folder that the run is not of: refused, with what is wrong and an exit code."""
    other = tiny_qwen3(run.folder / "other", tied=False)
    result = doctor(run, other, "--json", "--no-pause")
    assert result.exit_code == 2, result.output
    error = json.loads(result.stdout)["error"]
    assert error["kind"] == "alias_drift"
    assert "lm_head.weight" in error["message"]
    assert error["hint"]
