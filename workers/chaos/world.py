"""Chaos needs something to break: two regions, a Redis, a trainer and actors, each a process.

Starts and ends them, restarts what died on its own, and does to them what a schedule says.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import psutil

from workers.chaos.injected import DEED_OF
from workers.chaos.orders import Orders, deeds_file, orders_file
from workers.chaos.schedule import Fault
from workers.config import ActorConfig, TrainerConfig, WorkerConfig
from workers.demo.fleet import Child, DemoError, Fleet

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from deltastore.clock import Clock
    from deltastore.testing.servers import RedisServer, SeaweedServer
    from workers.chaos.schedule import Planned
    from workers.config import RegionConfig
    from workers.run_folder import RunFolder

MAX_RESTARTS = 40  # of one actor that ends by itself: more is no bad luck
RESTART_WAIT_S = 1.0
TRAINER_NAME = "trainer"
TRAINER = TrainerConfig(
    steps=1 << 16,
    lr=3e-3,
    groups=8,
    group_size=4,
    max_new_tokens=8,
    wait_for_actors=2,
    step_deadline_s=10.0,
    give_up_s=180.0,
    outage_max_s=120.0,
    commit_wait_s=180.0,
)


@dataclass
class World:
    """Everything that runs, by name."""

    run: str
    home: str
    folder: RunFolder
    checkpoint: Path
    regions: tuple[RegionConfig, ...]
    stores: Mapping[str, SeaweedServer]
    redis: RedisServer
    fleet: Fleet
    clock: Clock
    actors: dict[str, str]
    """Region by actor."""
    children: dict[str, Child] = field(default_factory=dict)
    orders: dict[str, Orders] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)
    restart_at_s: dict[str, float] = field(default_factory=dict)
    down: set[str] = field(default_factory=set)
    """What is killed or stopped just now: one fault at a time does that to a process."""

    def start_trainer(self, settings: TrainerConfig = TRAINER) -> None:
        """Start the trainer, or start it again."""
        self._start(TRAINER_NAME, "workers.chaos.trainer", trainer=settings)

    def start_actor(self, actor_id: str) -> None:
        """Start an actor, or start it again: from the checkpoint, or every other time without."""
        settings = ActorConfig(
            actor_id,
            self.actors[actor_id],
            lease_s=6.0,
            min_lease_s=2.0,
            max_lease_s=20.0,
            heartbeat_ttl_s=4.0,
            idle_s=0.1,
        )
        self._start(actor_id, "workers.chaos.actor", actor=settings)

    def _start(
        self,
        name: str,
        module: str,
        *,
        trainer: TrainerConfig | None = None,
        actor: ActorConfig | None = None,
    ) -> None:
        count = self.starts[name]
        self.starts[name] += 1
        config = WorkerConfig(
            run=self.run,
            home=self.home,
            regions=self.regions,
            redis_url=self.redis.url,
            run_dir=str(self.folder.path),
            checkpoint=None if count % 2 and actor else str(self.checkpoint),
            trainer=trainer,
            actor=actor,
        )
        path = self.folder.path / "config" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(asdict(config), indent=1) + "\n", encoding="utf-8")
        child = self.fleet.start(f"{name}.{count}", module, [str(path)], threads=1)
        child.killed = True  # whether it may end is decided here, not there
        self.children[name] = child

    def supervise(self) -> None:
        """Restart actors that ended; a trainer that ended is the end of it all."""
        now_s = self.clock.monotonic_s()
        for name, child in self.children.items():
            if child.process.poll() is None:
                continue
            if name == TRAINER_NAME:
                raise DemoError(f"the trainer ended:\n{child.tail()}")
            if self.starts[name] > MAX_RESTARTS:
                raise DemoError(f"{name} ends again and again:\n{child.tail()}")
            due_s = self.restart_at_s.setdefault(name, now_s + RESTART_WAIT_S)
            if now_s >= due_s:
                del self.restart_at_s[name]
                self.start_actor(name)

    def begin(self, planned: Planned) -> int | None:
        """Let a fault happen; the number of the order if it is one, else 0.

        None: not now, its target is down by itself or by another fault.
        """
        target = planned.target
        if planned.fault in DEED_OF:
            return self._order(target, planned.fault)
        child = self.children.get(target)
        if target in self.down or (child is not None and child.process.poll() is not None):
            return None
        self.down.add(target)
        match planned.fault:
            case Fault.KILL_ACTOR:
                self.restart_at_s[target] = self.clock.monotonic_s() + planned.lasts_s
                self.children[target].process.kill()
                self.children[target].process.wait()
            case Fault.FREEZE_ACTOR:
                self.children[target].process.send_signal(signal.SIGSTOP)
            case Fault.KILL_REDIS:
                self.redis.kill()
            case Fault.KILL_REGION:
                self.stores[target].kill()
            case Fault.HANG_REGION:
                self.stores[target].pause()
        return 0

    def end(self, planned: Planned) -> None:
        """Take a fault back, where that needs doing."""
        target = planned.target
        match planned.fault:
            case Fault.FREEZE_ACTOR:
                self.children[target].process.send_signal(signal.SIGCONT)
            case Fault.SLOW_ACTOR:
                self._write(target, slow=1.0)
            case Fault.KILL_REDIS:
                self.redis.restart()
            case Fault.KILL_REGION:
                self.stores[target].restart()
            case Fault.HANG_REGION:
                self.stores[target].resume()
            case _:
                pass
        if planned.fault not in DEED_OF:
            self.down.discard(target)

    def deeds(self, actor_id: str) -> Path:
        """Where an actor writes down what it did."""
        return deeds_file(self.folder, actor_id)

    def life(self, name: str) -> str:
        """A process by name and by how often it had been started."""
        return f"{name}.{self.starts[name]}"

    def memory_bytes(self, lives: Collection[str]) -> dict[str, int]:
        """Resident memory of those of `lives` that run."""
        found = {}
        for name, child in self.children.items():
            if self.life(name) not in lives or child.process.poll() is not None:
                continue
            try:
                found[self.life(name)] = int(psutil.Process(child.process.pid).memory_info().rss)
            except psutil.NoSuchProcess:
                continue  # it has just ended
        return found

    def _order(self, actor_id: str, fault: Fault) -> int:
        """Order one more of what an actor does to itself."""
        old = self.orders.get(actor_id, Orders())
        match fault:
            case Fault.SLOW_ACTOR:
                return self._write(actor_id, slow=10.0)
            case Fault.FLIP_RESULT:
                return self._write(actor_id, flip_results=old.flip_results + 1)
            case Fault.CUT_RESULT:
                return self._write(actor_id, cut_results=old.cut_results + 1)
            case Fault.FLIP_READ:
                return self._write(actor_id, flip_reads=old.flip_reads + 1)
            case Fault.STEP_CLOCK:
                back = old.clock_step_s > 0
                return self._write(actor_id, clock_step_s=-7200.0 if back else 86_400.0)
            case _:
                return self._write(actor_id, clock_ahead_s=old.clock_ahead_s + 3600.0)

    def _write(self, actor_id: str, **changes: float) -> int:
        old = self.orders.get(actor_id, Orders())
        new = replace(old, number=old.number + 1, **changes)  # type: ignore[arg-type]
        new.write(orders_file(self.folder, actor_id))
        self.orders[actor_id] = new
        return new.number
