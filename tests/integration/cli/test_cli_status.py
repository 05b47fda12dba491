"""`deltastore status` on a real Redis: what it shows, and what it says when there is none."""

from __future__ import annotations

import json
import secrets
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import redis
from typer.testing import CliRunner

from deltastore.cli.app import app
from deltastore.cli.status import RedisAccess, fleet_document, watch_fleet
from deltastore.clock import SystemClock
from deltastore.coordination.backend import ActorState, ActorStatus, HeadHint, Settled
from deltastore.coordination.memory import MemoryCoordination
from deltastore.coordination.redis import RedisCoordination
from deltastore.testing.clock import FakeClock
from deltastore.testing.fleet import TTL_S, Fleet, policy_hash_of
from deltastore.testing.servers import RedisServer, free_port
from tests.integration.cli.cli_kit import documented

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _never(_seconds: float) -> None:
    raise AssertionError("these tests run on the server's own time")


@pytest.fixture
def busy(redis_server: RedisServer) -> Iterator[tuple[str, str]]:
    """A run with four actors in different states; the server's URL and the run's name."""
    run = f"run-{secrets.token_hex(6)}"
    coordination = RedisCoordination(redis_server.url, run, SystemClock())
    fill(Fleet(coordination, _never))
    yield redis_server.url, run
    coordination.close()


def fill(fleet: Fleet) -> None:
    """Head 3; `fast` with a lease at 3, `late` at 2, `sick` poisoned, `new` joining."""
    c = fleet.coordination
    c.announce_head(HeadHint(3, policy_hash_of(3), 1))
    fleet.join("fast", version=3)
    fleet.join("late", version=2)
    fleet.join("new", version=3)
    fleet.join("sick", version=3)
    c.heartbeat("sick", ActorStatus(ActorState.POISONED, 3, policy_hash_of(3), note="bad"), TTL_S)
    fleet.offer("j1", "j2", "j3", gate=((3, policy_hash_of(3)),))
    first = fleet.lease("fast", version=3)
    fleet.lease("fast", version=3)
    assert fleet.settle(first, "fast") is Settled.ADMITTED
    c.set_throughput({"fast": 30.0, "late": 10.0, "sick": 99.0}, TTL_S)


def _run(*words: str, env: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(app, ["status", *words], env=env)


def test_status_as_json(busy: tuple[str, str]) -> None:
    """Every documented key, per actor and for the run; shares are of those who may work."""
    shown = _run(*busy, "--json")
    assert shown.exit_code == 0, shown.output
    document = json.loads(shown.stdout)
    assert list(document) == documented("status")
    assert (document["run"], document["known"], document["head"]) == (busy[1], True, 3)
    rows = {row["actor"]: row for row in document["actors"]}
    assert list(rows["fast"]) == documented("An actor")
    facts = ("state", "version", "staleness", "tau_tokens_per_s", "share", "leases", "note")
    assert {name: tuple(row[fact] for fact in facts) for name, row in rows.items()} == {
        "fast": ("active", 3, 0, 30.0, 0.75, 1, ""),
        "late": ("active", 2, 1, 10.0, 0.25, 0, ""),
        "new": ("active", 3, 0, None, None, 0, ""),
        "sick": ("poisoned", 3, 0, 99.0, None, 0, "bad"),
    }
    assert 0 < rows["fast"]["lease_left_s"] <= 10
    assert rows["late"]["lease_left_s"] is None
    assert document["jobs"] == {"open": 1, "dealt": 0, "leased": 1, "settled": 1, "parked": 0}
    assert document["outcomes"]["admitted"] == 1


def test_status_for_people(busy: tuple[str, str]) -> None:
    """One line per actor, and what became of the work."""
    shown = _run(*busy)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0] == f"{busy[1]}: head 3, 4 actors"
    (fast,) = [line for line in lines if line.startswith("fast")]
    assert fast.split()[:8] == ["fast", "eu", "active", "3", "0", "30", "tok/s", "75%"]
    assert "results: 1 admitted" in lines


def test_redis_and_memory_show_the_same(busy: tuple[str, str]) -> None:
    """The document is one of the protocol: both backends give it."""
    memory = MemoryCoordination(SystemClock())
    fill(Fleet(memory, _never))
    coordination = RedisCoordination(*busy, SystemClock())
    found = [fleet_document(c, "r") for c in (memory, coordination)]
    coordination.close()
    for document in found:
        document["redis_time_s"] = 0
        for row in document["actors"]:
            row["heartbeat_age_s"], row["lease_left_s"] = 0, row["lease_left_s"] is not None
    assert found[0] == found[1]


def test_nobody_there(redis_server: RedisServer) -> None:
    """A run that nobody has joined is an empty fleet, not an error: Redis may have restarted."""
    shown = _run(redis_server.url, "nobody-here", "--json")
    assert shown.exit_code == 0
    document = json.loads(shown.stdout)
    assert (document["actors"], document["head"], document["known"]) == ([], None, False)
    told = _run(redis_server.url, "nobody-here")
    assert told.exit_code == 0
    assert told.stdout.splitlines()[-1].startswith("Redis knows no run of this name")


@pytest.mark.parametrize(
    "deed",
    [
        lambda fleet: fleet.coordination.announce_head(HeadHint(1, policy_hash_of(1), 1)),
        lambda fleet: fleet.join("a1"),
        lambda fleet: fleet.offer("j1"),
    ],
    ids=["head", "actor", "job"],
)
def test_any_trace_makes_a_run_known(
    redis_server: RedisServer, deed: Callable[[Fleet], object]
) -> None:
    """A run of which Redis holds anything is known, and nothing is said of a mistyped name."""
    run = f"run-{secrets.token_hex(6)}"
    with closing(RedisCoordination(redis_server.url, run, SystemClock())) as coordination:
        deed(Fleet(coordination, _never))
    assert json.loads(_run(redis_server.url, run, "--json").stdout)["known"]
    assert "mistyped" not in _run(redis_server.url, run).stdout


def test_a_replica_will_do(redis_server: RedisServer) -> None:
    """Who only looks may look at a replica, from which nobody could work."""
    with RedisServer() as replica, redis.Redis.from_url(replica.url) as admin:
        admin.replicaof("127.0.0.1", str(redis_server.port))
        shown = _run(replica.url, "nobody-here")
        assert shown.exit_code == 0, shown.output
        assert shown.stdout.startswith("nobody-here: head -, 0 actors")


def test_redis_down_is_exit_9() -> None:
    """Without Redis the exit code is 9, with and without --watch."""
    url = f"redis://127.0.0.1:{free_port()}/0"
    for extra in ((), ("--watch",)):
        down = _run(url, "r1", *extra)
        assert down.exit_code == 9
        assert down.stderr.startswith("deltastore: redis_unavailable: ")
    document = json.loads(_run(url, "r1", "--json").stdout)
    assert document["error"]["exit_code"] == 9


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (("redis://:hunter2@localhost/0", "r1"), "url"),
        (("http://localhost", "r1"), "url"),
        (("redis://localhost", "../r"), "name"),
        (("redis://localhost", "r1", "--user", "observer"), "setting"),
        (("redis://localhost", "r1", "--password-env", "NOT_THERE_AT_ALL"), "setting"),
        (("redis://localhost", "r1", "--watch", "--json"), "setting"),
    ],
)
def test_bad_words(words: tuple[str, ...], kind: str) -> None:
    """Bad arguments are exit 2 with a way out, and no password is repeated."""
    refused = _run(*words)
    assert refused.exit_code == 2
    assert f"deltastore: {kind}: " in refused.stderr
    assert "hunter2" not in refused.output


def test_an_observer_may_look(busy: tuple[str, str], redis_server: RedisServer) -> None:
    """The user with the least rights of ACL.md sees everything there is to see."""
    from importlib import resources

    page = (resources.files("deltastore.coordination") / "ACL.md").read_text(encoding="utf-8")
    (line,) = [li for li in page.splitlines() if li.startswith("ACL SETUSER observer")]
    words = line.replace("{RUN}", f"{{{busy[1]}}}").replace("PASSWORD", "look").split()[3:]
    with redis.Redis.from_url(redis_server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "looker", *words)
    shown = _run(*busy, "--user", "looker", "--password-env", "PW", env={"PW": "look"})
    assert shown.exit_code == 0, shown.output
    assert "head 3, 4 actors" in shown.stdout


@pytest.mark.parametrize(
    ("looks", "last"),
    [
        (2, "r1: head 3, 4 actors"),  # the server is dead: what was there before
        (3, "r1: head -, 0 actors"),  # it is back, with nothing in it
    ],
)
def test_watching_outlives_an_outage(
    capsys: pytest.CaptureFixture[str], looks: int, last: str
) -> None:
    """While Redis is away the last picture stays and says so; then it goes on."""
    with RedisServer() as server:
        coordination = RedisCoordination(server.url, "r1", SystemClock())
        fill(Fleet(coordination, _never))
        coordination.close()
        actions = [server.kill, server.restart]

        class Script(FakeClock):
            """Between two looks something happens to the server."""

            def sleep_s(self, seconds: float) -> None:
                super().sleep_s(seconds)
                if seconds == 7.0:
                    actions.pop(0)()

        watch_fleet(RedisAccess(server.url), "r1", every_s=7.0, clock=Script(), looks=looks)
    shown = capsys.readouterr().out
    assert last in shown
    assert ("as last seen; Redis at" in shown) == (looks == 2)
