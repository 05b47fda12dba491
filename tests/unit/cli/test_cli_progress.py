"""Progress is for whoever watches: on a terminal a bar, anywhere else nothing."""

from __future__ import annotations

import io
import re
import sys
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from deltastore.cli.connection import Connection
from deltastore.cli.output import Output
from deltastore.cli.progress import Meter, Tally, progress
from deltastore.cli.runs import init_run, publish_checkpoint
from deltastore.testing.checkpoints import next_checkpoint, tiny_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.testing.servers import SeaweedServer


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal the bar says what is going on, on stderr."""
    terminal = _Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress("replay r1", total=10) as meter:
        meter.advance(4)
        meter.reached(10, 10)
    assert "replay r1" in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_nothing_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """When stderr is no terminal nothing is drawn, and the meter still takes note."""
    with progress("replay r1") as meter:
        meter.advance(4)
        meter.reached(4, 8)
    assert capsys.readouterr() == ("", "")


def terminal_now(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    """A terminal on stderr that is wide enough for whole lines. (A fixture's would be replaced.)"""
    made = _Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys, "stderr", made)
    return made


def drawn_last(terminal: _Terminal) -> dict[str, str]:
    """What the last drawing of each bar says of its bytes, by the first word of its name."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).replace("\r", "\n")
    rows = re.findall(r"^(\w+)[^\u2501\n]*[\u2501\u2578\u257a]+ +(\S+ \w+)", text, re.MULTILINE)
    return dict(rows)


def shown(size_bytes: int, of_bytes: int | None = None) -> str:
    """How a bar writes that so much of so much is done."""
    total = size_bytes if of_bytes is None else of_bytes
    if total < 1000:
        return f"{size_bytes}/{total} bytes"
    if total < 10**6:
        return f"{size_bytes / 1e3:.1f}/{total / 1e3:.1f} kB"
    return f"{size_bytes / 1e6:.1f}/{total / 1e6:.1f} MB"


@pytest.mark.parametrize("relays", [0, 1])
def test_init_and_publish_show_bytes_of_all_their_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, relays: int
) -> None:
    """Fingerprint, upload to every region, comparison and upload of segments: each bar is full at
    the end, and its total is what there was to do."""
    terminal = terminal_now(monkeypatch)
    old = tiny_checkpoint(tmp_path / "old", seed=1, shards=2)
    new = next_checkpoint(old, tmp_path / "new", seed=2)
    url = f"file://{tmp_path}/home/r1"
    others = [f"west=file://{tmp_path}/west/r1"] * relays
    init_run(
        url,
        Connection(),
        old,
        step=0,
        home_name="home",
        streams=2,
        output=Output(True),
        relays=others,
    )
    files = sum(path.stat().st_size for path in old.iterdir())
    bars = drawn_last(terminal)
    assert bars["upload"] == shown((1 + relays) * files)
    weights = bars["fingerprint"]
    assert weights.split("/")[0] == weights.split("/")[1].split()[0]
    terminal.truncate(0)
    publish_checkpoint(url, Connection(), new, step=1, streams=2, output=Output(True))
    bars = drawn_last(terminal)
    segments = sum(path.stat().st_size for path in (tmp_path / "home").rglob("*.seg"))
    assert segments > 0
    assert bars["upload"] == shown(segments)
    assert bars["compare"] == weights
    read = sum(path.stat().st_size for path in old.glob("*.safetensors"))
    assert bars["replay"].split("/")[0] == shown(read).split("/")[0]


def test_parts_of_a_large_file_move_the_bar(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, s3_server: SeaweedServer, s3_bucket: str
) -> None:
    """A file that goes to S3 in parts is seen part by part, and counted once."""
    terminal = terminal_now(monkeypatch)
    folder = tiny_checkpoint(tmp_path / "model", seed=1)
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate(20 << 20)  # three parts of 8 MiB
    monkeypatch.setenv("TEST_ACCESS_KEY", s3_server.access_key)
    monkeypatch.setenv("TEST_SECRET_KEY", s3_server.secret_key)
    seen: list[tuple[int, int]] = []
    reached = Meter.reached

    def noted(meter: Meter, done: int, total: int) -> None:
        seen.append((done, total))
        reached(meter, done, total)

    monkeypatch.setattr(Meter, "reached", noted)
    connection = Connection(
        s3_server.endpoint, access_key_env="TEST_ACCESS_KEY", secret_key_env="TEST_SECRET_KEY"
    )
    url = f"s3://{s3_bucket}/r1"
    init_run(url, connection, folder, step=0, home_name="home", streams=2, output=Output(True))
    files = [path.stat().st_size for path in folder.iterdir()]
    assert seen[-1] == (sum(files), sum(files))
    steps = [after[0] - before[0] for before, after in pairwise(seen)]
    assert steps.count(8 << 20) == 2
    assert max(steps) == 8 << 20
    assert drawn_last(terminal)["upload"] == shown(sum(files))


def test_a_tally_forgets_parts_that_were_sent_twice() -> None:
    """An upload that began again counts as much as its body has, and no more."""
    seen = []

    class Noting(Meter):
        def reached(self, done: int, total: int) -> None:
            seen.append((done, total))

    tally = Tally(Noting(None, None), total=30)
    for size_bytes in (8, 8, 8, 4):
        tally.part(size_bytes)
    tally.put(20)
    tally.put(10)
    assert seen[-2:] == [(20, 30), (30, 30)]
    tally.moved(0, 5)
    tally.moved(5, 0)
    assert seen[-2:] == [(30, 35), (35, 35)]
