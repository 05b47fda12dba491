"""Importing vLLM takes longer than any engine here lives: engines are forked from one import.

`python -m tests.vllm.crash_nursery FD` imports what engines need and forks a child for each socket
that comes through its own. A child makes one engine, does what it is told, line by line, and dies
where it is told to: a process of its own, which SIGKILL ends for good.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import re
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from deltastore.errors import ApplyError
from tests.vllm.crash_steps import STEPS, arm

ROOT = Path(__file__).parents[2]
BOUND_S = 240.0  # a limit for busy machines
SHARED = re.compile(r"/dev/shm/\S+$", re.MULTILINE)
PRELOADED = (
    "vllm.entrypoints.llm",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.v1.engine.async_llm",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
    "deltastore.adapters.vllm.backend",
    "tests.vllm.crash_probe",
)


class DiedError(Exception):
    """The process of an engine is gone; `code` as of `subprocess`."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the engine's process ended with {code}")
        self.code = code


class RefusedError(Exception):
    """What an engine raised, in words."""


class Life:
    """One engine in a process of its own."""

    def __init__(self, nursery: Nursery, pid: int, line: socket.socket) -> None:
        self._nursery = nursery
        self._line = line
        self._text = b""
        self.pid = pid

    def tell(self, what: str, *arguments: Any, **named: Any) -> None:
        """Begin what `answer` ends."""
        with suppress(BrokenPipeError, ConnectionResetError):  # `answer` says that it has died
            self._line.sendall(json.dumps([what, arguments, named]).encode() + b"\n")

    def answer(self, within_s: float = BOUND_S) -> Any:
        """What it answers; RefusedError when it raised, DiedError when it died of it."""
        while b"\n" not in self._text:
            ready, _, _ = select.select([self._line], [], [], within_s)
            assert ready, f"no answer within {within_s} s:\n{self._nursery.tail()}"
            try:
                more = self._line.recv(1 << 16)
            except ConnectionResetError:
                more = b""
            if not more:
                raise DiedError(self._nursery.ended(self.pid))
            self._text += more
        line, _, self._text = self._text.partition(b"\n")
        found = json.loads(line)
        if "raised" in found:
            raise RefusedError(found["raised"])
        return found["answer"]

    def ask(self, what: str, *arguments: Any, within_s: float = BOUND_S, **named: Any) -> Any:
        """Have it done, and wait for it."""
        self.tell(what, *arguments, **named)
        return self.answer(within_s)

    def kill(self) -> None:
        """End it, if it lives."""
        os.kill(self.pid, signal.SIGKILL)
        self._nursery.ended(self.pid)

    def close(self) -> None:
        """Let go of the line."""
        self._line.close()


class Nursery:
    """The importing process, and the engines forked from it; `with` ends them all."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._lives: list[Life] = []
        self._ended: dict[int, int] = {}
        self._shared: set[Path] = set()

    def __enter__(self) -> Self:
        self._line, theirs = socket.socketpair()
        words = [sys.executable, "-m", "tests.vllm.crash_nursery", str(theirs.fileno())]
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                words,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.note_shared()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        self._line.close()
        for life in self._lives:
            life.close()
        for path in self._shared:
            path.unlink(missing_ok=True)

    def note_shared(self) -> None:
        """Remember the shared memory of all that live: vLLM's ranks leave it when they are killed.

        It is removed at the end.
        """
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile
                if os.getpgid(int(folder.name)) == self._process.pid:
                    maps = (folder / "maps").read_text(encoding="utf-8")
                    self._shared.update(map(Path, SHARED.findall(maps)))

    def start(self, checkpoint: Path, **arguments: Any) -> Life:
        """An engine that begins to start; its first answer says that it has."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._line, [b"fork"], [theirs.fileno()])
        pid = int(self._reply())
        life = Life(self, pid, ours)
        self._lives.append(life)
        life.tell("start", str(checkpoint), **arguments)
        return life

    def ended(self, pid: int) -> int:
        """How that child ended; waits for it."""
        if pid not in self._ended:
            self._line.sendall(b"%d" % pid)
            self._ended[pid] = int(self._reply())
        return self._ended[pid]

    def tail(self) -> str:
        """The end of what all of them said."""
        return self._log.read_text(errors="replace")[-4000:]

    def _reply(self) -> bytes:
        ready, _, _ = select.select([self._line], [], [], BOUND_S)
        found = self._line.recv(64) if ready else b""
        assert found, self.tail()
        return found


def main(line: socket.socket) -> None:
    """Import, then fork and bury until the line ends."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else every child looks through all of it again
    while True:
        text, given, _, _ = socket.recv_fds(line, 64, 1)
        if not text:
            return
        if text != b"fork":
            _, status = os.waitpid(int(text), 0)
            line.sendall(b"%d" % os.waitstatus_to_exitcode(status))
            continue
        pid = os.fork()
        if not pid:
            line.close()
            _live(socket.socket(fileno=given[0]))
        os.close(given[0])
        line.sendall(b"%d" % pid)


def _live(line: socket.socket) -> None:
    """What a child does until its line ends."""
    engine = _Engine()
    code = 1
    try:
        with line.makefile("rb") as lines:
            for text in lines:
                what, arguments, named = json.loads(text)
                try:
                    found = {"answer": getattr(engine, what)(*arguments, **named)}
                except Exception as err:  # noqa: BLE001 - the test judges it
                    found = {"raised": f"{type(err).__name__}: {err}"}
                line.sendall(json.dumps(found).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)  # nothing of the importing process is this one's to end


class _Engine:
    """What a child can be told."""

    engine: Any
    driver: Any

    def start(
        self,
        checkpoint: str,
        processes: bool = False,
        environment: dict[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        """Make the engine; with `processes`, its core and its ranks are processes of their own."""
        from tests.vllm.kit import start_engine

        os.environ.update(environment or {})
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(processes))
        context = multiprocessing.get_context("fork")
        # As vLLM does beside a GPU. On CPUs it spawns: three times what the nursery has done once.
        multiprocessing.get_context = lambda _method=None: context  # type: ignore[assignment]
        self.engine = start_engine(Path(checkpoint), **arguments)

    def arm(self, name: str) -> None:
        """Have this process die at that step."""
        arm(STEPS[name])

    def initialise(self) -> None:
        """Begin to follow."""
        from tests.vllm.runs import initialise

        initialise(self.engine)

    def update(self, version: int) -> None:
        """One whole update, as a caller does it."""
        from tests.vllm.runs import update

        update(self.engine, version)
        assert self.engine.reset_prefix_cache()

    def poison(self, version: int) -> None:
        """An update that breaks off and is not undone."""
        self.rpc("probe_writes", 3, 0, undo_fails=True)
        with suppress(ApplyError):  # what it says is another test's
            self.update(version)
        assert self.label() == "poisoned"
        self.rpc("probe_writes", -1, 0)

    def follow(self) -> None:
        """Begin to follow by itself, in `turn`."""
        from deltastore.adapters.vllm.control import LLMControl
        from deltastore.clock import SystemClock
        from deltastore.pipeline.safe_point import SafePointDriver, SafePointSettings

        settings = SafePointSettings(min_interval_s=0, jitter_s=0)
        self.driver = SafePointDriver(
            LLMControl(self.engine), SystemClock(), name="e", settings=settings
        )

    def turn(self) -> str:
        """Do what is due; what keeps it from the next version."""
        self.driver.turn()
        return str(self.driver.view().trouble)

    def rpc(self, method: str, *arguments: Any, **named: Any) -> Any:
        """A call of all ranks."""
        return self.engine.collective_rpc(method, args=arguments, kwargs=named)

    def call(self, method: str, *arguments: Any) -> Any:
        """A call of the engine."""
        return getattr(self.engine, method)(*arguments)

    def said(self, tokens: int) -> Any:
        """Greedy tokens and log-probs."""
        from tests.vllm.runs import generate

        return generate(self.engine, tokens)

    def label(self) -> str:
        """Which weights it says that it serves."""
        return str(self.engine.get_weight_version())

    def digests(self) -> Any:
        """SHA-256 of all that each rank holds."""
        return self.engine.collective_rpc("compute_weight_checksums")

    def generate(self) -> Any:
        """Tokens of greedy requests."""
        from vllm import SamplingParams

        from tests.vllm.runs import PROMPTS

        sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        outputs = self.engine.generate(PROMPTS, sampling, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in outputs]


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
