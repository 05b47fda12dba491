"""A server with the plugin, without development mode: it follows, says so, and recovers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from deltastore.observability.jsonl import read_events
from deltastore.pipeline.held_lock import is_locked
from tests.vllm.api_server import BEGIN, END, Answer, ApiServer, fault_of, following_server
from tests.vllm.kit import tiny_qwen3
from tests.vllm.runs import TinyRun

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.vllm
TOKENS = 100


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRun]:
    """The run of a tiny model."""
    folder = tmp_path_factory.mktemp("server")
    made = TinyRun(folder, tiny_qwen3(folder / "model", tied=False))
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(run: TinyRun) -> Iterator[ApiServer]:
    """One server that follows it, as the documentation starts it."""
    with following_server(run) as started:
        yield started


def serves(server: ApiServer, label: str) -> bool:
    """Whether the server says that it serves that version."""
    return bool(server.status()["served"] == label)


def test_a_server_follows_three_versions_while_it_serves(server: ApiServer, run: TinyRun) -> None:
    """Every response is whole and names versions that were served; each one comes (CASE R20)."""
    server.until(lambda: server.status()["served"] is not None)
    labels = [server.status()["served"]]
    over = threading.Event()

    def ask() -> list[Answer]:
        found = [server.complete(TOKENS)]
        while not over.is_set():
            found.append(server.complete(TOKENS))
        return found

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(ask)
        try:
            for _ in range(3):
                labels.append(run.label(run.publish()))
                server.until(lambda: serves(server, labels[-1]))
        finally:
            over.set()
        answers = busy.result()
    for answer in answers:
        assert answer.status == 200
        assert answer.document["usage"]["completion_tokens"] == TOKENS
        begin, end = labels.index(answer.headers[BEGIN]), labels.index(answer.headers[END])
        assert begin <= end
    assert any(one.headers[BEGIN] != one.headers[END] for one in answers)
    last = server.complete()
    assert (last.headers[BEGIN], last.headers[END]) == (labels[-1], labels[-1])
    assert server.ask("GET", "/health").status == 200


def test_a_stream_says_where_it_began(server: ApiServer) -> None:
    """Its headers come before its end is known."""
    answer = server.complete(stream=True)
    assert answer.status == 200
    assert answer.text.rstrip().endswith("data: [DONE]")
    assert answer.headers[BEGIN] == server.status()["served"]
    assert END not in answer.headers


def test_what_happens_can_be_watched(server: ApiServer, run: TinyRun) -> None:
    """Status, the server's own metrics and the event log say the same of the last safe point."""
    status = server.status()
    last = status["last_safe_point"]
    assert (status["run"], status["leads"], status["held"]) == (run.name, True, "")
    assert last["write_s"] > 0
    assert status["ranks"][0]["active"] == status["served"]
    text = server.ask("GET", "/metrics").text
    assert f'deltastore_active_version{{run="{run.name}"}} {last["version"]}.0' in text
    assert "vllm:" in text
    events = [one.event for one in read_events(run.folder / "events")]
    assert events[-1].version == last["version"]


def test_a_poisoned_server_leaves_rotation_and_comes_back(server: ApiServer, run: TinyRun) -> None:
    """503 with the reason while weights are in doubt; a re-anchor ends it (CASE R2, R20)."""
    before = server.complete().text
    fault_of(run).touch()
    label = run.label(run.publish())
    server.until(lambda: server.ask("GET", "/health").status == 503)
    reason = server.ask("GET", "/health").document["reason"]
    assert "the test has the memory fail" in reason
    assert server.status()["held"] == reason
    refused = server.complete()
    assert refused.status == 503
    assert reason in refused.document["error"]["message"]
    assert 'deltastore_engine_held{run="r1"} 1.0' in server.ask("GET", "/metrics").text
    fault_of(run).unlink()
    server.until(lambda: server.ask("GET", "/health").status == 200)
    assert serves(server, label)
    answer = server.complete()
    assert (answer.status, answer.headers[BEGIN]) == (200, label)
    assert answer.text != before


def test_a_server_that_is_told_to_end_ends(server: ApiServer, run: TinyRun) -> None:
    """SIGTERM: its threads, its engine and its stager are gone. The last test of this server."""
    assert is_locked(run.spool / "stager.lock")
    assert server.stop() == 0
    assert not is_locked(run.spool / "stager.lock")
