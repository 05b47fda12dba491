"""`follow --vllm` says what it did, ends when told, and leaves no engine paused in silence."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from deltastore.cli.app import app
from deltastore.errors import ApplyError, Kind
from deltastore.events import ActorJoined, SafePointPassed
from deltastore.observability.jsonl import read_events
from deltastore.storage.store_use import UseCounter
from deltastore.testing.checkpoints import tiny_checkpoint
from deltastore.testing.faults import unavailable
from deltastore.testing.servers import free_port
from tests.unit.adapters.development_server import DevelopmentServer, serving
from tests.unit.pipeline.scripted_engine import Rank, ScriptedEngine, hash_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typer.testing import Result


@pytest.fixture
def run_url(tmp_path: Path) -> str:
    """A run whose HEAD is version 1: what a scripted engine starts at is 1, too."""
    url = f"file://{tmp_path}/runs/r1"
    checkpoint = tiny_checkpoint(tmp_path / "model")
    for words in (["init", url, "--checkpoint"], ["publish", url, "--step", "1"]):
        result = CliRunner().invoke(app, [*words, str(checkpoint)])
        assert result.exit_code == 0, result.output
    return url


@pytest.fixture
def server() -> Iterator[DevelopmentServer]:
    """An engine of two ranks at version 1."""
    made = DevelopmentServer(ScriptedEngine(ranks=[Rank(), Rank()]))
    with serving(made) as url:
        made.url = url
        yield made


def follow(server: DevelopmentServer, run_url: str, *words: str) -> Result:
    """The command, looking often."""
    line = ["follow", run_url, "--vllm", server.url, "--poll-s", "0.05", *words]
    return CliRunner().invoke(app, line)


def documents(result: Result) -> list[dict[str, Any]]:
    """What was printed, a document per line."""
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_once_at_the_newest_version(server: DevelopmentServer, run_url: str) -> None:
    """Nothing to do: it says where the server is, and the workers were told the run."""
    result = follow(server, run_url, "--once", "--json", "--profile", "p", "--region", "r")
    assert result.exit_code == 0, result.output
    (document,) = documents(result)
    assert (document["version"], document["policy_hash"]) == (1, hash_of(1))
    assert server.settings == {"run": run_url, "profile": "p", "region": "r"}
    assert not server.engine.paused


def test_once_from_the_version_before(server: DevelopmentServer, run_url: str) -> None:
    """What is staged is activated with the policy that was asked for, and timed for people."""
    server.engine.start, server.engine.staged = 0, 1
    result = follow(server, run_url, "--once", "--policy", "abort")
    assert result.exit_code == 0, result.output
    assert "serves version 1, " in result.stdout
    assert "ms without a forward pass" in result.stdout
    assert server.engine.requests == ["keep", "abort"]


def test_once_that_fails(server: DevelopmentServer, run_url: str) -> None:
    """An activation that fails ends it with the error; the engine serves what it served."""
    server.engine.start, server.engine.staged = 0, 1
    server.engine.faults = [("update", "before")]
    result = follow(server, run_url, "--once")
    assert result.exit_code == 10
    assert result.stderr.splitlines()[-1].startswith("deltastore: engine: ")
    assert not server.engine.paused


def test_once_that_never_comes(server: DevelopmentServer, run_url: str) -> None:
    """Nothing is staged in time: an error that says where the server is."""
    server.engine.start = 0
    result = follow(server, run_url, "--once", "--within-s", "1")
    assert result.exit_code == 10
    assert "is at version 0 after 1 s" in result.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_between_turns(
    server: DevelopmentServer, run_url: str, number: int, code: int
) -> None:
    """The turn in progress is finished, whoever ends it: the engine serves (CASE R18)."""
    server.engine.start, server.engine.staged = 0, 1
    update = server.engine.update

    def interrupted(wanted: Any) -> None:
        os.kill(os.getpid(), number)
        update(wanted)

    server.engine.update = interrupted
    before = signal.getsignal(number)
    result = follow(server, run_url, "--json")
    assert result.exit_code == code, result.output
    assert documents(result)[-1]["version"] == 1
    assert not server.engine.paused
    assert signal.getsignal(number) == before


def test_an_engine_in_doubt_is_not_left_in_silence(server: DevelopmentServer, run_url: str) -> None:
    """Ended while weights are in doubt: it stays paused, and the exit code and message say so."""
    server.engine.start, server.engine.staged = 0, 1
    server.engine.faults = [("update", "poisoned")]

    def interrupted() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise ApplyError("the store is away", kind=Kind.ENGINE)

    server.engine.re_anchor = interrupted
    result = follow(server, run_url)
    assert result.exit_code == 10
    assert "is left paused" in result.stderr
    assert server.engine.paused
    assert "is out of rotation: rank 0: the rollback failed" in result.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--out", "x"], "--vllm and --out"),
        (["--access-key-env", "A", "--secret-key-env", "B"], "say nothing to a server"),
        (["--vllm", "http://192.0.2.1:8000"], "not a server on this machine"),
        (["--trusted-keys", "/nowhere/keys"], "/nowhere/keys"),
    ],
)
def test_what_cannot_work_is_refused(
    server: DevelopmentServer, run_url: str, words: list[str], says: str
) -> None:
    """Before the engine is touched."""
    result = follow(server, run_url, "--once", *words)
    assert result.exit_code in (2, 3)
    assert says in result.stderr
    assert server.engine.calls == []


def test_every_stage_of_a_safe_point_is_observed(
    server: DevelopmentServer, run_url: str, tmp_path: Path
) -> None:
    """`--events` has the start and the safe point; `--metrics-port` counts them."""
    server.engine.start, server.engine.staged = 0, 1
    log = tmp_path / "events.jsonl"
    result = follow(server, run_url, "--once", "--events", str(log), "--metrics-port", "0")
    assert result.exit_code == 0, result.output
    joined, passed = [one.event for one in read_events(log)]
    assert isinstance(joined, ActorJoined)
    assert isinstance(passed, SafePointPassed)
    assert (joined.version, passed.base_version, passed.version) == (0, 0, 1)


def test_what_the_workers_read_is_in_the_followers_metrics(
    server: DevelopmentServer, run_url: str
) -> None:
    """Requests, bytes and retries of the engine's stager are served under the region's name, and
    the follower's own requests with them."""
    counter, port = UseCounter(), free_port()
    counter.called("", "get", "ok", 0.1)
    counter.moved("", received_bytes=123456)
    counter.retried("", unavailable())
    server.engine.start = 0
    server.engine.store = [counter.row("east")]
    status, scrapes = server.engine.status, []

    def asked() -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = re.findall(r"^deltastore_(store_.*_total)\{(.*)\} (\S+)$", text, re.MULTILINE)
        scrapes.append({f"{name} {labels}": float(value) for name, labels, value in found})
        if any(name.startswith("store_retries") for name in scrapes[-1]):
            server.engine.staged = 1  # only now: `--once` ends when it is served
        return status()

    server.engine.status = asked
    words = ["--once", "--within-s", "20", "--metrics-port", str(port), "--region-name", "east"]
    result = follow(server, run_url, *words)
    assert result.exit_code == 0, result.output
    assert server.settings["region_name"] == "east"
    before, after = scrapes[0], scrapes[-1]
    label = 'region="east",run="r1"'
    own = {"store_requests_total", "store_received_bytes_total"}
    assert {name.partition(" ")[0] for name in before} == own
    assert all(value > 0 and label in name for name, value in before.items())
    more = {name: value - before.get(name, 0) for name, value in after.items()}
    assert {name: value for name, value in more.items() if value} == {
        f'store_requests_total op="get",outcome="ok",{label}': 1,
        f"store_received_bytes_total {label}": 123456,
        f'store_retries_total cause="unavailable",{label}': 1,
    }


def test_a_port_that_is_taken_is_refused_before_the_engine_pauses(
    server: DevelopmentServer, run_url: str
) -> None:
    """The server is left as it is."""
    port = server.url.rpartition(":")[2]
    result = follow(server, run_url, "--once", "--metrics-port", port)
    assert result.exit_code == 2
    assert "metrics cannot be served" in result.output
    assert server.engine.calls == []


@pytest.mark.parametrize(
    "words", [["--events", "e.jsonl"], ["--metrics-port", "0"], ["--region-name", "east"]]
)
def test_safe_points_are_observed_of_servers_only(run_url: str, words: list[str]) -> None:
    """Without `--vllm` there are none, and the option is refused."""
    result = CliRunner().invoke(app, ["follow", run_url, "--once", *words])
    assert result.exit_code == 2
    assert "--vllm" in result.output
