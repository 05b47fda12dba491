"""A script whose keys lie on two nodes fails only in a cluster: the suite runs on a real one."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.cluster import RedisCluster

from deltastore.coordination.redis import RedisCoordination
from deltastore.errors import CoordinationError, Kind
from deltastore.testing.clock import FakeClock
from deltastore.testing.coordination import CoordinationTests
from deltastore.testing.fleet import Fleet, StandingRedisTime
from deltastore.testing.servers import RedisServer

if TYPE_CHECKING:
    from collections.abc import Iterator

_SLOTS = 16_384
_NODES = 3
_READY_POLLS = 20_000  # each is a round trip: some ten seconds


@pytest.fixture(scope="module")
def cluster_url(redis_server: RedisServer) -> Iterator[str]:
    """Three nodes that share the slots (CASE L6)."""
    assert redis_server.running  # the same program: skipped or failed where it is missing
    with contextlib.ExitStack() as stack:
        options = {"cluster-enabled": "yes", "cluster-node-timeout": "5000"}
        nodes = [stack.enter_context(RedisServer(options=options)) for _ in range(_NODES)]
        clients: list[Any] = [
            stack.enter_context(redis.Redis(host="127.0.0.1", port=node.port)) for node in nodes
        ]
        for i, client in enumerate(clients):
            first, end = i * _SLOTS // _NODES, (i + 1) * _SLOTS // _NODES
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        for _ in range(_READY_POLLS):
            states: list[bytes] = [client.execute_command("CLUSTER", "INFO") for client in clients]
            if all(
                b"cluster_state:ok" in state and b"cluster_known_nodes:%d\r" % _NODES in state
                for state in states
            ):
                break
        else:
            pytest.fail(f"the cluster did not come up: {states}")
        yield f"redis+cluster://127.0.0.1:{nodes[0].port}"


class TestCluster(CoordinationTests):
    """CASE L6: the shared suite on a cluster of three nodes."""

    @pytest.fixture
    def fleet(self, cluster_url: str) -> Iterator[Fleet]:
        """A run of its own, on whichever node its name hashes to."""
        run = f"run-{secrets.token_hex(6)}"
        client = RedisCluster.from_url(cluster_url.replace("+cluster", ""))
        time = StandingRedisTime(client, f"test-time:{{{run}}}")
        coordination = RedisCoordination(cluster_url, run, FakeClock(), scripts=time.scripts())
        yield Fleet(coordination, time.advance_s)
        coordination.close()
        client.close()


def test_every_node_is_asked_for_its_policy(cluster_url: str) -> None:
    """CASE L2: one evicting node among several is found at start."""
    with RedisCluster.from_url(cluster_url.replace("+cluster", "")) as client:
        last: Any = client.get_primaries()[-1]
        client.config_set("maxmemory-policy", "allkeys-lru", target_nodes=last)
        try:
            with pytest.raises(CoordinationError) as refused:
                RedisCoordination(cluster_url, "r1", FakeClock())
        finally:
            client.config_set("maxmemory-policy", "noeviction", target_nodes=last)
    assert refused.value.kind is Kind.REDIS_POLICY
    RedisCoordination(cluster_url, "r1", FakeClock()).close()
