"""Bad input, each with a clear message and an exit code, and nothing lost."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from deltastore.coordination.redis import RedisCoordination
from deltastore.errors import InvalidInputError, Kind
from deltastore.storage.store import PutMode
from deltastore.testing.checkpoints import TinyShape, tiny_checkpoint
from deltastore.testing.clock import FakeClock
from tests.integration.cli.cli_kit import Cli, documented, publish_three

if TYPE_CHECKING:
    from pathlib import Path

NEEDS_RUN = [
    ["log"],
    ["show"],
    ["verify"],
    ["replay", "--out", "OUT"],
    ["publish", "NEW", "--step", "1"],
]


def test_no_run(cli: Cli, new: Path, tmp_path: Path) -> None:
    """Every command that needs a run says that there is none, where, and how to make one."""
    for command, *words in NEEDS_RUN:
        places = {"OUT": tmp_path / "out", "NEW": new}
        error = cli.error(
            3, "run_missing", command, cli.url("absent"), *(places.get(w, w) for w in words)
        )
        assert cli.root_url in error["message"]
        assert (error["run"], "deltastore init" in error["hint"]) == ("absent", True)


def test_run_exists(cli: Cli, old: Path) -> None:
    """A run is made once: the second `init` is refused and changes nothing."""
    url = cli.url("r1")
    made = cli.json("init", url, "--checkpoint", old)
    cli.error(4, "run_exists", "init", url, "--checkpoint", old)
    assert cli.json("show", url)["version"] == made["version"]
    assert cli.json("verify", url, "--deep")["findings"] == []


def test_version_missing(files: Cli, old: Path, tmp_path: Path) -> None:
    """A version that does not exist is named, and where to find those that do."""
    url = files.url("r1")
    files.json("init", url, "--checkpoint", old)
    error = files.error(3, "version_missing", "show", url, "--version", "9")
    assert (error["version"], "deltastore log" in error["hint"]) == (9, True)
    files.error(3, "version_missing", "replay", url, "--version", "9", "--out", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_wrong_credentials(bucket: Cli, old: Path) -> None:
    """Refused keys are called that, and the secret is in no output."""
    secret = "the-wrong-secret-4711"
    wrong = replace(bucket, env={"TEST_ACCESS_KEY": "nobody", "TEST_SECRET_KEY": secret})
    cli_calls = (
        ["init", wrong.url("r1"), "--checkpoint", str(old)],
        ["log", wrong.url("r1")],
        ["verify", wrong.url("r1")],
    )
    for words in cli_calls:
        wrong.error(5, "credentials", *words)
        assert secret not in wrong.run(*words).output


def test_wrong_secret(bucket: Cli, old: Path) -> None:
    """A wrong secret for a known access key is refused as well, and not printed."""
    secret = "the-wrong-secret-4711"
    wrong = replace(bucket, env={**bucket.env, "TEST_SECRET_KEY": secret})
    wrong.error(5, "credentials", "init", wrong.url("r1"), "--checkpoint", old)
    assert secret not in wrong.run("init", wrong.url("r1"), "--checkpoint", old).output


def test_bucket_missing(bucket: Cli, old: Path) -> None:
    """A bucket that does not exist is not taken for one without runs."""
    nowhere = replace(bucket, root_url="s3://no-such-bucket-here/team")
    for words in (
        ["init", nowhere.url("r1"), "--checkpoint", str(old)],
        ["log", nowhere.url("r1")],
        ["verify", nowhere.url("r1"), "--deep"],
    ):
        error = nowhere.error(3, "bucket_missing", *words)
        assert "no-such-bucket-here" in error["message"]


def test_variable_missing(bucket: Cli) -> None:
    """A variable that is named but not set, and half a pair, are said before any request."""
    unset = replace(bucket, env={"TEST_ACCESS_KEY": "a", "TEST_SECRET_KEY": ""})
    assert "TEST_SECRET_KEY" in unset.error(2, "setting", "log", unset.url("r"))["message"]
    half = replace(bucket, options=("--access-key-env", "TEST_ACCESS_KEY"))
    half.error(2, "setting", "log", half.url("r"))


@pytest.mark.parametrize(
    "url",
    [
        "runs/r1",
        "memory://x/r1",
        "nonsense://x/r1",
        "file://r1",
        "s3://",
        "s3://bucket",
        "file:///",
    ],
)
def test_bad_url(url: str) -> None:
    """A URL that names no run in a store that lasts is refused before any request."""
    Cli("unused").error(2, "url", "log", url)


def test_password_in_url() -> None:
    """A password in a URL is refused and not repeated."""
    for url in (
        "s3://key:hunter2@bucket/r1",
        "s3://key:hunter2@bucket/r1?x=1",
        "ssh://a:hunter2@h/r",
    ):
        result = Cli("unused").run("log", url)
        assert result.exit_code == 2
        assert "hunter2" not in result.output


@pytest.mark.parametrize(
    ("change", "kind", "names"),
    [
        ({"extras": True}, "tensor_names", "model.router.bias"),
        ({"shape": TinyShape(layers=1)}, "tensor_names", "model.layers.1"),
        ({"shape": TinyShape(vocab=64)}, "tensor_shape", "model.embed_tokens.weight"),
    ],
)
def test_other_checkpoint(
    change: dict[str, object], kind: str, names: str, files: Cli, tmp_path: Path
) -> None:
    """CASE R9: a checkpoint with other names or shapes than the run is refused with the names, and
    the run stays as it was."""
    url = files.url("r1")
    files.json("init", url, "--checkpoint", tiny_checkpoint(tmp_path / "a"))
    other = tiny_checkpoint(tmp_path / "b", **change)  # type: ignore[arg-type]
    error = files.error(2, kind, "publish", url, other, "--step", "1")
    assert names in error["message"]
    assert files.json("log", url)["head"] == 0


def test_other_dtype(files: Cli, tmp_path: Path) -> None:
    """CASE R10: nothing is cast on the way: another dtype than the run's is refused."""
    from deltastore.format.dtypes import DType

    url = files.url("r1")
    files.json("init", url, "--checkpoint", tiny_checkpoint(tmp_path / "a"))
    wide = tiny_checkpoint(tmp_path / "b", dtype=DType.F32)
    error = files.error(2, "tensor_dtype", "publish", url, wide, "--step", "1")
    assert "F32" in error["message"]


def test_bad_checkpoint(files: Cli, tmp_path: Path) -> None:
    """A folder that is no checkpoint is refused by `init` and leaves no run behind."""
    (tmp_path / "empty").mkdir()
    cut = tiny_checkpoint(tmp_path / "cut")
    shard = cut / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])
    for folder in (tmp_path / "absent", tmp_path / "empty", cut):
        error = files.error(2, "checkpoint", "init", files.url("r1"), "--checkpoint", folder)
        assert str(folder) in error["message"]
    files.error(3, "run_missing", "log", files.url("r1"))


def test_out_exists(files: Cli, old: Path, tmp_path: Path) -> None:
    """`replay` does not touch a folder that is there."""
    url = files.url("r1")
    files.json("init", url, "--checkpoint", old)
    (tmp_path / "there").mkdir()
    files.error(4, "output_exists", "replay", url, "--out", tmp_path / "there")
    files.error(3, "file_missing", "replay", url, "--out", tmp_path / "no" / "c")
    assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.parametrize("length", [213, 214, 240, 255])
def test_an_output_of_a_long_name(files: Cli, old: Path, tmp_path: Path, length: int) -> None:
    """A folder's name may be as long as the file system allows, and `replay` still writes it."""
    url, out = files.url("r1"), tmp_path / ("x" * length)
    files.json("init", url, "--checkpoint", old)
    files.json("replay", url, "--out", out)
    assert (out / "config.json").read_bytes() == (old / "config.json").read_bytes()
    files.error(2, "name", "replay", url, "--out", tmp_path / ("x" * 256))


@pytest.mark.parametrize(
    "words",
    [
        ["replay", "file:///x/r", "--out", ""],
        ["replay", "file:///x/r", "--out="],
        ["stage", "file:///x/r", "--folder", ""],
        ["follow", "file:///x/r", "--out", "", "--once"],
        ["init", "file:///x/r", "--checkpoint", ""],
        ["maintain", "file:///x/r", "--trusted-keys", ""],
        ["diff", "", "b", "--out", "d"],
        ["apply", "a", "d", "--out", ""],
        ["keygen", ""],
        ["log", ""],
    ],
)
def test_empty_words(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty word, as an unset variable leaves, is refused: it does not mean this folder."""
    monkeypatch.chdir(tmp_path)
    error = Cli("unused").error(2, "setting", *words)
    assert "is empty" in error["message"]
    assert list(tmp_path.iterdir()) == []


def test_missing_link(cli: Cli, old: Path, new: Path, newer: Path, tmp_path: Path) -> None:
    """CASES R3, C3: with a manifest missing inside the chain nothing is replayed, nothing is
    published, and `verify` names it."""
    url = publish_three(cli, old, new, newer)
    gone = "r1/versions/0000000001.json"
    cli.store().delete([gone])
    result = cli.run("replay", url, "--out", tmp_path / "c")
    assert result.exit_code in {3, 6}, result.output
    assert not (tmp_path / "c").exists()
    cli.error(6, "broken_chain", "publish", url, old, "--step", "3")
    report = cli.json("verify", url, code=6)
    assert [(f["defect"], f["version"], f["key"]) for f in report["findings"]] == [
        ("hole", 1, gone),
        ("unreachable", 1, None),
    ]


def test_truncated_segment(cli: Cli, old: Path, new: Path, newer: Path, tmp_path: Path) -> None:
    """A segment that was cut stops replay before a checkpoint is written; `verify` names the object
    and the versions that are lost with it."""
    url = publish_three(cli, old, new, newer)
    key = cli.json("show", url, "--version", "1")["segments"][0]["key"]
    store = cli.store()
    store.put(key, store.get(key)[:-3], mode=PutMode.OVERWRITE)
    error = cli.error(6, "digest", "replay", url, "--out", tmp_path / "c")
    assert error["key"] == key
    assert not (tmp_path / "c").exists()
    for flags in ([], ["--deep"]):
        report = cli.json("verify", url, *flags, code=6)
        assert [(f["defect"], f["version"], f["key"]) for f in report["findings"]] == [
            ("size", 1, key),
            ("unreachable", 1, None),
        ]
    assert all(list(finding) == documented("A finding") for finding in report["findings"])
    assert "versions 1 to 2" in report["findings"][1]["message"]
    assert report["replayed"] == 1
    plain = cli.run("verify", url)
    assert plain.exit_code == 6
    assert "DAMAGED" in plain.stdout


def test_json_error_is_the_only_document(files: Cli) -> None:
    """With --json an error is one document on stdout and one line on stderr."""
    result = files.run("log", files.url("absent"), "--json")
    assert list(json.loads(result.stdout)) == ["error"]
    assert result.stderr.count("\n") == 1


def test_a_step_that_no_reader_takes_commits_nothing(files: Cli, old: Path, new: Path) -> None:
    """A step beyond 53 bits is refused: committed, it would lock everybody out of the run."""
    url = files.url("r1")
    files.json("init", url, "--checkpoint", old)
    files.error(2, "setting", "publish", url, new, "--step", str(1 << 53))
    assert files.json("log", url)["head"] == 0
    assert files.json("publish", url, new, "--step", str((1 << 53) - 1))["version"]["version"] == 1
    assert files.json("verify", url, "--deep")["ok"]


def test_keys_are_not_written_over_a_folder(files: Cli) -> None:
    """A folder as the file of a key is in the way, also one without a name of its own."""
    for folder in (".", "/"):
        files.error(4, "output_exists", "keygen", folder)


def test_an_event_log_of_an_impossible_name(files: Cli, old: Path) -> None:
    """An event log whose name no file can have is bad input."""
    files.json("init", files.url("r1"), "--checkpoint", old)
    files.error(2, "name", "log", files.url("r1"), "--events", "x" * 300)


def test_a_redis_url_that_is_none(files: Cli) -> None:
    """An address without its closing bracket is refused by the command and by the library."""
    files.error(2, "url", "status", "redis://[::1", "r1")
    with pytest.raises(InvalidInputError) as caught:
        RedisCoordination("redis://[::1", "r1", FakeClock())
    assert caught.value.kind is Kind.URL
