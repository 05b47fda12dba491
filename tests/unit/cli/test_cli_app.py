"""The command before any command runs: help, version, usage errors, completion, speed of start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from deltastore import __version__
from deltastore.cli import group
from deltastore.cli.app import app
from deltastore.cli.group import error_document
from deltastore.errors import ConflictError, Kind

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS = ["diff", "apply", "init", "publish", "log", "show", "replay", "probe", "verify"]
COMMANDS += ["maintain", "follow", "stage", "doctor", "keygen"]
START = "from deltastore.cli import main; main()"
ERROR_KEYS = ["kind", "class", "message", "run", "version", "key", "hint", "exit_code"]


def run_main(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The real entry point in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", START, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | env,
    )


def test_help_names_every_command() -> None:
    """Without a command the help is printed, and it names every command."""
    for words in ([], ["--help"], ["-h"]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0
        assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_has_help_and_json(command: str) -> None:
    """Every command explains itself and has --json."""
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_version() -> None:
    """--version prints the version and nothing else."""
    result = run_main("--version")
    assert (result.returncode, result.stdout, result.stderr) == (
        0,
        f"deltastore {__version__}\n",
        "",
    )


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["log"],
        ["log", "--nonsense", "file:///x/r"],
        ["diff", "a", "b"],
        ["publish", "file:///x/r", "b", "--step", "-1"],
        ["publish", "file:///x/r", "b", "--step", "one"],
        ["show", "file:///x/r", "--version", "-2"],
    ],
)
def test_usage_error(words: list[str]) -> None:
    """Words that cannot be understood exit with 2 and one line on stderr; --json says it too."""
    plain = CliRunner().invoke(app, words)
    assert (plain.exit_code, plain.stdout) == (2, "")
    assert plain.stderr.startswith("deltastore: usage: ")
    assert plain.stderr.count("\n") == 1
    as_json = CliRunner().invoke(app, [*words, "--json"])
    document = json.loads(as_json.stdout)["error"]
    assert as_json.exit_code == 2
    assert (document["kind"], document["exit_code"]) == ("usage", 2)
    assert list(document) == ERROR_KEYS


def test_error_document_keys() -> None:
    """An error's JSON document always has the same keys."""
    err = ConflictError("m", kind=Kind.RUN_EXISTS, run="r", version=3, key="k", hint="h")
    assert error_document(err, group.exit_code(err)) == {
        "kind": "run_exists",
        "class": "ConflictError",
        "message": "m",
        "run": "r",
        "version": 3,
        "key": "k",
        "hint": "h",
        "exit_code": 4,
    }


def test_error_is_one_line_and_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typed error is one line of kind, place and way out, whatever its message contains."""
    err = ConflictError("two\nlines\x1b", kind=Kind.HEAD_MOVED, run="r1", version=7, hint="again")
    _fail_with(monkeypatch, err)
    result = CliRunner().invoke(app, ["log", "file:///x/r1", "--json"])
    assert result.exit_code == 4
    assert result.stderr == ("deltastore: head_moved: two lines\\x1b [run=r1, version=7] (again)\n")
    assert json.loads(result.stdout) == {"error": error_document(err, group.exit_code(err))}


def test_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """--traceback lets the error through, for whoever looks for a bug."""
    err = ConflictError("no", kind=Kind.HEAD_MOVED)
    _fail_with(monkeypatch, err)
    result = CliRunner().invoke(app, ["--traceback", "log", "file:///x/r1"])
    assert result.exception is err


def test_unexpected_error_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody raised on purpose is a bug: it keeps its traceback and exits with 1."""
    bug = ZeroDivisionError("a bug")
    _fail_with(monkeypatch, bug)
    result = CliRunner().invoke(app, ["log", "file:///x/r1"])
    assert result.exception is bug
    assert result.exit_code == 1


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends a command with 130, without a traceback."""
    _fail_with(monkeypatch, KeyboardInterrupt())
    result = CliRunner().invoke(app, ["log", "file:///x/r1"])
    assert result.exit_code == 130


def test_completion_script() -> None:
    """The shell can be taught the commands."""
    result = run_main(_DELTASTORE_COMPLETE="source_bash")
    assert result.returncode == 0
    assert "_deltastore_completion" in result.stdout


def test_help_imports_nothing_heavy() -> None:
    """Help starts fast: neither numpy nor numba nor boto3 is imported for it."""
    code = (
        "import sys\n"
        "from deltastore.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "heavy = {'numpy', 'numba', 'boto3', 'torch', 'redis'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def _fail_with(monkeypatch: pytest.MonkeyPatch, err: BaseException) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise err

    monkeypatch.setattr("deltastore.cli.history.list_history", fail)


def test_doctor_without_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM is not installed it is said which versions would do, before anything is opened."""
    monkeypatch.setattr("deltastore.adapters.vllm.versions.DISTRIBUTIONS", ("no-such-engine",))
    line = ["doctor", "--run", "file:///nowhere/r1", "--model", str(tmp_path)]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 2
    assert result.stderr.startswith("deltastore: engine_version: vLLM is not installed")
    assert "0.32" in result.stderr


@pytest.mark.parametrize("words", [["--settings", "[]"], ["--engine", "{"]])
def test_doctor_takes_objects_only(tmp_path: Path, words: list[str]) -> None:
    """An option that is not a JSON object is named."""
    line = ["doctor", "--run", "file:///nowhere/r1", "--model", str(tmp_path), *words]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 2
    assert f"{words[0]} is not a JSON object" in result.stderr
