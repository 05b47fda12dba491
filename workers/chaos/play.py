"""A chaos that leaves servers behind is the next run's fault: everything is one context.

Builds the world, lets the schedule happen, ends everybody in order, and has the end judged.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from deltastore.adapters.safetensors_dir import checkpoint_layout, load_state, scan_checkpoint
from deltastore.format.mixing import fingerprint_state
from deltastore.repository.fetch import load_manifest
from deltastore.repository.resolve import find_head
from deltastore.repository.run import create_run, open_run
from deltastore.storage.url import open_store
from deltastore.testing.checkpoints import tiny_checkpoint
from deltastore.testing.servers import RedisServer, SeaweedServer
from workers.chaos import judge
from workers.chaos.audit import AuditFolder
from workers.chaos.director import Director
from workers.chaos.schedule import Fault, plan
from workers.chaos.world import TRAINER, TRAINER_NAME, World
from workers.config import RegionConfig
from workers.demo.fleet import DemoError, Fleet
from workers.run_folder import RunFolder, read_report
from workers.wiring import child_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from deltastore.clock import Clock
    from deltastore.repository.run import Run
    from workers.chaos.injected import Injected

RUN = "chaos"
HOME, OTHER = "home", "far"
ACCESS_KEY_ENV, SECRET_KEY_ENV = "DELTASTORE_CHAOS_ACCESS_KEY", "DELTASTORE_CHAOS_SECRET_KEY"
END_WITHIN_S = 180.0
LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of fault: how often, and how long until work went on."""

    fault: Fault
    injected: int
    survived: int
    median_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a chaos came to. That there is one means that every check held."""

    rows: tuple[Row, ...]
    steps: int
    results: int
    restarts: int
    orphans: int
    memory_growth: dict[str, float]
    version: int


def play(
    folder: Path,
    *,
    seed: int,
    duration_s: float,
    every_s: float,
    actors: int,
    clock: Clock,
    say: Callable[[str], None],
    quiet_s: float = 0.0,
) -> Outcome:
    """Run the chaos of a seed; DemoError or ChaosFound when it was not survived.

    Args:
        quiet_s: of `duration_s`, how long at its end no fault comes.
    """
    names = {f"actor{i}": (HOME, OTHER)[i % 2] for i in range(actors)}
    schedule = plan(seed, duration_s - quiet_s, every_s, sorted(names), (HOME, OTHER))
    with ExitStack() as stack:
        world, regions = _build(stack, folder, names, clock)
        world.start_trainer()
        for name in names:
            world.start_actor(name)
        director = Director(world, say)
        director.warm_up()
        say(f"{director.steps} steps made, {len(schedule)} faults to come")
        director.play(schedule, duration_s)
        say("everything recovered; ending")
        return _end(world, director, regions)


def _build(
    stack: ExitStack, folder: Path, actors: dict[str, str], clock: Clock
) -> tuple[World, dict[str, Run]]:
    access_key, secret_key = f"chaos{secrets.token_hex(8)}", secrets.token_hex(20)
    servers, regions, stores = {}, [], {}
    for name in (HOME, OTHER):
        server = stack.enter_context(
            SeaweedServer(folder / "data" / name, access_key=access_key, secret_key=secret_key)
        )
        bucket = server.create_bucket(f"chaos-{name}")
        servers[name] = server
        regions.append(
            RegionConfig(
                name,
                f"s3://{bucket}",
                endpoint_url=server.endpoint,
                region=server.region,
                access_key_env=ACCESS_KEY_ENV,
                secret_key_env=SECRET_KEY_ENV,
            )
        )
        stores[name] = open_store(
            f"s3://{bucket}",
            endpoint_url=server.endpoint,
            region=server.region,
            access_key=access_key,
            secret_key=secret_key,
            clock=clock,
        )
        stack.callback(stores[name].close)
    redis = stack.enter_context(RedisServer(folder / "data" / "redis"))
    model = tiny_checkpoint(folder / "model")
    checkpoint = scan_checkpoint(model)
    layout = checkpoint_layout(checkpoint)
    create_run(
        stores[HOME],
        RUN,
        layout=layout,
        files=checkpoint.files,
        fingerprint=fingerprint_state(load_state(checkpoint, layout)),
        clock=clock,
        regions={OTHER: stores[OTHER]},
        home_name=HOME,
    )
    keys = {ACCESS_KEY_ENV: access_key, SECRET_KEY_ENV: secret_key}
    environment = child_environment({**keys, "HF_HUB_OFFLINE": "1", "MALLOC_ARENA_MAX": "2"})
    fleet = stack.enter_context(Fleet(folder / "logs", environment, clock))
    world = World(
        RUN,
        HOME,
        RunFolder(folder / "run"),
        model,
        tuple(regions),
        servers,
        redis,
        fleet,
        clock,
        actors,
    )
    return world, {name: open_run(store, RUN) for name, store in stores.items()}


def _end(world: World, director: Director, regions: dict[str, Run]) -> Outcome:
    """Stop the trainer, let one that trains no more take its place, and everybody report."""
    clock, home = world.clock, regions[HOME]
    judge.check_deeds(director.injected, director.deeds, director.results)
    growth = judge.check_memory(director.memory, must=world.life(TRAINER_NAME))
    _stop_trainer(world)
    last = load_manifest(home, find_head(home)).core.step_last
    world.start_trainer(replace(TRAINER, steps=max(1, last), wait_for_actors=0))
    _until(world, world.folder.trainer_done.exists, "the last trainer did not finish")
    done = read_report(world.folder.trainer_done)
    world.folder.ask_to_stop(done.version)
    _until(world, lambda: not _running(world), "not everybody ended")
    failed = {n: c for n, c in world.children.items() if c.process.returncode}
    if failed:
        name, child = failed.popitem()
        raise DemoError(f"{name} ended with {child.process.returncode}:\n{child.tail()}")
    reports = {name: read_report(world.folder.actor_report(name)) for name in world.actors}
    judge.check_ends(done, reports)
    audit = AuditFolder(world.folder.path / "audit")
    results = judge.check_provenance(home, audit, TRAINER, last)
    again = judge.learn_again(home, world.checkpoint, audit, TRAINER, last)
    judge.hold(
        again == done.fingerprint, f"undisturbed the weights are {again}, not {done.fingerprint}"
    )
    return Outcome(
        rows=_rows(director.injected),
        steps=last,
        results=results,
        restarts=sum(world.starts.values()) - len(world.starts) - 1,
        orphans=judge.check_regions(regions, clock),
        memory_growth=growth,
        version=done.version,
    )


def _stop_trainer(world: World) -> None:
    child = world.children.pop(TRAINER_NAME)
    child.process.terminate()
    deadline_s = world.clock.monotonic_s() + END_WITHIN_S
    while child.process.poll() is None:
        if world.clock.monotonic_s() > deadline_s:
            raise DemoError(f"the trainer does not stop:\n{child.tail()}")
        world.supervise()
        world.clock.sleep_s(LOOK_S)
    if child.process.returncode:
        raise DemoError(f"the trainer ended with {child.process.returncode}:\n{child.tail()}")


def _running(world: World) -> list[str]:
    return [n for n, child in world.children.items() if child.process.poll() is None]


def _until(world: World, true: Callable[[], bool], otherwise: str) -> None:
    deadline_s = world.clock.monotonic_s() + END_WITHIN_S
    while not true():
        if world.clock.monotonic_s() > deadline_s:
            tails = [f"{n}: {world.children[n].tail()}" for n in _running(world)]
            raise DemoError(f"{otherwise}:\n" + "\n".join(tails)[-4000:])
        if world.folder.read_stop() is None:
            world.supervise()
        world.clock.sleep_s(LOOK_S)


def _rows(injected: Sequence[Injected]) -> tuple[Row, ...]:
    times: dict[Fault, list[float | None]] = defaultdict(list)
    for one in injected:
        times[one.planned.fault].append(one.recovery_s)
    rows = []
    for fault in Fault:
        known = [t for t in times[fault] if t is not None]
        if known:
            rows.append(Row(fault, len(times[fault]), len(known), median(known), max(known)))
    return tuple(rows)
