"""The real engine, in its own environment: elsewhere nothing here is even collected."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.vllm.crash_nursery import Nursery

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

# Before vllm is imported, here and in the processes it starts.
for _name, _value in {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else the first generation compiles for 23 s
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # tests with processes say so themselves
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # tiny models: two threads wait for each other, on a busy machine long
}.items():
    os.environ.setdefault(_name, _value)


def pytest_configure(config: pytest.Config) -> None:
    """vLLM's own warnings are not ours to mend."""
    for line in (
        # Its search for kernels asks every attribute of every module for a __dict__.
        "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning",
        # Its clients leave their sockets' context to the collector.
        "ignore:Unclosed context <zmq:ResourceWarning",
    ):
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Where engines come from that are processes of their own: one import for all of them."""
    from tests.vllm.crash_nursery import Nursery

    with Nursery(tmp_path_factory.mktemp("nursery") / "log") as made:
        yield made
