"""`deltastore follow --vllm` drives a server without the plugin, by its development endpoints."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.api_server import ApiServer
from tests.vllm.kit import tiny_qwen3
from tests.vllm.runs import TinyRun

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    """The run of a tiny model."""
    folder = tmp_path_factory.mktemp("http")
    made = TinyRun(folder, tiny_qwen3(folder / "model", tied=True))
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(run: TinyRun) -> Iterator[ApiServer]:
    """A server in development mode, without plugins: a worker extension is all it has."""
    section = run.settings()
    del section["run"]  # the follower says it
    arguments = [
        *("--additional-config", json.dumps({"deltastore": section})),
        *("--worker-extension-cls", "deltastore.adapters.vllm.extension.WorkerExtension"),
    ]
    environment = {"VLLM_PLUGINS": "none", "VLLM_SERVER_DEV_MODE": "1"}
    with ApiServer(run.checkpoint, run.folder / "log", arguments, environment) as started:
        yield started


@contextmanager
def follow(server: ApiServer, run: TinyRun, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The command, as people start it."""
    command = [sys.executable, "-c", "from deltastore.cli import main; main()", "follow", run.url]
    command += ["--vllm", server.url, "--json", "--poll-s", "0.1", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as one:
        try:
            yield one
        finally:
            one.kill()


def label(server: ApiServer) -> str:
    """The version that the engine says it is at."""
    found = server.ask("GET", "/weight_info").document["weight_version"]
    assert isinstance(found, str)
    return found


def lines(text: str) -> list[dict[str, Any]]:
    """The documents that the command printed."""
    return [json.loads(line) for line in text.splitlines()]


def test_once_brings_a_server_to_the_newest_version(server: ApiServer, run: TinyRun) -> None:
    """Two versions are published; one look activates the newest, and the command ends."""
    run.publish()
    version = run.publish()
    with follow(server, run, "--once", "--policy", "wait") as command:
        out, err = command.communicate(timeout=120)
    assert command.returncode == 0, err
    assert label(server) == run.label(version)
    last = lines(out)[-1]
    assert (last["version"], last["outcome"]) == (version, "activated")
    assert last["write_s"] > 0
    assert "ask for no password" in err
    with follow(server, run, "--once") as command:
        out, err = command.communicate(timeout=120)
    assert command.returncode == 0, err
    assert [one["outcome"] for one in lines(out)] == ["nothing"]


def test_a_follower_keeps_a_serving_server_up_to_date(server: ApiServer, run: TinyRun) -> None:
    """Versions come while requests run; SIGTERM ends it with the engine serving (CASE R18)."""
    with follow(server, run) as command, ThreadPoolExecutor(1) as pool:
        busy = [pool.submit(server.complete, 100) for _ in range(6)]
        for _ in range(2):
            wanted = run.label(run.publish())
            server.until(lambda wanted=wanted: label(server) == wanted)
        command.send_signal(signal.SIGTERM)
        out, err = command.communicate(timeout=60)
        answers = [one.result() for one in busy]
    assert command.returncode == 0, err
    assert [one["version"] for one in lines(out) if one["outcome"] == "activated"]
    assert not server.ask("GET", "/is_paused").document["is_paused"]
    assert {answer.status for answer in answers} == {200}
    assert {answer.document["usage"]["completion_tokens"] for answer in answers} == {100}
