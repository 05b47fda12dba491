"""A whole run in one process: a trainer and actors in threads, on any store and coordination."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from deltastore.adapters.safetensors_dir import checkpoint_layout, load_state, scan_checkpoint
from deltastore.clock import SystemClock
from deltastore.format.mixing import fingerprint_state
from deltastore.repository.run import create_run, open_run
from deltastore.testing.checkpoints import tiny_checkpoint
from workers.actor.assembly import act
from workers.config import ActorConfig, RegionConfig, TrainerConfig, WorkerConfig
from workers.trainer.assembly import train
from workers.trainer.tasks import Problem
from workers.wiring import Surroundings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from deltastore.coordination.backend import Coordination
    from deltastore.events import Event
    from deltastore.storage.store import ObjectStore
    from workers.actor.loop import Actor
    from workers.run_folder import FinalReport, RunFolder

RUN = "loop"
HOME, OTHER = "home", "far"
WORDS = "What is Answer with a number + ? ."
JOIN_S = 180.0  # limits, not waits: the first kernels compile on a busy machine


def checkpoint_with_tokenizer(folder: Path) -> Path:
    """A tiny Llama that transformers loads with a tokenizer for the sums."""
    tiny_checkpoint(folder)
    names = ["<s>", "</s>", "<pad>", "<unk>", *WORDS.split(), *(str(n) for n in range(19))]
    words = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


class EvenFirst:
    """A task that random weights can half do: the first token is an even one."""

    stop_token = 1

    def problem(self, step: int, index: int) -> Problem:
        """Some prompt of three tokens."""
        return Problem((5, 6, 7 + (step + index) % 20), "even")

    def reward(self, problem: Problem, tokens: Sequence[int]) -> float:
        """1 for an even first token."""
        return float(tokens[0] % 2 == 0)


@dataclass
class Fleet:
    """Everything of one run in this process."""

    folder: RunFolder
    checkpoint: Path
    stores: Mapping[str, ObjectStore]
    coordination: Coordination
    trainer: TrainerConfig
    events: list[Event] = field(default_factory=list)
    reports: dict[str, FinalReport | None] = field(default_factory=dict)
    failures: dict[str, BaseException] = field(default_factory=dict)
    actors: dict[str, Actor] = field(default_factory=dict)
    threads: dict[str, threading.Thread] = field(default_factory=dict)
    stopping: threading.Event = field(default_factory=threading.Event)

    def create(self) -> None:
        """Make the run: version 0 in every region."""
        checkpoint = scan_checkpoint(self.checkpoint)
        layout = checkpoint_layout(checkpoint)
        create_run(
            self.stores[HOME],
            RUN,
            layout=layout,
            files=checkpoint.files,
            fingerprint=fingerprint_state(load_state(checkpoint, layout)),
            clock=SystemClock(),
            regions={name: store for name, store in self.stores.items() if name != HOME},
            home_name=HOME,
            probe=False,
        )

    def around(self, *, local: bool = True, actor: ActorConfig | None = None) -> Surroundings:
        """What one worker works with."""
        config = WorkerConfig(
            run=RUN,
            home=HOME,
            regions=tuple(RegionConfig(name, "file:///unused") for name in self.stores),
            redis_url="redis://unused",
            run_dir=str(self.folder.path),
            checkpoint=str(self.checkpoint) if local else None,
            trainer=self.trainer if actor is None else None,
            actor=actor,
        )
        return Surroundings(
            config,
            {name: open_run(store, RUN) for name, store in self.stores.items()},
            self.coordination,
            self.folder,
            SystemClock(),
            self.events.append,
        )

    def start_trainer(self, make_task: Any = lambda folder, seed: EvenFirst()) -> None:
        """Run the trainer in a thread."""
        around = self.around()
        self._start("trainer", lambda: train(around, self.stopping, make_task=make_task))

    def start_actor(self, actor_id: str, region: str = HOME, *, local: bool = True) -> None:
        """Run an actor in a thread."""
        settings = ActorConfig(
            actor_id, region, idle_s=0.02, heartbeat_ttl_s=6.0, lease_s=20.0, catch_up_s=JOIN_S
        )
        around = self.around(local=local, actor=settings)

        def ready(actor: Actor) -> None:
            self.actors[actor_id] = actor

        self._start(actor_id, lambda: act(around, ready))

    def _start(self, name: str, work: Any) -> None:
        def body() -> None:
            try:
                self.reports[name] = work()
            except BaseException as err:  # noqa: BLE001 - raised again in `wait`
                self.failures[name] = err

        thread = threading.Thread(target=body, name=name, daemon=True)
        self.threads[name] = thread
        thread.start()

    def wait(self, name: str) -> FinalReport | None:
        """Wait for a worker's end; raise what it raised."""
        self.threads[name].join(JOIN_S)
        assert not self.threads[name].is_alive(), f"{name} is still running"
        if name in self.failures:
            raise self.failures.pop(name)  # told once; `until` tells of the others
        return self.reports[name]

    def until(self, true: Callable[[], bool]) -> None:
        """Wait until something holds, or a worker has failed."""
        clock = SystemClock()
        deadline_s = clock.monotonic_s() + JOIN_S
        while not true():
            for failure in self.failures.values():
                raise failure
            assert clock.monotonic_s() < deadline_s, "it does not come to hold"
            clock.sleep_s(0.01)

    def until_trained(self) -> None:
        """Wait until the trainer has left its final state."""
        self.until(self.folder.trainer_done.exists)

    def close(self) -> None:
        """Stop whatever still runs."""
        self.stopping.set()
        for actor in self.actors.values():
            actor.request_stop()
        for thread in self.threads.values():
            thread.join(JOIN_S)

    def seen(self, kind: type) -> list[Any]:
        """The events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]


def small_trainer(**changes: Any) -> TrainerConfig:
    """Settings with which a step takes a moment."""
    base = TrainerConfig(
        steps=3,
        lr=3e-3,
        groups=4,
        group_size=4,
        max_new_tokens=4,
        wait_for_actors=2,
        actors_wait_s=100.0,
        step_deadline_s=100.0,
        give_up_s=120.0,
        outage_max_s=100.0,
        commit_wait_s=100.0,
        stop_wait_s=100.0,
    )
    return replace(base, **changes)
