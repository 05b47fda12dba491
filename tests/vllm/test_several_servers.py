"""Several API servers over several engine cores: one of them leads, all say what it has proved."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from deltastore.events import ActorJoined, SafePointPassed
from deltastore.observability.jsonl import read_events
from tests.vllm.api_server import BEGIN, END, Answer, ApiServer, fault_of, following_server
from tests.vllm.kit import tiny_qwen3
from tests.vllm.poisoned import ONE
from tests.vllm.runs import TinyRun

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.vllm
CORES = 2
ASKED = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    """The run of a tiny model."""
    folder = tmp_path_factory.mktemp("several")
    made = TinyRun(folder, tiny_qwen3(folder / "model", tied=True))
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(run: TinyRun) -> Iterator[ApiServer]:
    """`vllm serve` with two engine cores and two API servers behind one port."""
    with following_server(
        run, *("--data-parallel-size", str(CORES)), *("--api-server-count", "2")
    ) as started:
        yield started


def agree(server: ApiServer, label: str) -> bool:
    """Whether both servers say that all cores are at that version, and one of them that it leads.

    The kernel spreads connections over the two.
    """
    shown = [server.status() for _ in range(ASKED)]
    ranks = {tuple(rank["active"] for rank in one["ranks"]) for one in shown}
    return (
        {one["served"] for one in shown} == {label}
        and {one["leads"] for one in shown} == {True, False}
        and ranks == {(label,) * CORES}
    )


def health(server: ApiServer) -> set[int]:
    """What both say of the engine's health."""
    return {server.ask("GET", "/health").status for _ in range(ASKED)}


def test_all_servers_and_cores_follow_together(server: ApiServer, run: TinyRun) -> None:
    """One of two servers pauses both cores, once for each version; every answer of both names the
    versions that it came from, and after an update both name the new one."""
    labels = [run.label(0)]
    server.until(lambda: agree(server, labels[0]))
    over = threading.Event()

    def ask() -> list[Answer]:
        found = []
        while not over.is_set():
            found.append(server.complete(40))
        return found

    with ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(ask) for _ in range(2)]
        try:
            for _ in range(3):
                labels.append(run.label(run.publish()))
                server.until(lambda: agree(server, labels[-1]))
        finally:
            over.set()
        answers = [answer for one in busy for answer in one.result()]
    assert {answer.status for answer in answers} == {200}
    for answer in answers:
        assert labels.index(answer.headers[BEGIN]) <= labels.index(answer.headers[END])
    after = [server.complete(2).headers for _ in range(ASKED)]
    assert {(one[BEGIN], one[END]) for one in after} == {(labels[-1], labels[-1])}
    assert health(server) == {200}
    events = [one.event for one in read_events(run.folder / "events")]
    assert len([one for one in events if isinstance(one, ActorJoined)]) == 1
    passed = [one.version for one in events if isinstance(one, SafePointPassed)]
    assert passed == [1, 2, 3]
    text = server.ask("GET", "/metrics").text
    assert 'deltastore_safe_point_seconds_count{run="r1",stage="pause"} 3.0' in text


def test_cores_that_part_leave_rotation_together(server: ApiServer, run: TinyRun) -> None:
    """One core's weights get lost, the other's become the new version's: both servers answer 503
    and serve nothing of either, until both cores are at one version again (CASE R2)."""
    fault_of(run).write_text(ONE, encoding="ascii")
    label = run.label(run.publish())
    server.until(lambda: health(server) == {503})
    assert {server.complete(2).status for _ in range(ASKED)} == {503}
    assert "the test has the memory fail" in server.ask("GET", "/health").document["reason"]
    fault_of(run).unlink()
    server.until(lambda: health(server) == {200} and agree(server, label))
    after = [server.complete(2) for _ in range(ASKED)]
    assert {(one.status, one.headers[BEGIN]) for one in after} == {(200, label)}
