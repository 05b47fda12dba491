"""A hint is worth a try and no delay: a store that says "slow down" to hints holds no version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deltastore.events import RegionFailed
from deltastore.repository.commit import HINT_WITHIN_S
from deltastore.repository.resolve import find_head, read_head_hint
from deltastore.repository.run import open_run
from deltastore.testing.clock import FakeClock
from deltastore.testing.s3_proxy import Reply, S3Proxy
from tests.unit.pipeline.harness import RUN, World

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from deltastore.storage.s3 import S3Store

HINT = f"{RUN}/hints/head"


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (500, "InternalError")])
def test_a_refused_hint_holds_no_version(
    open_s3: Callable[..., S3Store], proxy: S3Proxy, tmp_path: Path, status: int, code: str
) -> None:
    """A version whose hint is refused for minutes is published within seconds; the next version's
    hint, once it is taken, makes up for it."""
    clock = FakeClock()
    world = World(tmp_path, home_store=open_s3(clock), clock=clock)
    publisher = world.publisher()
    hinted = world.step(publisher, 1).core.version
    proxy.add("PUT", HINT, Reply(status, code), times=1000)
    before_s, asked = clock.monotonic_s(), len(proxy.seen)
    version = world.step(publisher, 2).core.version
    assert clock.monotonic_s() - before_s <= HINT_WITHIN_S
    assert len([seen for seen in proxy.seen[asked:] if HINT in seen.target]) > 1
    failed = [event for event in world.events if isinstance(event, RegionFailed)]
    assert [event.version for event in failed] == [version]
    assert read_head_hint(open_run(world.home_store, RUN)) == hinted
    assert find_head(open_run(world.home_store, RUN)) == version
    proxy.forget()
    version = world.step(publisher, 3).core.version
    assert read_head_hint(open_run(world.home_store, RUN)) == version
    publisher.close()


def test_bodies_and_manifests_are_waited_for(
    open_s3: Callable[..., S3Store], proxy: S3Proxy, tmp_path: Path
) -> None:
    """The patience for what a version is made of is not that of its hint."""
    clock = FakeClock()
    world = World(tmp_path, home_store=open_s3(clock), clock=clock)
    publisher = world.publisher()
    proxy.add("PUT", f"{RUN}/versions/", Reply(503, "SlowDown"), times=20)
    before_s = clock.monotonic_s()
    world.step(publisher, 1)
    assert clock.monotonic_s() - before_s > HINT_WITHIN_S
    publisher.close()
