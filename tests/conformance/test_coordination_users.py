"""A user with one right too many is found by whoever should not have it: each role, on a server."""

from __future__ import annotations

import re
import secrets
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest
import redis

from deltastore.clock import SystemClock
from deltastore.coordination.backend import (
    ActorRecord,
    HeadHint,
    JobOffer,
    Pull,
    SegmentHint,
    Settled,
)
from deltastore.coordination.redis import RedisCoordination
from deltastore.coordination.scripts import key_of, load_scripts, read_lua
from deltastore.errors import CoordinationError, Kind
from deltastore.testing.fleet import LEASE_S, TTL_S, active, claim_of, gate_of, policy_hash_of
from deltastore.testing.servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RUN = "mine"
PASSWORD = "pass-" + secrets.token_hex(4)
SCRIPTS = {
    "trainer": "announce announce_segment offer limit_pulls take reap withdraw counts members"
    " throughput set_throughput now",
    "actor": "register heartbeat leave grant renew hand_back settle",
    "observer": "members counts outcomes throughput running now",
}
ALSO = {"eval", "evalsha", "info", "select", "get"}  # and `get` for the hints
READS = {"actor": {"head", "segments"}, "observer": {"head"}}


def _lines() -> dict[str, list[str]]:
    """The words of each role's line in ACL.md."""
    page = (resources.files("deltastore.coordination") / "ACL.md").read_text(encoding="utf-8")
    lines = re.findall(r"^ACL SETUSER (\w+) (reset on .*)$", page, re.MULTILINE)
    return {name: rules.split() for name, rules in lines}


def _make_users(url: str, *extra: str) -> None:
    with redis.Redis.from_url(url) as admin:
        for name, rules in _lines().items():
            filled = [rule.replace("RUN", RUN).replace("PASSWORD", PASSWORD) for rule in rules]
            admin.execute_command("ACL", "SETUSER", name, *filled, *extra)


@pytest.fixture(scope="module")
def server(redis_server: RedisServer) -> RedisServer:
    """A server with the three users of the run."""
    _make_users(redis_server.url)
    return redis_server


@pytest.fixture
def connect(server: RedisServer) -> Iterator[Callable[..., RedisCoordination]]:
    """Opens coordination as a role, or as the all-powerful default user."""
    with redis.Redis.from_url(server.url) as admin:
        for key in admin.scan_iter(f"deltastore:{{{RUN}}}:*"):
            admin.delete(key)
    opened: list[RedisCoordination] = []

    def open_as(role: str | None, run: str = RUN) -> RedisCoordination:
        user = "" if role is None else f"{role}:{PASSWORD}@"
        url = f"redis://{user}{server.endpoint}/0"
        opened.append(RedisCoordination(url, run, SystemClock()))
        return opened[-1]

    yield open_as
    for coordination in opened:
        coordination.close()


def _job(name: str, **changes: Any) -> JobOffer:
    return JobOffer(name, b"do it", gate_of(1), 100, **changes)


def test_each_role_can_do_its_job(connect: Callable[..., RedisCoordination]) -> None:
    """Trainer, actor and observer do all of their work as users with their documented rights."""
    trainer, actor, observer = (connect(role) for role in SCRIPTS)
    hint = HeadHint(1, policy_hash_of(1), 1)
    trainer.announce_head(hint)
    assert [c.head_hint() for c in (trainer, actor, observer)] == [hint] * 3
    segment = SegmentHint(2, 0, policy_hash_of(2), 100)
    trainer.announce_segment(segment)
    assert actor.announced_segments() == [segment]
    for name in ("a1", "a2"):
        actor.register(ActorRecord(name, "eu", "test", 1), TTL_S)
        assert actor.heartbeat(name, active(), TTL_S)
    assert trainer.offer([_job("j1", assigned_to="a1"), _job("j2"), _job("j3"), _job("j4")]) == 4
    leases = [actor.grant("a1", 1, policy_hash_of(1), LEASE_S) for _ in range(3)]
    first, second, third = (lease for lease in leases if lease is not None)
    assert [lease.job_id for lease in observer.running_leases()] == ["j1", "j2", "j3"]
    assert actor.renew(first.job_id, first.token, 5, 2 * LEASE_S, 60.0)
    assert actor.settle(claim_of(first, "a1")) is Settled.ADMITTED
    assert actor.hand_back(second.job_id, second.token)
    actor.leave("a1")
    (result,) = trainer.take_settled(10, 0.0)
    assert result.settlement.job_id == "j1"
    lost = actor.grant("a2", 1, policy_hash_of(1), 0.05)
    assert lost is not None
    end_s = trainer.now_s() + 0.06
    while trainer.now_s() <= end_s:
        pass
    assert [job.job_id for job in trainer.reap()] == [lost.job_id]
    assert trainer.withdraw(["j3", third.job_id]) == 1
    trainer.limit_pulls({"a2": Pull(1, 1)}, TTL_S)
    trainer.set_throughput({"a2": 5.0}, TTL_S)
    assert trainer.throughput()["a2"].tokens_per_s == 5.0
    for c in (trainer, observer):
        assert [member.actor_id for member in c.members()] == ["a2"]
        assert c.job_counts().settled == 1
    assert observer.throughput()["a2"].tokens_per_s == 5.0
    assert observer.outcome_counts()[Settled.ADMITTED] == 1


_FORBIDDEN: dict[str, dict[str, Callable[[RedisCoordination], object]]] = {
    "actor": {
        "announce": lambda c: c.announce_head(HeadHint(9, policy_hash_of(9), 9)),
        "segment": lambda c: c.announce_segment(SegmentHint(9, 0, policy_hash_of(9), 1)),
        "offer": lambda c: c.offer([_job("forged")]),
        "take": lambda c: c.take_settled(1, 0.0),
        "reap": lambda c: c.reap(),
        "withdraw": lambda c: c.withdraw(["j1"]),
        "throughput": lambda c: c.set_throughput({"a1": 1e6}, TTL_S),
        "limit_pulls": lambda c: c.limit_pulls({}, TTL_S),
    },
    "observer": {
        "announce": lambda c: c.announce_head(HeadHint(9, policy_hash_of(9), 9)),
        "segment": lambda c: c.announce_segment(SegmentHint(9, 0, policy_hash_of(9), 1)),
        "offer": lambda c: c.offer([_job("forged")]),
        "register": lambda c: c.register(ActorRecord("a9", "eu", "test", 1), TTL_S),
        "leave": lambda c: c.leave("a1"),
        "grant": lambda c: c.grant("a1", 1, policy_hash_of(1), LEASE_S),
        "take": lambda c: c.take_settled(1, 0.0),
        "reap": lambda c: c.reap(),
        "withdraw": lambda c: c.withdraw(["j1"]),
        "throughput": lambda c: c.set_throughput({"a1": 1e6}, TTL_S),
    },
    "trainer": {"register": lambda c: c.register(ActorRecord("a9", "eu", "t", 1), TTL_S)},
}


@pytest.mark.parametrize(
    ("role", "what"), [(role, what) for role, calls in _FORBIDDEN.items() for what in calls]
)
def test_no_role_can_do_anothers(
    connect: Callable[..., RedisCoordination], server: RedisServer, role: str, what: str
) -> None:
    """What a role has no business with is refused at once, by name, and changes nothing."""
    admin = connect(None)
    admin.register(ActorRecord("a1", "eu", "test", 1), TTL_S)
    admin.heartbeat("a1", active(), TTL_S)
    admin.offer([_job("j1")])

    def stored() -> dict[bytes, bytes | None]:
        with redis.Redis.from_url(server.url) as client:
            return {k: client.dump(k) for k in client.scan_iter(f"deltastore:{{{RUN}}}:*")}

    before = stored()
    with pytest.raises(CoordinationError) as refused:
        _FORBIDDEN[role][what](connect(role))
    assert refused.value.kind is Kind.REDIS_SCRIPT
    assert "ACL.md" in str(refused.value)
    assert PASSWORD not in str(refused.value)
    assert stored() == before


@pytest.mark.parametrize("role", SCRIPTS)
def test_no_role_reaches_another_run(
    connect: Callable[..., RedisCoordination], server: RedisServer, role: str
) -> None:
    """A user of one run can neither read nor write another's keys, nor administer the server."""
    with pytest.raises(CoordinationError):
        connect(role, "other").members()
    with redis.Redis.from_url(f"redis://{role}:{PASSWORD}@{server.endpoint}/0") as client:
        for words in (
            ("GET", key_of("other", "head")),
            ("EVAL", "return redis.call('SET', KEYS[1], '1')", 1, key_of("other", "head")),
            ("KEYS", "*"),
            ("FLUSHALL",),
            ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"),
            ("ACL", "LIST"),
            ("SCRIPT", "FLUSH"),
            ("DEL", key_of(RUN, "jobs")),
            ("REPLICAOF", "127.0.0.1", "1"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*words)


def _used(name: str) -> set[str]:
    """The commands a script calls, itself or through the functions it shares."""
    shared = read_lua("prelude") + "\n" + read_lua("clock")
    functions = dict(re.findall(r"^local function (\w+)\(.*?\n(.*?)^end$", shared, re.M | re.S))

    def closure(text: str, above: frozenset[str]) -> set[str]:
        found = set(re.findall(r"redis\.call\('(\w+)'", text))
        for function in functions.keys() - above:
            if re.search(rf"\b{function}\(", text):
                found |= closure(functions[function], above | {function})
        return found

    body = [line for line in read_lua(name).splitlines() if not line.startswith("--")]
    return {command.lower() for command in closure("\n".join(body), frozenset())}


@pytest.mark.parametrize("role", SCRIPTS)
def test_the_lines_are_exact(role: str) -> None:
    """Each line allows the commands and keys that the role's scripts use, and no others."""
    words = _lines()[role]
    allowed = {word[1:] for word in words if word.startswith("+")}
    assert allowed == ALSO | {c for name in SCRIPTS[role].split() for c in _used(name)}
    assert [word for word in words if word[0] not in "+~%"] == ["reset", "on", ">PASSWORD"]
    keys = {word for word in words if word[0] in "~%"}
    if role == "trainer":
        assert keys == {"~" + key_of("RUN", "*")}
        return
    scripts = load_scripts()
    used = {key for name in SCRIPTS[role].split() for key in scripts[name].keys}
    read_only = {"%R~" + key_of("RUN", key) for key in READS[role]}
    assert keys == {"~" + key_of("RUN", key) for key in used} | read_only


def test_the_roles_work_in_a_cluster() -> None:
    """With the two rights that ACL.md adds for clusters, an observer and an actor work in one."""
    with RedisServer(options={"cluster-enabled": "yes"}) as node:
        with redis.Redis.from_url(node.url) as admin:
            admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)
            while b"cluster_state:ok" not in admin.execute_command("CLUSTER", "INFO"):
                pass
        page = (resources.files("deltastore.coordination") / "ACL.md").read_text(encoding="utf-8")
        extra = re.search(r"In a cluster each of them also needs `([^`]*)`", page)
        assert extra is not None
        _make_users(node.url, *extra[1].split())
        for role in ("actor", "observer"):
            url = f"redis+cluster://{role}:{PASSWORD}@{node.endpoint}"
            coordination = RedisCoordination(url, RUN, SystemClock())
            if role == "actor":
                coordination.register(ActorRecord("a1", "eu", "test", 1), TTL_S)
            else:
                assert [member.actor_id for member in coordination.members()] == ["a1"]
            coordination.close()
