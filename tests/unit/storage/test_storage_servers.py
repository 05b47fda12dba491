"""The servers that other tests stand on: they start, keep their files, and never stay behind."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import redis

from deltastore.clock import SystemClock
from deltastore.testing.servers import RedisServer

if TYPE_CHECKING:
    from pathlib import Path

    from deltastore.testing.servers import SeaweedServer


def test_s3_server_stores_what_it_acknowledges(s3_server: SeaweedServer, s3_bucket: str) -> None:
    """The session's S3 server gives back the bytes of a put."""
    client = s3_server.client()
    client.put_object(Bucket=s3_bucket, Key="k", Body=b"v")
    assert client.get_object(Bucket=s3_bucket, Key="k")["Body"].read() == b"v"
    client.close()


def test_redis_server_has_the_policy_it_was_asked_for(tmp_path: Path) -> None:
    """A server started with another eviction policy reports it."""
    with RedisServer(tmp_path, maxmemory_policy="allkeys-lru") as server:
        client = redis.Redis.from_url(server.url)
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
        client.close()
    assert not server.running


def test_a_killed_server_comes_back_on_the_same_port(tmp_path: Path) -> None:
    """`kill` ends it at once; `restart` brings it back at the same URL, empty."""
    with RedisServer(tmp_path) as server:
        url = server.url
        client = redis.Redis.from_url(url)
        client.set("k", "v")
        client.close()
        server.kill()
        assert not server.running
        server.restart()
        assert server.url == url
        client = redis.Redis.from_url(url)
        assert client.get("k") is None
        client.close()


def test_a_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Killing the owner with SIGKILL leaves no server behind."""
    script = (
        "import sys, pathlib; from deltastore.testing.servers import RedisServer\n"
        "server = RedisServer(pathlib.Path(sys.argv[1])).start()\n"
        "print(server.pid, flush=True); sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdin.close()
    owner.stdout.close()
    clock = SystemClock()
    deadline_s = clock.monotonic_s() + 10
    while _alive(pid) and clock.monotonic_s() < deadline_s:
        clock.sleep_s(0.02)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:  # noqa: PTH123 - not a path of ours
            return stat.read().rsplit(b")", 1)[1].split()[0] != b"Z"
    except FileNotFoundError:
        return False
    finally:
        os.sched_yield()
