"""A real vLLM API server in processes of its own, small enough for tests."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltastore.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.vllm.runs import TinyRun

SERVER = "vllm.entrypoints.openai.api_server"
BEGIN, END = "x-deltastore-version", "x-deltastore-end-version"
ROOT = Path(__file__).resolve().parents[2]
START_WITHIN_S = 240.0
ANSWER_WITHIN_S = 60.0


@dataclass
class Answer:
    """What a server answered: names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def document(self) -> Any:
        """The body as JSON."""
        return json.loads(self.text)


@dataclass
class ApiServer:
    """One server; `with` starts and ends it.

    Args:
        log: where its output goes.
        arguments: beside those that make it small.
        environment: beside this process's.
        whole_command: whether it is `vllm serve`, which alone can have several API servers.
    """

    checkpoint: Path
    log: Path
    arguments: list[str]
    environment: Mapping[str, str]
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    whole_command: bool = False

    def __enter__(self) -> ApiServer:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        module = "tests.vllm.serve_cli" if self.whole_command else SERVER
        words = ["serve"] if self.whole_command else []
        command = [
            *(sys.executable, "-m", module, *words),
            *("--model", str(self.checkpoint), "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--seed", "0"),
            *("--dtype", "bfloat16", "--enforce-eager", "--generation-config", "vllm"),
            *("--max-model-len", "256", "--max-num-seqs", "8", "--block-size", "32"),
            *("--kv-cache-memory-bytes", str(32 << 20), "--disable-uvicorn-access-log"),
            *("--weight-transfer-config", '{"backend": "deltastore"}'),
            *self.arguments,
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **self.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self.until(self._is_up, START_WITHIN_S)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self) -> None:
        """End it and all that it started."""
        if self.process is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self.process.wait(30)

    def ask(self, verb: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """One request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_WITHIN_S)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(verb, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, headers, response.read().decode())
        finally:
            connection.close()

    def complete(self, tokens: int = 8, **more: Any) -> Answer:
        """A greedy completion of a fixed prompt."""
        body = {"model": "tiny", "prompt": [1, 2, 3, 4, 5], "max_tokens": tokens}
        return self.ask(
            "POST", "/v1/completions", {**body, "temperature": 0, "ignore_eos": True, **more}
        )

    def status(self) -> dict[str, Any]:
        """What it says of its engine."""
        document = self.ask("GET", "/deltastore/status").document
        assert isinstance(document, dict)
        return document

    def until(self, true: Callable[[], bool], within_s: float = ANSWER_WITHIN_S) -> None:
        """Wait until it holds; else fail with the end of the log."""
        clock = SystemClock()
        deadline_s = clock.monotonic_s() + within_s
        while not true():
            assert self.process is not None
            alive = self.process.poll() is None
            assert alive, self.tail()
            assert clock.monotonic_s() < deadline_s, self.tail()
            clock.sleep_s(0.1)

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-6000:]

    def _is_up(self) -> bool:
        try:
            return self.ask("GET", "/health").status == 200
        except OSError:
            return False


def fault_of(run: TinyRun) -> Path:
    """While it exists, weights of who follows the run get lost in every activation.

    With several engine cores: of the one core that it names, if it names one.
    """
    return run.folder / "fault"


def following_server(run: TinyRun, *arguments: str) -> ApiServer:
    """`vllm serve` with the plugin, as the documentation starts it; `with` starts and ends it."""
    section = run.settings(
        policy="keep", min_interval_s=0, jitter_s=0, poll_s=0.1, events=str(run.folder / "events")
    )
    words = [
        *arguments,
        *("--additional-config", json.dumps({"deltastore": section})),
        *("--worker-extension-cls", "tests.vllm.poisoning_worker.PoisoningWorker"),
    ]
    environment = {
        "VLLM_PLUGINS": "deltastore",
        "DELTASTORE_TEST_FAULT": str(fault_of(run)),
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    return ApiServer(run.checkpoint, run.folder / "log", words, environment, whole_command=True)
