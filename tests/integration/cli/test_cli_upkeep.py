"""Upkeep by hand, on files and on a real S3 server: maintain, repair, follow, keys."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from deltastore.storage.store import PutMode
from tests.integration.cli.cli_kit import Cli, documented, other_files, publish_three, tensors

if TYPE_CHECKING:
    from pathlib import Path

VERSIONS = 10


@pytest.fixture
def run_url(cli: Cli, old: Path, new: Path) -> str:
    """A run of ten versions that go back and forth between two checkpoints."""
    url = cli.url("r1")
    cli.json("init", url, "--checkpoint", old)
    for version in range(1, VERSIONS + 1):
        cli.json("publish", url, new if version % 2 else old, "--step", str(version))
    return url


def keys_of(cli: Cli, part: str) -> list[str]:
    """Keys of the run that contain `part`."""
    store = cli.store()
    found = [info.key for info in store.list("r1/") if part in info.key]
    store.close()
    return found


def flip(cli: Cli, key: str) -> None:
    """Flip a bit in the middle of an object."""
    store = cli.store()
    body = bytearray(store.get(key))
    body[len(body) // 2] ^= 1
    store.put(key, bytes(body), mode=PutMode.OVERWRITE)
    store.close()


def test_maintain_makes_shortcuts_and_shows_deletions(cli: Cli, run_url: str) -> None:
    """A round makes what is missing and deletes nothing; the next one has nothing to do."""
    plan = cli.json(
        "maintain", run_url, "--dry-run", "--anchor-multiple", "8", "--join-seconds-max", "0"
    )
    assert list(plan) == documented("maintain")
    assert (plan["mode"], plan["anchors"]["due"], plan["anchors"]["written"]) == ("plan", 8, None)
    assert plan["composites"]["missing"] == [[0, 8]]
    assert keys_of(cli, "/composites/") == []
    words = ("--anchor-multiple", "8", "--join-seconds-max", "0", "--keep-versions", "2")
    made = cli.json("maintain", run_url, *words)
    assert (made["anchors"]["written"], made["composites"]["written"]) == (8, [[0, 8]])
    assert made["replicate"] is None
    for part, names in (
        ("anchors", "Anchors"),
        ("composites", "Composites"),
        ("retention", "Retention"),
        ("janitor", "Janitor"),
    ):
        assert sorted(made[part]) == sorted(documented(names))
    assert (made["retention"]["deleted"], made["janitor"]["deleted"]) == (0, 0)
    again = cli.json("maintain", run_url, *words)
    assert (again["anchors"]["written"], again["composites"]["written"]) == (None, [])
    assert again["composites"]["missing"] == []
    report = cli.json("verify", run_url, "--deep")
    assert (report["findings"], report["shortcuts"], report["proved"]) == ([], 2, 2)
    plain = cli.run("maintain", run_url, *words)
    assert (plain.exit_code, plain.stderr) == (0, "")
    assert "composites  0 made, 0 missing" in plain.stdout


def test_retention_deletes_in_two_rounds(files: Cli, old: Path, new: Path, tmp_path: Path) -> None:
    """CASE C5: `--execute` first raises the floor, and a round after the grace time deletes; what
    stays can be replayed, and what went is Gone with the way out."""
    url = files.url("r1")
    files.json("init", url, "--checkpoint", old)
    for version in range(1, VERSIONS + 1):
        files.json("publish", url, new if version % 2 else old, "--step", str(version))
    words = ("--anchor-multiple", "8", "--join-seconds-max", "0", "--keep-versions", "2")
    words = (*words, "--grace-s", "0.01", "--execute")
    first = files.json("maintain", url, *words)
    assert (first["retention"]["floor"], first["retention"]["deleted"]) == (8, 0)
    second = files.json("maintain", url, *words)
    assert second["retention"]["deleted"] >= 8
    assert all(list(one) == documented("A deletion") for one in second["retention"]["deletions"])
    report = files.json("verify", url, "--deep")
    assert (report["findings"], report["floor"], report["gone"]) == ([], 8, 8)
    files.json("replay", url, "--version", "9", "--out", tmp_path / "v9")
    assert tensors(tmp_path / "v9") == tensors(new)
    assert other_files(tmp_path / "v9") == other_files(old)
    files.error(3, "gone", "replay", url, "--version", "5", "--out", tmp_path / "v5")


def test_only_names_tasks(files: Cli, old: Path, new: Path, newer: Path) -> None:
    """`--only` leaves the other parts null; replication without relays says what it lacks."""
    url = publish_three(files, old, new, newer)
    document = files.json("maintain", url, "--only", "janitor", "--only", "anchors")
    null = [part for part in ("replicate", "composites", "retention") if document[part] is None]
    assert null == ["replicate", "composites", "retention"]
    assert document["anchors"] is not None
    files.error(2, "setting", "maintain", url, "--only", "replicate")
    files.error(2, "setting", "maintain", url, "--relay", "nonsense")
    files.error(2, "setting", "maintain", url, "--behind", "nobody")


def copy_run(cli: Cli, name: str, *, without: str = "\0") -> str:
    """The run `r1` once more in the folder `name`, as another region has it."""
    store = cli.store()
    other = Cli(f"{cli.root_url}/{name}", cli.options, cli.env, cli.store_options)
    target = other.store()
    for info in store.list("r1/"):
        if without not in info.key:
            target.put(info.key, store.get(info.key), mode=PutMode.CREATE)
    store.close()
    target.close()
    return other.url("r1")


def test_replicate_to_a_relay(cli: Cli, old: Path, new: Path, newer: Path) -> None:
    """A relay that missed versions is brought up to home, and is whole."""
    url, relay = cli.url("r1"), f"{cli.root_url}/west/r1"
    cli.json("init", url, "--checkpoint", old, "--relay", f"west={relay}")
    cli.json("publish", url, new, "--step", "1")
    cli.json("publish", url, newer, "--step", "2")
    behind = cli.json(
        "maintain", url, "--only", "replicate", "--relay", f"west={relay}", "--dry-run"
    )
    assert behind["replicate"] == {"head": 2, "behind": ["west"], "problems": []}
    done = cli.json("maintain", url, "--only", "replicate", "--relay", f"west={relay}")
    assert done["replicate"] == {"head": 2, "behind": [], "problems": []}
    assert cli.json("verify", relay, "--deep")["replayed"] == 3


def test_repair_from_another_region(cli: Cli, old: Path, new: Path, newer: Path) -> None:
    """A damaged object is listed with its repair, and mended only when that is asked for."""
    url = publish_three(cli, old, new, newer)
    other = copy_run(cli, "west")
    (key,) = keys_of(cli, f"/deltas/{1:010d}/")
    flip(cli, key)
    listed = cli.json("verify", url, "--deep", "--from", other, code=6)
    assert [list(repair) for repair in listed["repairs"]] == [documented("A repair")]
    assert (listed["repairs"][0]["key"], listed["repairs"][0]["done"]) == (key, False)
    assert cli.json("verify", url, "--deep", code=6)["repairs"] == []
    plain = cli.run("verify", url, "--deep", "--from", other, "--repair")
    assert (plain.exit_code, plain.stderr) == (0, "")
    assert "copied" in plain.stdout
    assert plain.stdout.splitlines()[-1].startswith("whole: HEAD 2")
    assert cli.json("verify", url, "--deep")["replayed"] == 3


def test_repair_of_what_cannot_be_opened(files: Cli, old: Path, new: Path, newer: Path) -> None:
    """A run without its run.json and layout is given both back, and then checked."""
    url = publish_three(files, old, new, newer)
    other = copy_run(files, "west")
    store = files.store()
    store.delete([*keys_of(files, "/run.json"), *keys_of(files, "/layout/")])
    store.close()
    files.error(3, "run_missing", "verify", url, "--from", other)
    document = files.json("verify", url, "--deep", "--from", other, "--repair")
    assert [(one["key"], one["done"]) for one in document["repairs"]] == [
        ("r1/run.json", True),
        (keys_of(files, "/layout/")[0], True),
    ]
    assert document["replayed"] == 3


def test_repair_from_another_run_is_refused(
    files: Cli, old: Path, new: Path, newer: Path, tmp_path: Path
) -> None:
    """Another run of the same name is no source."""
    url = publish_three(files, old, new, newer)
    stranger = Cli(f"file://{tmp_path}/other")
    publish_three(stranger, old, new, newer)
    flip(files, keys_of(files, f"/deltas/{1:010d}/")[0])
    words = ("verify", url, "--deep", "--repair", "--from", stranger.url("r1"))
    files.error(6, "broken_chain", *words)


def test_follow_into_a_folder(cli: Cli, old: Path, new: Path, newer: Path, tmp_path: Path) -> None:
    """`follow --once` writes a whole checkpoint of the newest version and swaps `latest` to it;
    with nothing new it says so; old folders go."""
    url, out = cli.url("r1"), tmp_path / "serving"
    cli.json("init", url, "--checkpoint", old)
    for version, source in enumerate((old, new, newer)):
        if version:
            cli.json("publish", url, source, "--step", str(version))
        document = cli.json("follow", url, "--out", out, "--once")
        assert list(document) == documented("follow")
        assert (document["version"], document["new"]) == (version, True)
        assert document["folder"] == str(out / f"{version:010d}")
        assert (out / "latest").resolve() == out / f"{version:010d}"
        assert tensors(out / "latest") == tensors(source)
        ours = other_files(out / "latest")
        assert json.loads(ours.pop("deltastore.json"))["version"] == version
        assert ours == other_files(old)
    assert document["via"] == "held v1 + 1 deltas"
    again = cli.json("follow", url, "--out", out, "--once")
    assert (again["version"], again["new"], again["read_bytes"]) == (2, False, 0)
    assert sorted(p.name for p in out.iterdir()) == [".lock", f"{1:010d}", f"{2:010d}", "latest"]


def test_follow_distrusts_what_is_on_disk(
    files: Cli, old: Path, new: Path, newer: Path, tmp_path: Path
) -> None:
    """A folder whose weights are not the version's any more is removed and written anew."""
    url, out = publish_three(files, old, new, newer), tmp_path / "serving"
    files.json("follow", url, "--out", out, "--once")
    (shard, *_others) = sorted((out / "latest").resolve().glob("*.safetensors"))
    body = bytearray(shard.read_bytes())
    body[-1] ^= 1
    shard.write_bytes(bytes(body))
    document = files.json("follow", url, "--out", out, "--once")
    assert (document["version"], document["new"]) == (2, True)
    assert tensors(out / "latest") == tensors(newer)


def test_follow_leaves_strangers_alone(
    files: Cli, old: Path, new: Path, newer: Path, tmp_path: Path
) -> None:
    """A folder with a `latest` of somebody else is refused, not overwritten."""
    url, out = publish_three(files, old, new, newer), tmp_path / "serving"
    (out / "latest").mkdir(parents=True)
    (out / "latest" / "precious").write_text("x")
    files.error(4, "output_exists", "follow", url, "--out", out, "--once")
    assert (out / "latest" / "precious").read_text() == "x"


def test_follow_goes_on(files: Cli, old: Path, new: Path, newer: Path, tmp_path: Path) -> None:
    """A follower in a process of its own takes up each version as it is published, one JSON
    document a line, and ends with 130 at Ctrl-C."""
    url = files.url("r1")
    files.json("init", url, "--checkpoint", old)
    words = ["follow", url, "--out", str(tmp_path / "serving"), "--poll-s", "0.05", "--json"]
    start = "from deltastore.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", start, *words],
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    ) as process:
        assert process.stdout is not None
        try:
            for version, source in enumerate((old, new, newer)):
                if version:
                    files.json("publish", url, source, "--step", str(version))
                document = json.loads(process.stdout.readline())
                assert (document["version"], document["new"]) == (version, True)
                assert tensors(tmp_path / "serving" / "latest") == tensors(source)
            process.send_signal(2)
            assert process.wait(60) == 130
        finally:
            process.kill()


def test_follow_only_prints(shared: Cli) -> None:
    """Without --out versions are printed and nothing is written."""
    plain = shared.run("follow", shared.url("r1"), "--once")
    assert (plain.exit_code, plain.stderr) == (0, "")
    assert plain.stdout.startswith("version 2, step 20, ")
    assert shared.json("follow", shared.url("r1"), "--once")["folder"] is None


def test_keygen(files: Cli, tmp_path: Path) -> None:
    """A private key is written for its owner alone, never printed and never replaced."""
    document = files.json("keygen", tmp_path / "trainer.key", "--role", "versions")
    assert list(document) == documented("keygen")
    assert stat.S_IMODE((tmp_path / "trainer.key").stat().st_mode) == 0o600
    secret = (tmp_path / "trainer.key").read_text().splitlines()[1]
    assert secret not in json.dumps(document)
    assert document["trusted_line"].startswith("versions MCow")
    assert document["key_id"] in document["trusted_line"]


def test_signed_run(files: Cli, old: Path, new: Path, newer: Path, tmp_path: Path) -> None:
    """What is signed with a trusted key is replayed and verified; what is not is refused."""
    url, trusted = files.url("r1"), tmp_path / "trusted"
    lines = ["# who may sign"]
    for name, role in (("trainer", "versions"), ("worker", "shortcuts")):
        made = files.json("keygen", tmp_path / name, "--role", role)
        lines.append(made["trusted_line"])
    trusted.write_text("\n".join(lines) + "\n")
    keys = ("--trusted-keys", trusted)
    signing = ("--sign-key", tmp_path / "trainer")
    files.json("init", url, "--checkpoint", old, *signing)
    assert files.json("verify", url, *keys)["findings"] == []
    files.json("replay", url, "--out", tmp_path / "v0", *keys)
    assert tensors(tmp_path / "v0") == tensors(old)
    files.json("init", files.url("r2"), "--checkpoint", old)
    files.error(6, "signature", "replay", files.url("r2"), "--out", tmp_path / "no", *keys)
    files.json("publish", url, new, "--step", "1", *signing)
    assert files.json("verify", url, *keys)["findings"] == []
    files.json("replay", url, "--out", tmp_path / "v1", *keys)
    for version in range(2, 9):
        files.json("publish", url, new, "--step", str(version), "--sign-key", tmp_path / "trainer")
    files.json("maintain", url, "--only", "composites", "--sign-key", tmp_path / "worker", *keys)
    assert files.json("verify", url, "--deep", *keys)["proved"] == 1
    shown = files.json("show", url)
    assert [list(one) for one in shown["shortcuts"]] == [documented("A shortcut")]
    assert (shown["shortcuts"][0]["kind"], shown["shortcuts"][0]["base_version"]) == (
        "composite",
        0,
    )
    assert shown["signed_by"] != shown["shortcuts"][0]["signed_by"] != []
    files.json("publish", url, newer, "--step", "9")
    report = files.json("verify", url, *keys, code=6)
    assert [(f["defect"], f["version"]) for f in report["findings"]] == [("signature", 9)]
    files.error(6, "signature", "replay", url, "--out", tmp_path / "v9", *keys)
    files.error(6, "signature", "follow", url, "--once", *keys)


@pytest.mark.parametrize(
    "text",
    ["versions", "everything MCow", "versions MCow", "shortcuts KEY", "versions KEY\nversions KEY"],
)
def test_bad_key_files(
    files: Cli, old: Path, new: Path, newer: Path, tmp_path: Path, text: str
) -> None:
    """A file of keys that says nothing usable is refused, and the line is named."""
    key = files.json("keygen", tmp_path / "k")["trusted_line"].split()[1]
    trusted = tmp_path / "trusted"
    trusted.write_text(text.replace("KEY", key))
    url = publish_three(files, old, new, newer)
    files.error(2, "setting", "verify", url, "--trusted-keys", trusted)
    files.error(2, "setting", "maintain", url, "--sign-key", trusted)
    files.error(3, "file_missing", "verify", url, "--trusted-keys", tmp_path / "none")


def test_log_draws_stages(files: Cli, old: Path, new: Path, newer: Path, tmp_path: Path) -> None:
    """`log` draws density and size, and the stages' times that an event log has for this run."""
    from deltastore.clock import SystemClock
    from deltastore.events import VersionPublished
    from deltastore.observability.jsonl import JsonlSink

    url = publish_three(files, old, new, newer)
    versions = files.json("log", url)["versions"]
    with JsonlSink(tmp_path / "events.jsonl", SystemClock()) as sink:
        for version, digest in ((1, versions[1]["policy_hash"]), (2, "0" * 64)):
            sink(VersionPublished(version, 1, 1, digest, 5, 9, 7, 8, 0.5, 0.25, 1.0, 0.125, 2.0))
    words = ("log", url, "--events", tmp_path / "events.jsonl")
    document = files.json(*words)
    assert document["stages"] == [
        dict(zip(documented("A stage"), (1, 0.5, 0.25, 1.0, 0.125, 2.0), strict=True))
    ]
    table = files.run(*words).stdout
    for expected in ("capture", "0.125 s", "density", "publish"):
        assert expected in table
    assert "█" in table
    files.error(3, "file_missing", "log", url, "--events", tmp_path / "none.jsonl")


def test_reading_through_fsspec(
    files: Cli, old: Path, new: Path, newer: Path, tmp_path: Path
) -> None:
    """Reading commands take any fsspec URL; a run cannot be made there, and memory is refused."""
    publish_three(files, old, new, newer)
    url = files.url("r1").replace("file://", "local://")
    assert files.json("log", url)["head"] == 2
    assert files.json("verify", url, "--deep")["replayed"] == 3
    files.json("replay", url, "--out", tmp_path / "c")
    assert tensors(tmp_path / "c") == tensors(newer)
    files.json("follow", url, "--out", tmp_path / "serving", "--once")
    files.error(2, "url", "log", "memory://runs/r1")
