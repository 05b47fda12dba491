"""A child forked in the middle of anything uses neither the parent's sockets, threads nor locks."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from deltastore.storage import s3_client
from deltastore.storage.store import PutMode, PutOutcome
from deltastore.testing.clock import FakeClock
from deltastore.testing.s3_proxy import Before, S3Proxy

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.storage.s3 import S3Store
    from deltastore.storage.s3_settings import S3Settings

BODY = bytes(range(256)) * (5 << 12) + b"and a second part"
CREATE = PutMode.CREATE
CONNECT_S, READ_S = 2.0, 8.0
_WAIT_S = 60.0

# Newer Pythons warn of what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@pytest.fixture
def clock() -> FakeClock:
    """Says whether anybody waited for a retry."""
    return FakeClock()


@pytest.fixture
def store(open_s3: Callable[..., S3Store], clock: FakeClock) -> S3Store:
    """A store whose requests end after ten seconds, answered or not."""
    return open_s3(clock, connect_timeout_s=CONNECT_S, read_timeout_s=READ_S)


def _fork_and_use(store: S3Store, clock: FakeClock) -> None:
    """A child that puts and reads, also in parts, works: without a retry, and without a hang.

    Nothing in it may wait but for an answer, and that ends by the settings. What is longer, and
    the child ends by the alarm, waits for a lock or a thread that did not come along.
    """
    waits = len(clock.slept_s)
    child = os.fork()
    if child == 0:
        signal.alarm(int(CONNECT_S + READ_S))
        try:
            store.put("child", b"child", mode=CREATE)
            store.put("child-parts", BODY, mode=CREATE)
            whole = store.get("child") == b"child" and store.get("child-parts") == BODY
            os._exit(0 if whole and len(clock.slept_s) == waits else 3)
        finally:
            os._exit(4)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def _fork_during_a_put(
    store: S3Store, clock: FakeClock, held: threading.Event, go: threading.Event
) -> None:
    """While a thread of the parent is held in the middle of a put; it ends as any other."""
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(store.put, "k", BODY, mode=CREATE)
        try:
            assert held.wait(_WAIT_S)
            _fork_and_use(store, clock)
        finally:
            go.set()
        assert put.result(_WAIT_S) is PutOutcome.WRITTEN
    assert store.get("k") == BODY


def test_forked_beside_an_idle_connection(store: S3Store, clock: FakeClock) -> None:
    """CASE S9: with an open connection and threads for parts that wait, both go on."""
    store.put("k", BODY, mode=CREATE)
    _fork_and_use(store, clock)
    assert store.get("child-parts") == BODY
    assert store.get("k") == BODY


def test_forked_while_a_client_is_made(
    store: S3Store, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASE S9: another thread of the parent holds the lock under which the client is made."""
    making, go = threading.Event(), threading.Event()
    real, parent = s3_client._client, os.getpid()

    def slow(settings: S3Settings) -> object:
        if os.getpid() == parent:
            making.set()
            assert go.wait(_WAIT_S)
        return real(settings)

    monkeypatch.setattr(s3_client, "_client", slow)
    _fork_during_a_put(store, clock, making, go)


def test_forked_while_parts_are_in_flight(store: S3Store, clock: FakeClock, proxy: S3Proxy) -> None:
    """CASE S9: another thread of the parent is in the middle of an upload; neither disturbs the
    other's connection."""
    arrived, go = threading.Event(), threading.Event()

    def hold() -> None:
        arrived.set()
        assert go.wait(_WAIT_S)

    proxy.add("PUT", "partNumber=2", Before(hold))
    _fork_during_a_put(store, clock, arrived, go)
