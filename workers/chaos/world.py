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

from workers.chaos.orders import Orders
from workers.chaos.schedule import Fault
from workers.config import ActorConfig, TrainerConfig, WorkerConfig
from workers.demo.fleet import Child, DemoError, Fleet

if TYPE_CHECKING:
    from collections.abc import Mapping
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

    def begin(self, planned: Planned) -> None:
        """Let a fault happen."""
        target = planned.target
        match planned.fault:
            case Fault.KILL_ACTOR:
                self.restart_at_s[target] = self.clock.monotonic_s() + planned.lasts_s
                self.children[target].process.kill()
                self.children[target].process.wait()
            case Fault.FREEZE_ACTOR:
                self._signal(target, signal.SIGSTOP)
            case Fault.SLOW_ACTOR:
                self._order(target, slow=10.0)
            case Fault.FLIP_RESULT:
                self._order(target, flip_results=1)
            case Fault.CUT_RESULT:
                self._order(target, cut_results=1)
            case Fault.FLIP_READ:
                self._order(target, flip_reads=1)
            case Fault.STEP_CLOCK:
                self._order(target, clock_step_s=-7200.0 if self._stepped(target) else 86_400.0)
            case Fault.JUMP_CLOCK:
                ahead_s = self.orders.get(target, Orders()).clock_ahead_s
                self._order(target, clock_ahead_s=ahead_s + 3600.0)
            case Fault.KILL_REDIS:
                self.redis.kill()
            case Fault.KILL_REGION:
                self.stores[target].kill()
            case Fault.HANG_REGION:
                self.stores[target].pause()

    def end(self, planned: Planned) -> None:
        """Take a fault back, where that needs doing."""
        target = planned.target
        match planned.fault:
            case Fault.FREEZE_ACTOR:
                self._signal(target, signal.SIGCONT)
            case Fault.SLOW_ACTOR:
                self._order(target, slow=1.0)
            case Fault.KILL_REDIS:
                self.redis.restart()
            case Fault.KILL_REGION:
                self.stores[target].restart()
            case Fault.HANG_REGION:
                self.stores[target].resume()
            case _:
                pass

    def memory_bytes(self) -> dict[str, int]:
        """Resident memory of trainer and actors, by name and how often it had been started."""
        found = {}
        for name, child in self.children.items():
            try:
                found[f"{name}.{self.starts[name]}"] = int(
                    psutil.Process(child.process.pid).memory_info().rss
                )
            except psutil.NoSuchProcess:
                continue  # it has just ended: the next round restarts it
        return found

    def _stepped(self, actor_id: str) -> bool:
        return self.orders.get(actor_id, Orders()).clock_step_s > 0

    def _signal(self, name: str, number: signal.Signals) -> None:
        if self.children[name].process.poll() is None:
            self.children[name].process.send_signal(number)

    def _order(self, actor_id: str, **changes: float) -> None:
        old = self.orders.get(actor_id, Orders())
        new = replace(old, number=old.number + 1, flip_results=0, cut_results=0, flip_reads=0)
        self.orders[actor_id] = replace(new, **changes)  # type: ignore[arg-type]
        self.orders[actor_id].write(self.folder.path / "orders" / f"{actor_id}.json")
