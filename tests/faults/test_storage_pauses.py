"""A store that stands still in the middle, its connections open, and then goes on."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from deltastore.errors import StorageError
from deltastore.pipeline.replay import replay
from deltastore.repository.fetch import load_manifest
from deltastore.repository.run import open_run
from deltastore.testing.s3_proxy import Before, S3Proxy
from deltastore.testing.servers import SeaweedServer
from tests.unit.pipeline.harness import RUN, World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from deltastore.storage.s3 import S3Store

PATIENCE_S = 1.0
"""What a client waits for an answer here before it asks again."""


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A server that nobody else waits for."""
    with SeaweedServer(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_server(own_server: SeaweedServer) -> SeaweedServer:
    """The server behind this module's proxies; not left paused by a test that failed."""
    own_server.resume()
    return own_server


@pytest.fixture
def s3_bucket(s3_server: SeaweedServer) -> str:
    """A bucket of the test's own."""
    return s3_server.create_bucket(f"pauses-{secrets.token_hex(6)}")


def _pause(proxy: S3Proxy, server: SeaweedServer, method: str, part: str) -> None:
    """The server stops when such a request has come, and goes on when it is made again."""
    proxy.add(method, part, Before(server.pause))
    proxy.add(method, part, Before(server.resume), nth=2)


@pytest.fixture
def world(open_s3: Callable[..., S3Store], tmp_path: Path) -> World:
    """A run on the server."""
    store = open_s3(read_timeout_s=PATIENCE_S)
    return World(tmp_path, home_store=store)


@pytest.mark.parametrize("part", ["/deltas/", "/versions/", "/hints/head"])
def test_store_pauses_in_the_middle_of_a_publish(
    world: World, proxy: S3Proxy, own_server: SeaweedServer, part: str
) -> None:
    """At a body, at the manifest, at the hint: one version, bit for bit, and never two of them."""
    publisher = world.publisher()
    _pause(proxy, own_server, "PUT", part)
    before = len(proxy.seen)
    manifest = world.step(publisher, 1)
    publisher.close()
    puts = [s for s in proxy.seen[before:] if s.method == "PUT" and part in s.target]
    assert len(puts) >= 2, "it was not asked again: nothing paused"
    assert manifest.core.version == 2
    assert load_manifest(world.run, 2).policy_hash == manifest.policy_hash
    assert world.replayed().equals(world.state)
    segments = {info.key for info in world.run.store.list(f"{RUN}/deltas/{2:010d}/")}
    assert segments == {ref.key for ref in manifest.core.segments}


@pytest.mark.parametrize("part", ["/anchors/", "/deltas/", "/versions/"])
def test_store_pauses_in_the_middle_of_a_replay(
    world: World, proxy: S3Proxy, own_server: SeaweedServer, part: str
) -> None:
    """At the anchor's file, at a segment, at a manifest: the replay ends with the right bits."""
    publisher = world.publisher()
    for step in (1, 2):
        world.step(publisher, step)
    publisher.close()
    _pause(proxy, own_server, "GET", part)
    before = len(proxy.seen)
    found = replay(open_run(world.home_store, RUN), clock=world.clock, streams=1)
    assert found.state.equals(world.state)
    gets = [s.target for s in proxy.seen[before:] if s.method == "GET" and part in s.target]
    assert len(gets) > len(set(gets)), "it was not asked again: nothing paused"


def test_store_pauses_for_longer_than_anybody_waits(
    world: World, proxy: S3Proxy, own_server: SeaweedServer
) -> None:
    """The publish ends with an error that names the store; after the pause the step is not lost."""
    publisher = world.publisher()
    proxy.add("PUT", "/deltas/", Before(own_server.pause))
    try:
        with pytest.raises(StorageError) as caught:
            world.step(publisher, 1)
    finally:
        own_server.resume()
    assert world.home_store.url in str(caught.value)
    manifest = world.step(publisher, 2)
    publisher.close()
    assert (manifest.core.version, manifest.core.step_first) == (2, 1)
    assert world.replayed().equals(world.state)
