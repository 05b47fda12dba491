"""Half-built surroundings that are not torn down spoil the next run: one context builds them.

Two S3 servers as two regions, a Redis, a model, and a run that exists in both regions. Everything
lies in the run's own folder; the servers are gone when the context ends, however it ends.
"""

from __future__ import annotations

import json
import secrets
import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from deltastore.adapters.safetensors_dir import checkpoint_layout, load_state, scan_checkpoint
from deltastore.coordination.redis import RedisCoordination
from deltastore.format.mixing import fingerprint_state
from deltastore.repository.run import create_run
from deltastore.storage.url import open_store
from deltastore.testing.servers import RedisServer, SeaweedServer
from workers.config import ActorConfig, RegionConfig, TrainerConfig, WorkerConfig
from workers.demo.settings import HOME, OTHER, RUN_NAME, VLLM_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from deltastore.adapters.safetensors_scan import Checkpoint
    from deltastore.clock import Clock
    from deltastore.coordination.backend import Coordination
    from deltastore.format.fingerprint import Fingerprint
    from deltastore.format.layout import Layout
    from workers.demo.settings import ActorPlan, DemoSettings

ACCESS_KEY_ENV = "DELTASTORE_DEMO_ACCESS_KEY"
SECRET_KEY_ENV = "DELTASTORE_DEMO_SECRET_KEY"
S3_REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class Site:
    """Where the demo runs."""

    settings: DemoSettings
    run_dir: Path
    model_dir: Path
    regions: tuple[RegionConfig, ...]
    redis_url: str
    coordination: Coordination
    secret_environment: dict[str, str]
    """Variables that carry the S3 keys: for children, never for a file."""
    dense_bytes: int

    def run_url(self, region: str) -> str:
        """The run as one region's bucket holds it."""
        return f"{self.region(region).url}/{RUN_NAME}"

    def region(self, name: str) -> RegionConfig:
        """A region by name."""
        return next(region for region in self.regions if region.name == name)

    def trainer_file(self) -> Path:
        """Write the trainer's settings and return where."""
        settings = self.settings
        trainer = TrainerConfig(
            steps=settings.steps,
            lr=settings.lr,
            groups=settings.groups,
            group_size=settings.group_size,
            max_new_tokens=settings.max_new_tokens,
            wait_for_actors=len(settings.cast.first),
        )
        return self._write("trainer", threads=settings.trainer_threads, trainer=trainer)

    def actor_file(self, plan: ActorPlan) -> Path:
        """Write an actor's settings and return where."""
        engine = self.settings.engine
        actor = ActorConfig(plan.actor_id, plan.region, engine=engine, vllm=VLLM_SETTINGS)
        return self._write(plan.actor_id, local=plan.local_checkpoint, actor=actor)

    def _write(
        self,
        name: str,
        *,
        threads: int = 1,
        local: bool = True,
        trainer: TrainerConfig | None = None,
        actor: ActorConfig | None = None,
    ) -> Path:
        config = WorkerConfig(
            run=RUN_NAME,
            home=HOME,
            regions=self.regions,
            redis_url=self.redis_url,
            run_dir=str(self.run_dir),
            checkpoint=str(self.model_dir) if local else None,
            seed=self.settings.seed,
            threads=threads,
            trainer=trainer,
            actor=actor,
        )
        path = self.run_dir / "config" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(asdict(config), indent=2) + "\n", encoding="utf-8")
        return path


@dataclass(frozen=True, slots=True)
class _Start:
    """Version 0, read before anything is started: a bad checkpoint is said at once."""

    checkpoint: Checkpoint
    layout: Layout
    fingerprint: Fingerprint


@contextmanager
def open_site(
    settings: DemoSettings, run_dir: Path, model_dir: Path, clock: Clock, say: Callable[[str], None]
) -> Iterator[Site]:
    """Start the servers and make the run; stop them and remove their files at the end."""
    start = _read_start(model_dir)
    data_dir = run_dir / "data"
    access_key, secret_key = f"demo{secrets.token_hex(8)}", secrets.token_hex(20)
    with ExitStack() as stack:
        if not settings.keep_data:
            stack.callback(shutil.rmtree, data_dir, ignore_errors=True)
        regions = []
        for name in (HOME, OTHER):
            server = stack.enter_context(
                SeaweedServer(
                    data_dir / name, access_key=access_key, secret_key=secret_key, clock=clock
                )
            )
            bucket = server.create_bucket(f"deltastore-{name}")
            regions.append(
                RegionConfig(
                    name,
                    f"s3://{bucket}",
                    endpoint_url=server.endpoint,
                    region=S3_REGION,
                    access_key_env=ACCESS_KEY_ENV,
                    secret_key_env=SECRET_KEY_ENV,
                )
            )
            say(f"region {name}: s3://{bucket} on {server.endpoint} (SeaweedFS)")
        redis = stack.enter_context(RedisServer(data_dir / "redis", clock=clock))
        say(f"coordination: {redis.url} (Valkey)")
        dense_bytes = _make_run(regions, start, access_key, secret_key, clock)
        say(f"run {RUN_NAME}: version 0 is in both regions, {dense_bytes:,} bytes dense")
        coordination = RedisCoordination(redis.url, RUN_NAME, clock)
        stack.callback(coordination.close)
        yield Site(
            settings,
            run_dir,
            model_dir,
            tuple(regions),
            redis.url,
            coordination,
            {ACCESS_KEY_ENV: access_key, SECRET_KEY_ENV: secret_key},
            dense_bytes,
        )


def _read_start(model_dir: Path) -> _Start:
    checkpoint = scan_checkpoint(model_dir)
    layout = checkpoint_layout(checkpoint)
    return _Start(checkpoint, layout, fingerprint_state(load_state(checkpoint, layout)))


def _make_run(
    regions: list[RegionConfig], start: _Start, access_key: str, secret_key: str, clock: Clock
) -> int:
    with ExitStack() as stack:
        stores = {}
        for region in regions:
            store = open_store(
                region.url,
                endpoint_url=region.endpoint_url,
                region=region.region,
                access_key=access_key,
                secret_key=secret_key,
                clock=clock,
            )
            stack.callback(store.close)
            stores[region.name] = store
        run = create_run(
            stores.pop(HOME),
            RUN_NAME,
            layout=start.layout,
            files=start.checkpoint.files,
            fingerprint=start.fingerprint,
            clock=clock,
            regions=stores,
            home_name=HOME,
        )
        return run.dense_bytes
