"""What only a real server can do to its clients: die, forget, evict, fill up, change roles."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.crc import key_slot

from deltastore.cli.status import fleet_document
from deltastore.clock import SystemClock
from deltastore.coordination.backend import (
    ActorRecord,
    ActorState,
    AdmittedResult,
    HeadHint,
    JobOffer,
    Settled,
)
from deltastore.coordination.redis import RedisCoordination
from deltastore.coordination.scripts import NAMES, key_of, load_scripts
from deltastore.errors import CoordinationError, FormatError, InvalidInputError, Kind
from deltastore.testing.clock import FakeClock
from deltastore.testing.fleet import (
    TTL_S,
    Fleet,
    active,
    claim_of,
    gate_of,
    policy_hash_of,
)
from deltastore.testing.redis_line import RedisLine
from deltastore.testing.servers import RedisServer, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _never(_seconds: float) -> None:
    raise AssertionError("these tests run on the server's own time")


@pytest.fixture
def fleet(redis_server: RedisServer) -> Iterator[Fleet]:
    """A run of its own on the shared server, on real Redis TIME."""
    coordination = RedisCoordination(
        redis_server.url, f"run-{secrets.token_hex(6)}", SystemClock(), timeout_s=5.0
    )
    yield Fleet(coordination, _never)
    coordination.close()


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server that the test may kill, fill or misconfigure."""
    with RedisServer() as server:
        yield server


def _wait_for(fleet: Fleet, seconds: float) -> None:
    """Ask the server for its time until that much has passed."""
    end_s = fleet.coordination.now_s() + seconds
    while fleet.coordination.now_s() <= end_s:
        pass


# the start


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_an_evicting_server_is_refused(policy: str) -> None:
    """CASE L2: any policy but noeviction is refused at start, with the command that sets it."""
    with RedisServer(maxmemory_policy=policy) as server:
        with pytest.raises(CoordinationError) as refused:
            RedisCoordination(server.url, "r1", FakeClock())
        assert refused.value.kind is Kind.REDIS_POLICY
        assert "CONFIG SET maxmemory-policy noeviction" in str(refused.value)


def test_no_server_is_named() -> None:
    """A Redis that is down is named with its address and a hint, within the retries."""
    port = free_port()
    clock = FakeClock()
    with pytest.raises(CoordinationError) as down:
        RedisCoordination(f"redis://user:hunter2@127.0.0.1:{port}/0", "r1", clock)
    assert down.value.kind is Kind.REDIS_UNAVAILABLE
    assert f"127.0.0.1:{port}" in str(down.value)
    assert "hunter2" not in str(down.value)
    assert sum(clock.slept_s) < 1.0


@pytest.mark.parametrize("scheme", ["redis+cluster", "rediss", "rediss+cluster"])
def test_every_scheme_names_a_dead_server(scheme: str) -> None:
    """Cluster and TLS clients report a dead server as the plain one does."""
    with pytest.raises(CoordinationError) as down:
        RedisCoordination(f"{scheme}://127.0.0.1:{free_port()}", "r1", FakeClock())
    assert down.value.kind is Kind.REDIS_UNAVAILABLE


def test_wrong_credentials_are_named_at_once() -> None:
    """A wrong password is not retried and not repeated in the message."""
    with RedisServer() as server:
        with redis.Redis.from_url(server.url) as admin:
            admin.execute_command("ACL", "SETUSER", "actor", "on", ">right", "~*", "+@all")
        clock = FakeClock()
        with pytest.raises(CoordinationError) as refused:
            RedisCoordination(f"redis://actor:wrong@{server.endpoint}/0", "r1", clock)
        assert refused.value.kind is Kind.REDIS_UNAVAILABLE
        assert "password" in str(refused.value)
        assert "wrong@" not in str(refused.value)
        assert clock.slept_s == []


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://localhost",
        "localhost:6379",
        "redis://localhost:port",
        "redis://.",
        f"redis://{'a' * 64}",
        "redis://\u202e",
        "redis://localhost/first",
        "redis://localhost/0?colour=red",
        "redis+cluster://localhost:port",
    ],
)
def test_a_bad_url_is_refused(url: str) -> None:
    """A URL that no Redis client takes is refused with the forms that work."""
    with pytest.raises(InvalidInputError) as refused:
        RedisCoordination(url, "r1", FakeClock())
    assert refused.value.kind is Kind.URL


@pytest.mark.parametrize("timeout_s", [0.0, 0.0004, -1.0, float("nan")])
def test_absurd_timeouts_are_refused(redis_server: RedisServer, timeout_s: float) -> None:
    """CASE L11: a timeout no answer can meet is refused, not rounded to 'forever'."""
    with pytest.raises(InvalidInputError):
        RedisCoordination(redis_server.url, "r1", FakeClock(), timeout_s=timeout_s)


# time


def test_leases_run_on_redis_time(redis_server: RedisServer, fleet: Fleet) -> None:
    """CASE L1: with the shipped clock a lease ends by the server's TIME, and the work returns."""
    with redis.Redis.from_url(redis_server.url) as client:
        seconds, microseconds = client.time()
    assert -0.001 <= fleet.coordination.now_s() - (seconds + microseconds / 1e6) < 5
    fleet.join("a1", "a2")
    fleet.offer("j1")
    lease = fleet.lease("a1", lease_s=0.05)
    _wait_for(fleet, 0.06)
    assert fleet.settle(lease, "a1") is Settled.LATE
    assert [job.job_id for job in fleet.coordination.reap()] == ["j1"]
    assert fleet.settle(fleet.lease("a2"), "a2") is Settled.ADMITTED


_HOLDER = """
import sys
from deltastore.clock import SystemClock
from deltastore.coordination.redis import RedisCoordination
from deltastore.testing.fleet import Fleet, claim_of

fleet = Fleet(RedisCoordination(sys.argv[1], sys.argv[2], SystemClock()), lambda s: None)
fleet.join("stopped")
lease = fleet.lease("stopped", lease_s=0.2)
print("held", flush=True)
sys.stdin.readline()
print(fleet.coordination.settle(claim_of(lease, "stopped")), flush=True)
"""


def test_a_stopped_holder_is_refused(redis_server: RedisServer) -> None:
    """CASE L1: a holder stopped past its lease wakes and settles; the work is another's by then."""
    run = f"run-{secrets.token_hex(6)}"
    fleet = Fleet(RedisCoordination(redis_server.url, run, SystemClock()), _never)
    fleet.join("other")
    fleet.offer("j1")
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, redis_server.url, run],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        os.kill(holder.pid, signal.SIGSTOP)
        try:
            holder.stdin.write("go on\n")
            holder.stdin.flush()
            _wait_for(fleet, 0.21)
            assert [job.actor_id for job in fleet.coordination.reap()] == ["stopped"]
            assert fleet.settle(fleet.lease("other"), "other") is Settled.ADMITTED
        finally:
            os.kill(holder.pid, signal.SIGCONT)
        assert holder.stdout.readline() == "duplicate\n"
    (result,) = fleet.coordination.take_settled(10, 0.0)
    assert result.settlement.actor_id == "other"
    fleet.coordination.close()


def test_waits_end_when_closed(fleet: Fleet) -> None:
    """Waits in other threads end well, soon after close, whatever they were doing then."""
    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(fleet.coordination.wait_head_hint, 0, 600.0) for _ in range(4)]
        fleet.coordination.close()
        assert [wait.result(30) for wait in waits] == [None] * 4


def test_close_takes_no_connection_from_a_call(redis_server: RedisServer) -> None:
    """Calls in flight in other threads while one closes get their answers."""
    for _ in range(20):
        coordination = RedisCoordination(redis_server.url, "r1", SystemClock())
        with ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(coordination.now_s) for _ in range(20)]
            coordination.close()
            assert all(call.result(30) > 0 for call in calls)


# losses


def test_scripts_may_vanish(redis_server: RedisServer, fleet: Fleet) -> None:
    """CASE L7: SCRIPT FLUSH between every call changes nothing."""
    with redis.Redis.from_url(redis_server.url) as admin:
        steps: list[Callable[[], object]] = [
            lambda: fleet.join("a1"),
            lambda: fleet.offer("j1", "j2"),
            lambda: leases.append(fleet.lease("a1")),
            lambda: leases.append(fleet.lease("a1")),
            lambda: fleet.coordination.renew(leases[0].job_id, leases[0].token, 1, 20.0, 60.0),
            lambda: fleet.coordination.hand_back(leases[1].job_id, leases[1].token),
            lambda: answers.append(fleet.settle(leases[0], "a1")),
            fleet.coordination.reap,
            lambda: results.extend(fleet.coordination.take_settled(10, 0.0)),
        ]
        leases: list[Any] = []
        answers: list[Settled] = []
        results: list[AdmittedResult] = []
        for step in steps:
            admin.script_flush()
            step()
    assert answers == [Settled.ADMITTED]
    assert [result.settlement.job_id for result in results] == ["j1"]


def test_a_restart_empty_handed(own_server: RedisServer) -> None:
    """After Redis restarts empty actors register again, old leases are unknown, work goes on."""
    fleet = Fleet(RedisCoordination(own_server.url, "r1", SystemClock()), _never)
    fleet.join("a1")
    fleet.offer("j1")
    old = fleet.lease("a1")
    own_server.kill()
    with pytest.raises(CoordinationError) as down:
        fleet.coordination.heartbeat("a1", active(), TTL_S)
    assert down.value.kind is Kind.REDIS_UNAVAILABLE
    own_server.restart()
    assert not fleet.coordination.heartbeat("a1", active(), TTL_S)
    assert fleet.settle(old, "a1") is Settled.UNKNOWN
    fleet.join("a1")
    assert fleet.offer("j1") == 1
    assert fleet.settle(old, "a1") is Settled.NOT_HOLDER
    assert fleet.settle(fleet.lease("a1"), "a1") is Settled.ADMITTED
    fleet.coordination.close()


def test_out_of_memory_is_named(own_server: RedisServer) -> None:
    """CASE L2: on OOM offers stop with a clear error; reading, settling, leaving still work."""
    fleet = Fleet(RedisCoordination(own_server.url, "r1", SystemClock()), _never)
    fleet.join("a1")
    fleet.offer("j1")
    with redis.Redis.from_url(own_server.url) as admin:
        admin.config_set("maxmemory", "1mb")
        big = [JobOffer(f"big{i}", bytes(200_000), gate_of(1), 1) for i in range(100)]
        with pytest.raises(CoordinationError) as full:
            fleet.coordination.offer(big)
        assert full.value.kind is Kind.REDIS_MEMORY
        assert len(fleet.coordination.members()) == 1
        assert fleet.coordination.job_counts().open >= 1
        admin.config_set("maxmemory", "0")
    assert fleet.settle(fleet.lease("a1"), "a1") is Settled.ADMITTED
    fleet.coordination.close()


class _PromotesWhileWaiting(FakeClock):
    """A failover that completes while a client waits to try again."""

    def __init__(self, promote: Callable[[], object]) -> None:
        super().__init__()
        self._promote = promote

    def sleep_s(self, seconds: float) -> None:
        super().sleep_s(seconds)
        self._promote()


def test_a_replica_is_waited_for(own_server: RedisServer) -> None:
    """CASE L8: READONLY after a failover is repeated on new connections, then it works."""
    with redis.Redis.from_url(own_server.url) as admin:
        clock = _PromotesWhileWaiting(lambda: admin.replicaof("NO", "ONE"))
        coordination = RedisCoordination(own_server.url, "r1", clock)
        admin.replicaof("127.0.0.1", str(free_port()))
        admin.config_set("replica-serve-stale-data", "yes")
        coordination.register(ActorRecord("a1", "eu", "test", 1), TTL_S)
        assert clock.slept_s == [0.05]
        assert len(coordination.members()) == 1
        coordination.close()


def test_a_lasting_replica_is_unavailable(own_server: RedisServer) -> None:
    """CASE L8: a server that stays a replica is reported within a bounded time."""
    with redis.Redis.from_url(own_server.url) as admin:
        clock = FakeClock()
        coordination = RedisCoordination(own_server.url, "r1", clock)
        admin.replicaof("127.0.0.1", str(free_port()))
        with pytest.raises(CoordinationError) as lost:
            coordination.register(ActorRecord("a1", "eu", "test", 1), TTL_S)
        assert lost.value.kind is Kind.REDIS_UNAVAILABLE
        assert "is a read-only replica" in str(lost.value)
        assert sum(clock.slept_s) < 1.0
        coordination.close()


def test_a_replicas_url_is_refused_at_once(
    own_server: RedisServer, redis_server: RedisServer
) -> None:
    """A URL that names a replica is refused before work begins; who only reads may use it."""
    with redis.Redis.from_url(own_server.url) as admin:
        admin.replicaof("127.0.0.1", str(redis_server.port))
    clock = FakeClock()
    with pytest.raises(CoordinationError) as refused:
        RedisCoordination(own_server.url, "r1", clock)
    assert refused.value.kind is Kind.REDIS_UNAVAILABLE
    assert f"Redis at {own_server.endpoint}/0 is a read-only replica" in str(refused.value)
    assert "name its primary in the URL" in str(refused.value)
    assert sum(clock.slept_s) < 1.0
    with closing(RedisCoordination(own_server.url, "r1", clock, only_reads=True)) as observer:
        assert fleet_document(observer, "r1")["actors"] == []


def test_a_failover_is_waited_for_at_the_start(own_server: RedisServer) -> None:
    """A replica that becomes the primary while a client connects is taken."""
    with redis.Redis.from_url(own_server.url) as admin:
        admin.replicaof("127.0.0.1", str(free_port()))
        clock = _PromotesWhileWaiting(lambda: admin.replicaof("NO", "ONE"))
        with closing(RedisCoordination(own_server.url, "r1", clock)) as coordination:
            coordination.register(ActorRecord("a1", "eu", "test", 1), TTL_S)
    assert clock.slept_s == [0.05]


def test_lost_answers_change_nothing(redis_server: RedisServer) -> None:
    """CASE L5: an answer lost after the effect gives, when asked again, the same answer."""
    line = RedisLine(redis_server.port)
    clock = FakeClock()
    run = f"run-{secrets.token_hex(6)}"
    fleet = Fleet(RedisCoordination(line.url, run, clock), _never)

    def losing(call: Callable[[], Any]) -> Any:
        before = line.lost
        line.lose_next_answer()
        answer = call()
        assert line.lost == before + 1
        return answer

    c = fleet.coordination
    losing(lambda: fleet.join("a1"))
    losing(lambda: fleet.offer("j1", "j2"))
    assert c.job_counts().open == 2
    lease = losing(lambda: fleet.lease("a1"))
    assert c.job_counts().leased == 1
    assert losing(lambda: c.renew(lease.job_id, lease.token, 5, 20.0, 60.0))
    assert losing(lambda: fleet.settle(lease, "a1")) is Settled.ADMITTED
    assert c.outcome_counts()[Settled.DUPLICATE] == 0
    assert fleet.settle(lease, "a1") is Settled.DUPLICATE
    assert losing(lambda: len(c.take_settled(10, 0.0))) == 1
    assert c.take_settled(10, 0.0) == []
    other = fleet.lease("a1")
    assert losing(lambda: c.hand_back(other.job_id, other.token))
    assert losing(lambda: c.withdraw([other.job_id])) in (0, 1)
    losing(lambda: c.leave("a1"))
    assert c.members() == []
    c.close()
    line.close()


def test_a_forked_child_has_its_own_line(fleet: Fleet) -> None:
    """CASE L9: after a fork parent and child both get their own answers."""
    fleet.join("a1")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            names = [member.actor_id for _ in range(50) for member in fleet.coordination.members()]
            os.write(writer, b"ok" if names == ["a1"] * 50 else b"bad")
        finally:
            os._exit(0)
    os.close(writer)
    leases = [fleet.coordination.head_hint() for _ in range(50)]
    with os.fdopen(reader, "rb") as answer:
        assert answer.read() == b"ok"
    os.waitpid(child, 0)
    assert leases == [None] * 50
    assert len(fleet.coordination.members()) == 1


# the keyspace


def test_every_key_has_the_hash_tag() -> None:
    """CASE L6: all keys of all scripts of a run are in one slot, and only the run's tag decides."""
    scripts = load_scripts()
    assert set(scripts) == set(NAMES)
    keys = {key_of("run-1", key) for script in scripts.values() for key in script.keys}
    assert len(keys) > 15
    assert {key_slot(key.encode()) for key in keys} == {key_slot(b"run-1")}


def test_runs_do_not_meet(redis_server: RedisServer, fleet: Fleet) -> None:
    """Two runs on one server share nothing."""
    other = RedisCoordination(redis_server.url, f"run-{secrets.token_hex(6)}", SystemClock())
    fleet.join("a1")
    fleet.offer("j1")
    assert other.members() == []
    assert other.job_counts().open == 0
    other.close()


def test_every_key_expires(own_server: RedisServer) -> None:
    """A run nobody touches leaves nothing behind: every key it wrote has a TTL."""
    fleet = Fleet(RedisCoordination(own_server.url, "r1", SystemClock()), _never)
    fleet.join("a1", "a2")
    fleet.coordination.announce_head(HeadHint(1, policy_hash_of(1), 1))
    fleet.offer("j1", "j2", "j3", closes_at_s=fleet.coordination.now_s() + 60)
    fleet.offer("s1", assigned_to="a2")
    first = fleet.lease("a1")
    fleet.settle(first, "a1")
    fleet.lease("a1")
    fleet.coordination.take_settled(1, 0.0)
    fleet.coordination.set_throughput({"a1": 1.0}, TTL_S)
    fleet.coordination.withdraw(["j3"])
    with redis.Redis.from_url(own_server.url) as client:
        ttls = {key: client.pttl(key) for key in client.keys("*")}
    assert len(ttls) > 15
    assert all(ttl > 0 for ttl in ttls.values()), ttls
    fleet.coordination.close()


# hostile values


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("actors", "a1", b"not json"),
        (
            "actors",
            "a1",
            b'{"actor_id":"a/1","region":"eu","engine":"x","threads":1,"joined_note":""}',
        ),
        ("status", "a1", b'{"state":"lost"}'),
        ("status", "a1", b"[" * 100_000),
        ("rates", "a1", b'{"rate":NaN,"expires_ms":9999999999999}'),
        ("rates", "a1", b'{"rate":1e999,"expires_ms":9999999999999}'),
        ("rates", "a1", b'{"rate":true,"expires_ms":9999999999999}'),
        ("samples", "a1", b"{}"),
        ("samples", "a1", b"[[1,2,3]]"),
        ("samples", "a1", b"[[1,-2,3,1]]"),
        ("outcomes", "admitted", b"many"),
        ("outcomes", "invented", b"1"),
    ],
)
def test_garbage_is_refused(redis_server: RedisServer, name: str, field: str, value: bytes) -> None:
    """What somebody else wrote into Redis is a FormatError(payload), never a value."""
    run = f"run-{secrets.token_hex(6)}"
    coordination = RedisCoordination(redis_server.url, run, SystemClock())
    coordination.register(ActorRecord("a1", "eu", "test", 1), TTL_S)
    with redis.Redis.from_url(redis_server.url) as client:
        client.hset(key_of(run, name), field, value)
    reads: dict[str, Callable[[], object]] = {
        "actors": coordination.members,
        "status": coordination.members,
        "rates": coordination.throughput,
        "samples": coordination.throughput,
        "outcomes": coordination.outcome_counts,
    }
    with pytest.raises(FormatError) as refused:
        reads[name]()
    assert refused.value.kind is Kind.PAYLOAD
    coordination.close()


@pytest.mark.parametrize(
    "change",
    [
        {"policy_hash": "x"},
        {"tokens": -1},
        {"tokens": 1.5},
        {"job_id": "../x"},
        {"region": None},
        {"granted_ms": -5},
        {"extra": 1},
    ],
)
def test_a_forged_result_is_refused(fleet: Fleet, redis_server: RedisServer, change: Any) -> None:
    """A queued result that a settlement could not have made is a FormatError(payload)."""
    fleet.join("a1")
    fleet.offer("j1")
    lease = fleet.lease("a1")
    assert fleet.coordination.settle(claim_of(lease, "a1")) is Settled.ADMITTED
    with redis.Redis.from_url(redis_server.url) as client:
        (key,) = [
            key
            for key in client.scan_iter("deltastore:*:admitted", count=1000)
            if b'"token":"' + lease.token.encode() in (client.hget(key, "j1") or b"")
        ]
        forged = json.loads(client.hget(key, "j1")) | change
        client.hset(key, "j1", json.dumps(forged))
    with pytest.raises(FormatError) as refused:
        fleet.coordination.take_settled(1, 0.0)
    assert refused.value.kind is Kind.PAYLOAD


def test_a_forged_head_is_refused(redis_server: RedisServer) -> None:
    """A head hint that no manifest could carry is a FormatError(payload); a new one replaces it."""
    run = f"run-{secrets.token_hex(6)}"
    coordination = RedisCoordination(redis_server.url, run, SystemClock())
    with redis.Redis.from_url(redis_server.url) as client:
        client.set(key_of(run, "head"), b'{"version":-1,"policy_hash":"","generation":0}')
        with pytest.raises(FormatError):
            coordination.head_hint()
        client.set(key_of(run, "head"), b"\xff\xfe")
    hint = HeadHint(1, policy_hash_of(1), 1)
    coordination.announce_head(hint)
    assert coordination.head_hint() == hint
    assert ActorState.LOST not in {member.state for member in coordination.members()}
    coordination.close()
