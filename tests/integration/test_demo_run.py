"""The demo, whole, with real servers and processes, on a model so small that it takes seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deltastore.clock import SystemClock
from deltastore.testing.checkpoints import TinyShape, tiny_checkpoint
from deltastore.testing.servers import RedisServer, SeaweedServer

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 280  # below pytest's own limit per test, on a machine that does much else
WORDS = ["<eos>", "<other>", *"0123456789"]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama that can write nothing but digits, so that it is right now and then."""
    for server in (SeaweedServer, RedisServer):
        if not server.available():
            if os.environ.get("CI"):
                pytest.fail(f"{server.name} is not installed")
            pytest.skip(f"{server.name} is not installed")
    folder = tiny_checkpoint(
        tmp_path_factory.mktemp("model") / "tiny", seed=3, shape=TinyShape(vocab=len(WORDS))
    )
    words = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(WORDS)}, "<other>")
    )
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<eos>", unk_token="<other>"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def _start(model: Path, runs_dir: Path, *options: str) -> subprocess.Popen[str]:
    arguments = ["--model", str(model), "--runs-dir", str(runs_dir), "--lr", "1e-3", *options]
    return subprocess.Popen(
        [sys.executable, "-m", "workers.demo", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def runs_dir(tmp_path: Path) -> Iterator[Path]:
    """A folder for runs; afterwards no process may be left that was told of it."""
    yield tmp_path
    assert _processes_of(tmp_path) == []


def _processes_of(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(str(folder) in word for word in words) and process.pid != os.getpid():
            found.append(" ".join(words))
    return found


def test_the_whole_demo_holds(tiny_model: Path, runs_dir: Path) -> None:
    """Learn, kill, join, finish: every check passes, the page is written, nothing stays running."""
    demo = _start(tiny_model, runs_dir, "--steps", "6")
    said, _ = demo.communicate(timeout=WITHIN_S)
    assert demo.returncode == 0, said
    (folder,) = runs_dir.iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    names = [check["name"] for check in summary["checks"]]
    assert all(check["passed"] for check in summary["checks"])
    assert len(names) == 8
    assert "a2 was killed (SIGKILL)" in said
    assert "a4 joined at version" in said
    assert "peak memory of all processes" in said
    assert "<svg" in (folder / "report.html").read_text()
    assert not (folder / "data").exists()
    assert (folder / "replayed" / "config.json").exists()


def test_ctrl_c_stops_everything(tiny_model: Path, runs_dir: Path) -> None:
    """SIGINT ends servers and workers, and says so with exit code 130."""
    demo = _start(tiny_model, runs_dir, "--steps", "2000")
    assert demo.stdout is not None
    _wait_for_workers(runs_dir)
    demo.send_signal(signal.SIGINT)
    said = demo.stdout.read()
    assert demo.wait(timeout=60) == 130, said
    assert "interrupted" in said
    demo.stdout.close()


def test_a_worker_that_dies_ends_the_demo_by_name(tiny_model: Path, runs_dir: Path) -> None:
    """A trainer that is lost is exit code 1, its name, and a page that says so."""
    demo = _start(tiny_model, runs_dir, "--steps", "2000")
    assert demo.stdout is not None
    _wait_for_workers(runs_dir)["trainer"].kill()
    said = demo.stdout.read()
    assert demo.wait(timeout=60) == 1, said
    assert "trainer ended with exit code -9" in said
    (folder,) = runs_dir.iterdir()
    assert "the demo ran to its end" in (folder / "report.html").read_text()
    demo.stdout.close()


def _wait_for_workers(runs_dir: Path) -> dict[str, psutil.Process]:
    """The trainer and three actors of the only run, by name, once all are started."""
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + WITHIN_S
    while True:
        found = {}
        for process in psutil.process_iter(["cmdline"]):
            last = (process.info["cmdline"] or [""])[-1]
            if last.startswith(str(runs_dir)) and "/config/" in last:
                found[Path(last).stem] = process
        if len(found) == 4:
            return found
        assert clock.monotonic_s() < deadline_s, f"only {sorted(found)} were started"
        clock.sleep_s(0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "steps = 0 is not allowed"),
        (["--lr", "nan"], "lr = nan is not allowed"),
        (["--engine", "abacus"], "engine = 'abacus' is not allowed"),
        (["--engine", "vllm", "--vllm-python", "no-python"], "vllm_python = 'no-python' is not"),
        (["--model", "nowhere"], "nowhere"),
    ],
)
def test_settings_that_cannot_work_start_nothing(
    tmp_path: Path, options: list[str], message: str
) -> None:
    """A bad setting is exit code 2 and one line, before any server or worker is started."""
    demo = _start(tmp_path, tmp_path / "runs", *options)
    said, _ = demo.communicate(timeout=60)
    assert demo.returncode == 2
    assert message in said
    assert "Traceback" not in said
    assert "region east" not in said
