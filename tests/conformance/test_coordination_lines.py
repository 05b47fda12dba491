"""Between a client and its Redis lies a line that moves, breaks, or must be secret."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

from deltastore.clock import SystemClock
from deltastore.coordination.backend import ActorRecord, HeadHint, Settled
from deltastore.coordination.redis import RedisCoordination
from deltastore.errors import CoordinationError, InvalidInputError, Kind
from deltastore.testing.clock import FakeClock
from deltastore.testing.fleet import LEASE_S, TTL_S, Fleet, active, policy_hash_of
from deltastore.testing.redis_line import RedisLine
from deltastore.testing.server_process import free_port
from deltastore.testing.servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Iterator


def _never(_seconds: float) -> None:
    raise AssertionError("these tests run on the server's own time")


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server certificate for 127.0.0.1, a client certificate, and a stranger."""
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new_key = ("req", "-newkey", "rsa:2048", "-nodes")
    for name in ("ca", "stranger"):
        openssl(
            *new_key, "-x509", "-days", "2", "-subj", f"/CN={name}",
            "-keyout", f"{name}.key", "-out", f"{name}.crt",
        )  # fmt: skip
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl(*new_key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key",
            "-CAcreateserial", "-days", "2", "-extfile", "names", "-out", f"{name}.crt",
        )  # fmt: skip
    return folder


# The embedded server has no TLS: a line speaks it for it. The distribution's own has.
_TERMINATORS = ["line"] + (["redis-server"] if shutil.which("redis-server") else [])


@pytest.fixture(params=[False, True], ids=["server-certificate", "both-certificates"])
def mutual(request: pytest.FixtureRequest) -> bool:
    """Whether clients are asked for a certificate too."""
    return bool(request.param)


@pytest.fixture(params=_TERMINATORS)
def secret_url(
    request: pytest.FixtureRequest, mutual: bool, certificates: Path, redis_server: RedisServer
) -> Iterator[str]:
    """A TLS address of a server, without the options that a client needs."""
    if request.param == "line":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
        if mutual:
            context.load_verify_locations(certificates / "ca.crt")
            context.verify_mode = ssl.CERT_REQUIRED
        with RedisLine(redis_server.port, tls=context) as line:
            yield line.url
        return
    program = shutil.which(request.param)
    assert program is not None
    port = free_port()
    options = {
        "tls-port": str(port),
        "tls-cert-file": str(certificates / "server.crt"),
        "tls-key-file": str(certificates / "server.key"),
        "tls-ca-cert-file": str(certificates / "ca.crt"),
        "tls-auth-clients": "yes" if mutual else "no",
    }
    with RedisServer(program=Path(program), options=options):
        yield f"rediss://127.0.0.1:{port}/0"


def test_tls(secret_url: str, mutual: bool, certificates: Path) -> None:
    """Over TLS, with the authority named in the URL, everything works; plain text does not."""
    url = f"{secret_url}?ssl_ca_certs={certificates / 'ca.crt'}"
    if mutual:
        with pytest.raises(CoordinationError) as refused:
            RedisCoordination(url, "r1", FakeClock())
        assert refused.value.kind is Kind.REDIS_UNAVAILABLE
        key = f"ssl_keyfile={certificates / 'client.key'}"
        url += f"&ssl_certfile={certificates / 'client.crt'}&{key}"
    run = f"run-{secrets.token_hex(6)}"
    with contextlib.closing(RedisCoordination(url, run, SystemClock())) as coordination:
        fleet = Fleet(coordination, _never)
        fleet.join("a1")
        fleet.offer("j1")
        assert fleet.settle(fleet.lease("a1"), "a1") is Settled.ADMITTED
    with pytest.raises(CoordinationError) as plain:
        RedisCoordination(secret_url.replace("rediss", "redis"), run, FakeClock(), timeout_s=0.5)
    assert plain.value.kind is Kind.REDIS_UNAVAILABLE


def test_a_strangers_certificate_is_refused(secret_url: str, certificates: Path) -> None:
    """A certificate of an unknown authority is refused at once, and the way out is named."""
    for options in ("", f"?ssl_ca_certs={certificates / 'stranger.crt'}"):
        clock = FakeClock()
        with pytest.raises(CoordinationError) as refused:
            RedisCoordination(secret_url + options, "r1", clock)
        assert refused.value.kind is Kind.REDIS_UNAVAILABLE
        assert "ssl_ca_certs" in str(refused.value)
        assert clock.slept_s == []


def test_a_missing_certificate_file_is_named(redis_server: RedisServer) -> None:
    """A certificate file that is not there is named before anything is tried."""
    url = redis_server.url.replace("redis:", "rediss:") + "?ssl_ca_certs=/nowhere/ca.crt"
    clock = FakeClock()
    with pytest.raises(InvalidInputError) as refused:
        RedisCoordination(url, "r1", clock)
    assert refused.value.kind is Kind.URL
    assert "/nowhere/ca.crt" in str(refused.value)
    assert clock.slept_s == []


# failover


@pytest.fixture
def pair() -> Iterator[tuple[RedisServer, RedisServer, RedisLine]]:
    """A primary, its replica in step, and the address that follows the primary."""
    with RedisServer() as primary, RedisServer() as replica, RedisLine(primary.port) as line:
        with redis.Redis.from_url(replica.url) as admin:
            admin.replicaof("127.0.0.1", str(primary.port))
            while admin.info("replication")["master_link_status"] != "up":
                pass
        yield primary, replica, line


def test_a_failover_loses_nothing_that_was_replicated(
    pair: tuple[RedisServer, RedisServer, RedisLine],
) -> None:
    """CASE L8: after the replica takes over, members, leases and results are there and settle."""
    primary, replica, line = pair
    coordination = RedisCoordination(line.url, "r1", SystemClock())
    fleet = Fleet(coordination, _never)
    fleet.join("a1")
    fleet.offer("j1", "j2")
    coordination.announce_head(HeadHint(1, policy_hash_of(1), 1))
    first, second = fleet.lease("a1"), fleet.lease("a1")
    assert fleet.settle(first, "a1") is Settled.ADMITTED
    with redis.Redis.from_url(replica.url) as client:
        while not client.exists("deltastore:{r1}:results"):  # the last that was written
            pass
    primary.kill()
    line.point_at(replica.port)
    with pytest.raises(CoordinationError) as still:  # it serves, but takes no writes yet
        RedisCoordination(line.url, "r1", FakeClock()).heartbeat("a1", active(), TTL_S)
    assert still.value.kind is Kind.REDIS_UNAVAILABLE
    with redis.Redis.from_url(replica.url) as admin:
        admin.replicaof("NO", "ONE")
    assert coordination.heartbeat("a1", active(), TTL_S)
    assert fleet.settle(first, "a1") is Settled.DUPLICATE
    assert fleet.settle(second, "a1") is Settled.ADMITTED
    taken = coordination.take_settled(10, 0.0)
    assert [result.settlement.job_id for result in taken] == [first.job_id, second.job_id]
    hint = coordination.head_hint()
    assert hint is not None
    assert hint.version == 1
    coordination.close()


def test_what_was_not_replicated_comes_again(
    pair: tuple[RedisServer, RedisServer, RedisLine],
) -> None:
    """CASE L8: a lease and a settlement lost in a failover are answered, and the work is redone."""
    primary, replica, line = pair
    coordination = RedisCoordination(line.url, "r1", SystemClock())
    fleet = Fleet(coordination, _never)
    with redis.Redis.from_url(replica.url) as admin:
        admin.replicaof("NO", "ONE")  # from here on the replica hears nothing
    fleet.join("a1")
    fleet.offer("j1", "j2")
    settled, held = fleet.lease("a1"), fleet.lease("a1")
    assert fleet.settle(settled, "a1") is Settled.ADMITTED
    primary.kill()
    line.point_at(replica.port)
    assert not coordination.heartbeat("a1", active(), TTL_S)  # register again
    assert fleet.settle(held, "a1") is Settled.UNKNOWN
    assert coordination.take_settled(10, 0.0) == []
    coordination.register(ActorRecord("a1", "eu", "test", 1), TTL_S)
    assert fleet.offer("j1", "j2") == 2
    assert fleet.settle(settled, "a1") is Settled.NOT_HOLDER
    for _ in range(2):
        assert fleet.settle(fleet.lease("a1"), "a1") is Settled.ADMITTED
    assert len(coordination.take_settled(10, 0.0)) == 2
    coordination.close()


def test_a_line_cut_between_calls_is_not_noticed(redis_server: RedisServer) -> None:
    """Every connection cut before each call: the calls succeed, on new connections."""
    run = f"run-{secrets.token_hex(6)}"
    with RedisLine(redis_server.port) as line:
        clock = FakeClock()
        with contextlib.closing(RedisCoordination(line.url, run, clock)) as coordination:
            fleet = Fleet(coordination, _never)
            fleet.join("a1")
            fleet.offer("j1")
            line.cut()
            lease = fleet.lease("a1")
            line.cut()
            assert coordination.renew(lease.job_id, lease.token, 1, 2 * LEASE_S, 60.0)
            line.cut()
            assert fleet.settle(lease, "a1") is Settled.ADMITTED
            line.cut()
            assert len(coordination.take_settled(1, 0.0)) == 1
            assert sum(clock.slept_s) <= 0.25 * 4
