"""Redis keeps every promise of the protocol."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

from deltastore.coordination.redis import RedisCoordination
from deltastore.testing.clock import FakeClock
from deltastore.testing.coordination import CoordinationTests
from deltastore.testing.fleet import Fleet, StandingRedisTime
from deltastore.testing.servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Iterator

# Redis as the distribution ships it runs the suite too, where it is installed.
_PROGRAMS = ["valkey"] + (["redis-server"] if shutil.which("redis-server") else [])


@pytest.fixture(scope="module", params=_PROGRAMS)
def server_url(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of each kind of server."""
    if request.param == "valkey":
        shared: RedisServer = request.getfixturevalue("redis_server")
        yield shared.url
        return
    program = shutil.which(request.param)
    assert program is not None
    with RedisServer(tmp_path_factory.mktemp("redis"), program=Path(program)) as server:
        yield server.url


class TestRedis(CoordinationTests):
    """The shared suite on real servers."""

    @pytest.fixture
    def fleet(self, server_url: str) -> Iterator[Fleet]:
        """A run of its own on the server, with time that only the test moves."""
        run = f"run-{secrets.token_hex(6)}"
        with redis.Redis.from_url(server_url) as client:
            time = StandingRedisTime(client, f"test-time:{{{run}}}")
            coordination = RedisCoordination(server_url, run, FakeClock(), scripts=time.scripts())
            yield Fleet(coordination, time.advance_s)
            coordination.close()
