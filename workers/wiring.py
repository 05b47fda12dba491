"""A part that reads the environment cannot be tested or trusted: this module reads it for all.

Builds what a worker's file names: stores with their credentials, the run in every region,
coordination, event sink. And turns what went wrong into one line and an exit code.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit, urlunsplit

from deltastore.cli.exits import ExitCode, exit_code
from deltastore.cli.variables import secret_in
from deltastore.clock import SystemClock
from deltastore.coordination.redis import RedisCoordination
from deltastore.errors import DeltastoreError, InvalidInputError, Kind
from deltastore.events import both
from deltastore.observability.jsonl import JsonlSink
from deltastore.repository.run import open_run
from deltastore.storage.observed import Observers, open_observed
from deltastore.storage.transfer import DEFAULT_STREAMS
from workers.config import load_config
from workers.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from deltastore.clock import Clock
    from deltastore.coordination.backend import Coordination
    from deltastore.events import EventSink
    from deltastore.observability.metrics import Metrics
    from deltastore.repository.run import Run
    from deltastore.storage.observed import StoreObserver
    from deltastore.storage.store import ObjectStore
    from deltastore.storage.store_use import StoreUse
    from workers.config import RegionConfig, WorkerConfig


@dataclass(frozen=True, slots=True)
class Premises:
    """What a worker that needs no coordination works with.

    Args:
        regions: the run in every region, by name.
        used: takes what other processes have done with the store for this worker, where it counts.
    """

    config: WorkerConfig
    regions: Mapping[str, Run]
    folder: RunFolder
    clock: Clock
    sink: EventSink
    used: Callable[[StoreUse], None] | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a worker works with.

    Args:
        regions: the run in every region, by name.
        used: takes what other processes have done with the store for this worker, where it counts.
    """

    config: WorkerConfig
    regions: Mapping[str, Run]
    coordination: Coordination
    folder: RunFolder
    clock: Clock
    sink: EventSink
    used: Callable[[StoreUse], None] | None = None

    @property
    def checkpoint(self) -> Path | None:
        """The local checkpoint, if the worker has one."""
        return None if self.config.checkpoint is None else Path(self.config.checkpoint)


@contextmanager
def open_premises(
    config: WorkerConfig, worker: str, observers: Mapping[str, StoreObserver] | None = None
) -> Iterator[Premises]:
    """Build what a worker's file names, coordination left out; released at the end.

    `observers` are told of regions' stores, by region, beside the metrics.
    """
    clock = SystemClock()
    with ExitStack() as stack:
        folder = RunFolder(Path(config.run_dir))
        sink: EventSink = stack.enter_context(JsonlSink(folder.events(worker), clock))
        metrics = _serve_metrics(config, stack)
        if metrics is not None:
            sink = both(sink, metrics)
        regions = {}
        for region in config.regions:
            watching = (metrics, (observers or {}).get(region.name))
            told = tuple(one for one in watching if one is not None)
            store = _open_store(region, clock, Observers(told) if told else None)
            stack.callback(store.close)
            regions[region.name] = open_run(store, config.run, region=region.name)
        used = None if metrics is None else metrics.used
        yield Premises(config, regions, folder, clock, sink, used)


@contextmanager
def open_surroundings(config: WorkerConfig, worker: str) -> Iterator[Surroundings]:
    """Build everything a worker's file names; released at the end."""
    with open_premises(config, worker) as at, open_coordination(config, at.clock) as coordination:
        yield Surroundings(config, at.regions, coordination, at.folder, at.clock, at.sink, at.used)


@contextmanager
def open_coordination(config: WorkerConfig, clock: Clock) -> Iterator[Coordination]:
    """Connect to the Redis that a worker's file names."""
    coordination = RedisCoordination(_redis_url(config), config.run, clock)
    try:
        yield coordination
    finally:
        coordination.close()


def run_worker(work: Callable[[WorkerConfig], None], arguments: Sequence[str]) -> int:
    """Run a worker on the file that its only argument names; return its exit code."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    for chatty in ("boto3", "botocore", "urllib3", "s3transfer"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        if len(arguments) != 1:
            raise InvalidInputError(
                "a worker takes one argument: the path of its JSON file", kind=Kind.SETTING
            )
        work(load_config(Path(arguments[0])))
    except DeltastoreError as err:
        sys.stderr.write(f"error: {err.kind.value}: {err}\n")
        return int(exit_code(err))
    return int(ExitCode.OK)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child process: this one's, with `extra` on top."""
    return {**os.environ, **extra}


def lend_credentials(region: RegionConfig) -> None:
    """Put a region's keys where AWS tools look: for an engine and for what it starts.

    Nothing where the file names no variables: they look there by themselves.
    """
    access_key, secret_key = _secret(region.access_key_env), _secret(region.secret_key_env)
    if access_key is not None and secret_key is not None:
        os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = (
            access_key,
            secret_key,
        )
        os.environ.pop("AWS_SESSION_TOKEN", None)  # belongs to other keys


def user_cache_dir() -> Path:
    """deltastore's folder for what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "deltastore"


def _serve_metrics(config: WorkerConfig, stack: ExitStack) -> Metrics | None:
    if config.metrics_port is None:
        return None
    # Only now: a worker that serves no metrics needs no library for them.
    from deltastore.observability.metrics import Metrics, MetricsServer

    metrics = Metrics(config.run)
    stack.enter_context(MetricsServer(metrics, port=config.metrics_port, host=config.metrics_host))
    return metrics


def _open_store(region: RegionConfig, clock: Clock, observer: StoreObserver | None) -> ObjectStore:
    return open_observed(
        region.url,
        observer,
        region.name,
        clock=clock,
        endpoint_url=region.endpoint_url,
        region=region.region,
        profile=region.profile,
        access_key=_secret(region.access_key_env),
        secret_key=_secret(region.secret_key_env),
        streams=region.streams or DEFAULT_STREAMS,
    )


def _redis_url(config: WorkerConfig) -> str:
    password = _secret(config.redis_password_env)
    if password is None:
        return config.redis_url
    parts = urlsplit(config.redis_url)
    who = f"{config.redis_user or ''}:{quote(password, safe='')}"
    return urlunsplit(parts._replace(netloc=f"{who}@{parts.netloc}"))


def _secret(name: str | None) -> str | None:
    """The value of the environment variable that the file names; it must be there."""
    return secret_in(name, hint="the worker's file says that it carries a secret")
