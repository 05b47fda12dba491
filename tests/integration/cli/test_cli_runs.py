"""Runs by hand, on files and on a real S3 server: init, publish, log, show, replay, verify."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.integration.cli.cli_kit import Cli, documented, other_files, tensors

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.testing.servers import SeaweedServer


def test_replay_is_bit_exact(
    shared: Cli, old: Path, new: Path, newer: Path, tmp_path: Path
) -> None:
    """Every version comes back bit for bit in every dtype, NaN payloads and -0 included, with the
    files that are not weights."""
    for version, source in ((0, old), (1, new), (2, newer)):
        out = tmp_path / f"v{version}"
        shared.json("replay", shared.url("r1"), "--version", str(version), "--out", out)
        assert tensors(out) == tensors(source)
        assert other_files(out) == other_files(old)
    assert tensors(old) != tensors(new) != tensors(newer)


def test_replay_takes_head(shared: Cli, newer: Path, tmp_path: Path) -> None:
    """Without --version the newest version is rebuilt, and the document says from what."""
    document = shared.json("replay", shared.url("r1"), "--out", tmp_path / "c")
    assert tensors(tmp_path / "c") == tensors(newer)
    assert list(document) == documented("replay")
    assert (document["version"]["version"], document["links"]) == (2, 2)
    assert document["read_bytes"] > 0


def test_log_and_show_say_the_same(shared: Cli) -> None:
    """`log` lists every version with stable keys, `show` adds its objects; hashes link."""
    log = shared.json("log", shared.url("r1"))
    assert list(log) == documented("log")
    assert [v["version"] for v in log["versions"]] == [0, 1, 2]
    assert [v["kind"] for v in log["versions"]] == ["full", "delta", "delta"]
    assert [(v["step_first"], v["step_last"]) for v in log["versions"]] == [
        (0, 0),
        (1, 10),
        (11, 20),
    ]
    for before, version in zip(log["versions"], log["versions"][1:], strict=False):
        assert version["base_policy_hash"] == before["policy_hash"]
        assert version["fingerprint_before"] == before["fingerprint_after"]
        assert 0 < version["density"] < 0.05
    for version in log["versions"]:
        shown = shared.json("show", shared.url("r1"), "--version", str(version["version"]))
        assert list(version) == documented("A version")
        assert shown["version"] == version
        assert list(shown) == documented("show")
        assert all(list(segment) == documented("A segment") for segment in shown["segments"])
        assert all(list(file) == documented("A file") for file in shown["files"])
        sizes = [item["size_bytes"] for item in (*shown["segments"], *shown["files"])]
        assert sum(sizes) == version["size_bytes"]
    assert shared.json("show", shared.url("r1"))["version"]["version"] == 2


def test_log_limit(shared: Cli) -> None:
    """--limit shows the newest versions only."""
    log = shared.json("log", shared.url("r1"), "--limit", "2")
    assert [v["version"] for v in log["versions"]] == [1, 2]


@pytest.mark.parametrize("flags", [[], ["--deep"]], ids=["shallow", "deep"])
def test_verify_whole_run(shared: Cli, flags: list[str]) -> None:
    """A run that nobody touched has no findings, and a deep check replays every version."""
    document = shared.json("verify", shared.url("r1"), *flags)
    assert list(document) == documented("verify")
    assert (document["ok"], document["findings"], document["head"]) == (True, [], 2)
    assert (document["versions"], document["replayed"]) == (3, 3 if flags else 0)
    assert document["objects"] >= 8
    plain = shared.run("verify", shared.url("r1"), *flags)
    assert plain.exit_code == 0
    assert plain.stdout.startswith("whole: HEAD 2, 3 versions")


def test_tables_are_for_people(
    files: Cli, old: Path, new: Path, newer: Path, tmp_path: Path
) -> None:
    """Without --json every command prints something readable and nothing on stderr."""
    url = files.url("r1")
    for words, expected in (
        (["init", url, "--checkpoint", str(old)], "made run r1 at "),
        (["publish", url, str(new), "--step", "1"], "published version 1 of r1"),
        (["publish", url, str(newer), "--step", "2"], "published version 2 of r1"),
        (["log", url], "policy hash"),
        (["show", url], "fingerprint"),
        (["replay", url, "--out", str(tmp_path / "c")], "proved by fingerprint"),
    ):
        result = files.run(*words)
        assert (result.exit_code, result.stderr) == (0, "")
        assert expected in result.stdout
    hashes = [v["policy_hash"][:12] for v in files.json("log", url)["versions"]]
    table = files.run("log", url).stdout
    assert all(digest in table for digest in hashes)


def test_publish_what_is_there_and_what_was(cli: Cli, old: Path, new: Path, tmp_path: Path) -> None:
    """CASES R12, R3: an unchanged checkpoint is a valid, empty version; an older one published
    again is the next version, never an old number."""
    url = cli.url("r1")
    assert list(cli.json("init", url, "--checkpoint", old)) == documented("init")
    assert list(cli.json("publish", url, new, "--step", "1")) == documented("publish")
    empty = cli.json("publish", url, new, "--step", "2")["version"]
    assert (empty["version"], empty["nnz"], empty["size_bytes"]) == (2, 0, 0)
    assert cli.json("publish", url, old, "--step", "3")["version"]["version"] == 3
    assert cli.json("verify", url, "--deep")["replayed"] == 4
    cli.json("replay", url, "--out", tmp_path / "c")
    assert tensors(tmp_path / "c") == tensors(old)


def test_real_process(files: Cli, old: Path, new: Path, tmp_path: Path) -> None:
    """The installed entry point does it all as separate processes, one JSON document each."""
    url = files.url("r1")
    for words in (
        ["init", url, "--checkpoint", str(old)],
        ["publish", url, str(new), "--step", "1"],
        ["verify", url, "--deep"],
        ["replay", url, "--version", "1", "--out", str(tmp_path / "c")],
    ):
        done = _process([*words, "--json"])
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert isinstance(json.loads(done.stdout), dict)
    assert tensors(tmp_path / "c") == tensors(new)
    again = _process(["init", url, "--checkpoint", str(old)])
    assert (again.returncode, again.stdout) == (4, "")
    assert "Traceback" not in again.stderr


def test_aws_environment(
    bucket: Cli, s3_server: SeaweedServer, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without key options the keys come from the usual AWS environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    plain = Cli(bucket.root_url, ("--endpoint-url", s3_server.endpoint))
    assert plain.json("init", plain.url("r2"), "--checkpoint", old)["version"]["version"] == 0


def _process(words: list[str]) -> subprocess.CompletedProcess[str]:
    start = "from deltastore.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", start, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=dict(os.environ),
    )
