"""Redis dies, forgets, fills up and moves under a run: it goes on within a stated time."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import redis

from deltastore.clock import SystemClock
from deltastore.coordination.redis import RedisCoordination
from deltastore.errors import CoordinationError, Kind
from deltastore.events import ResultSettled, StepTrained
from deltastore.format.keys import Hint
from deltastore.pipeline.replay import replay
from deltastore.repository.run import open_run
from deltastore.storage.memory import MemoryStore
from deltastore.testing.redis_line import RedisLine
from deltastore.testing.servers import RedisServer
from tests.integration.workers.loop_kit import (
    HOME,
    OTHER,
    RUN,
    Fleet,
    checkpoint_with_tokenizer,
    small_trainer,
)
from workers.run_folder import RunFolder, read_report

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RECOVERS_WITHIN_S = 30.0  # heartbeats every 2 s, leases of at most 20 s, on a busy machine


@pytest.fixture
def world(tmp_path: Path) -> Iterator[tuple[Fleet, RedisServer, RedisServer, RedisLine]]:
    """A run on the first of two servers, behind one address."""
    with RedisServer() as first, RedisServer() as second, RedisLine(first.port) as line:
        coordination = RedisCoordination(line.url, RUN, SystemClock(), timeout_s=2.0)
        fleet = Fleet(
            RunFolder(tmp_path / "run"),
            checkpoint_with_tokenizer(tmp_path / "model"),
            {HOME: MemoryStore(), OTHER: MemoryStore()},
            coordination,
            small_trainer(steps=500, outage_max_s=30.0, step_deadline_s=60.0, give_up_s=60.0),
        )
        fleet.create()
        yield fleet, first, second, line
        fleet.close()
        coordination.close()


def _goes_on(fleet: Fleet, steps: int = 2) -> None:
    """Wait for further steps, and count the time."""
    clock, before = SystemClock(), len(fleet.seen(StepTrained))
    started_s = clock.monotonic_s()
    fleet.until(lambda: len(fleet.seen(StepTrained)) >= before + steps)
    assert clock.monotonic_s() - started_s < RECOVERS_WITHIN_S


def test_a_run_outlives_its_redis(
    world: tuple[Fleet, RedisServer, RedisServer, RedisLine],
) -> None:
    """CASE L2, L5, L7, L8: lost answers, a full server, a restart with nothing, a failover."""
    fleet, first, second, line = world
    fleet.start_trainer()
    fleet.start_actor("a1")
    fleet.start_actor("a2", OTHER)
    _goes_on(fleet)
    for _ in range(20):  # connections drop in the middle of scripts, whichever come
        line.lose_next_answer()
        fleet.until(lambda: not line.losing)
    assert line.lost == 20
    _goes_on(fleet)
    with redis.Redis.from_url(first.url) as admin:
        admin.config_set("maxmemory", "1mb")
        with pytest.raises(CoordinationError) as full:
            fleet.coordination.set_throughput({"probe": 1.0}, 60.0)
        assert full.value.kind is Kind.REDIS_MEMORY
        SystemClock().sleep_s(1.0)
        admin.config_set("maxmemory", "0")
        admin.script_flush()
    _goes_on(fleet)
    first.kill()
    first.restart()  # it saves nothing: its data set is empty
    _goes_on(fleet)
    with redis.Redis.from_url(second.url) as admin:
        admin.replicaof("127.0.0.1", str(first.port))
        fleet.until(lambda: admin.info("replication")["master_link_status"] == "up")
        first.kill()
        line.point_at(second.port)
        admin.replicaof("NO", "ONE")
    _goes_on(fleet)
    _end(fleet, "a1", "a2")


def test_redis_away_for_too_long_is_said(
    world: tuple[Fleet, RedisServer, RedisServer, RedisLine],
) -> None:
    """The trainer gives up by its own limit, with the reason; its last version stands."""
    fleet, first, _, _ = world
    fleet.trainer = small_trainer(steps=500, outage_max_s=2.0, wait_for_actors=1)
    fleet.start_trainer()
    fleet.start_actor("a1")
    _goes_on(fleet)
    first.kill()
    with pytest.raises(CoordinationError) as gone:
        fleet.wait("trainer")
    assert gone.value.kind is Kind.REDIS_UNAVAILABLE
    assert "2 s" in str(gone.value)
    assert fleet.threads["a1"].is_alive()
    head = replay(open_run(fleet.stores[HOME], RUN), clock=SystemClock()).held.point.version
    fleet.until(lambda: fleet.actors["a1"].weights.active.version == head)  # it follows on


def _end(fleet: Fleet, *actors: str) -> None:
    """Let the run end early, and prove what the trainer learned from and where all are."""
    fleet.stopping.set()
    assert fleet.wait("trainer") is None
    run = open_run(fleet.stores[HOME], RUN)
    final = replay(run, clock=SystemClock()).held.point
    fleet.folder.ask_to_stop(final.version)
    for actor in actors:
        report = fleet.wait(actor)
        assert report is not None
        assert (report.version, report.fingerprint) == (final.version, str(final.fingerprint))
        assert read_report(fleet.folder.actor_report(actor)) == report
    used = Counter(e.job for e in fleet.seen(ResultSettled) if e.outcome == "admitted")
    assert set(used.values()) == {1}  # no result twice
    per_step = Counter(job_id.partition("-")[0] for job_id in used)
    steps = fleet.seen(StepTrained)
    assert all(per_step[str(event.step)] * 4 == event.samples for event in steps)
    assert all(event.lag_max <= 1 for event in steps)
    snapshot: Any = json.loads(run.store.get(run.keys.hint(Hint.THROUGHPUT)))
    assert set(snapshot["rates_milli"]) == set(actors)
