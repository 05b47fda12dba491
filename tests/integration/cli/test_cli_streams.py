"""Standard streams that are closed, full or no longer read: an exit code that says it, no trace."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from typing import IO

    from tests.integration.cli.cli_kit import Cli

WRITE = os.write
COMMAND = [sys.executable, "-c", "from deltastore.cli import main; main()"]


def run(*words: str | Path, stdout: int | IO[bytes], closing: str = "") -> tuple[int, str]:
    """Exit code and stderr of a real process; `closing` is what its shell does to its streams."""
    line = [*COMMAND, *map(str, words)]
    if closing:
        line = ["/bin/sh", "-c", f'exec "$@" {closing}', "sh", *line]
    done = subprocess.run(
        line, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("mode", [[], ["--json"]])
def test_full_stdout(files: Cli, old: Path, mode: list[str]) -> None:
    """A result that stdout does not take is a storage error of one line, also while flushing."""
    files.json("init", files.url("r1"), "--checkpoint", old)
    with Path("/dev/full").open("wb") as full:
        code, said = run("log", files.url("r1"), *mode, stdout=full)
    assert (code, said.count("\n")) == (5, 1), said
    assert said.startswith("deltastore: disk_full: ")


def test_nobody_reads_stdout(files: Cli, old: Path) -> None:
    """A reader that had enough ends the command silently with the code that shells give."""
    files.json("init", files.url("r1"), "--checkpoint", old)
    reader = subprocess.Popen(["/bin/true"], stdin=subprocess.PIPE)
    reader.wait(60)
    assert reader.stdin is not None
    with reader.stdin as pipe:
        assert run("log", files.url("r1"), stdout=pipe) == (141, "")


def test_closed_streams(files: Cli, old: Path, tmp_path: Path) -> None:
    """Without any standard stream a command does its work, and no file gets a stream's number."""
    url, out = files.url("r1"), tmp_path / "out"
    files.json("init", url, "--checkpoint", old)
    assert run("replay", url, "--out", out, stdout=subprocess.PIPE, closing="<&- >&- 2>&-") == (
        0,
        "",
    )
    assert (out / "config.json").read_bytes() == (old / "config.json").read_bytes()


def test_keys_on_a_full_disk(files: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that could not be written leave no half of the pair, and the next try is free."""

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        files.error(5, "disk_full", "keygen", tmp_path / "k")
    assert list(tmp_path.iterdir()) == []
    files.json("keygen", tmp_path / "k")


def test_a_checkpoint_where_nothing_may_be_written(files: Cli, old: Path) -> None:
    """A place that the system protects is an error of storage, as for every other output."""
    files.json("init", files.url("r1"), "--checkpoint", old)
    files.error(5, "unavailable", "replay", files.url("r1"), "--out", "/sys/deltastore-test")


def test_a_run_that_finds_no_room(files: Cli, old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills under `init` is called that, and with room the same `init` succeeds."""

    def write(descriptor: int, data: memoryview) -> int:
        if len(data) > 8 << 10:  # a shard, whose file is mapped
            raise OSError(errno.ENOSPC, "No space left on device")
        return WRITE(descriptor, data)

    url = files.url("r1")
    with monkeypatch.context() as patch:
        patch.setattr("os.write", write)
        files.error(5, "disk_full", "init", url, "--checkpoint", old)
    files.json("init", url, "--checkpoint", old)
    assert files.json("verify", url, "--deep")["findings"] == []
