"""Numbers spread over an orchestrator cannot be checked together: the demo's are here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.config import require
from workers.config import ENGINES, TRANSFORMERS, VLLM
from workers.vllm_settings import VllmSettings

if TYPE_CHECKING:
    from pathlib import Path

HOME, OTHER = "east", "west"
RUN_NAME = "demo"


@dataclass(frozen=True, slots=True)
class ActorPlan:
    """One actor of the demo."""

    actor_id: str
    region: str
    local_checkpoint: bool
    """Whether it has version 0 on disk; else it rebuilds everything from its region's bucket."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Who takes part.

    Args:
        first: there from the start.
        killed: one of them, half way.
        joiner: started then.
    """

    first: tuple[ActorPlan, ...]
    killed: str
    joiner: ActorPlan

    @property
    def at_the_end(self) -> list[str]:
        """The actors that have to be there at the end."""
        plans = (*self.first, self.joiner)
        return [plan.actor_id for plan in plans if plan.actor_id != self.killed]


THREE = Cast(
    (
        ActorPlan("a1", HOME, local_checkpoint=True),
        ActorPlan("a2", HOME, local_checkpoint=True),
        ActorPlan("a3", OTHER, local_checkpoint=False),
    ),
    "a2",
    ActorPlan("a4", HOME, local_checkpoint=True),
)
TWO = Cast(
    (
        ActorPlan("a1", OTHER, local_checkpoint=False),
        ActorPlan("a2", HOME, local_checkpoint=True),
    ),
    "a2",
    ActorPlan("a3", HOME, local_checkpoint=True),
)
"""Engines on vLLM: each takes a gigabyte and half a minute to start."""

# The engine core and its one worker in the actor's process, nothing compiled: a start of seconds.
# With processes, or on accelerators, leave these to vLLM.
VLLM_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
VLLM_SETTINGS = VllmSettings(
    max_model_len=512,
    max_num_seqs=32,
    kv_cache_bytes=128 << 20,
    block_size=32,
    enforce_eager=True,
)


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What `make demo` can be told.

    Args:
        runs_dir: a folder of its own is made in it for this run.
        lr: 3e-5 learns visibly within 16 steps; 1e-6 has the sparsity of real runs.
        keep_data: whether the buckets' files stay in the run's folder.
        model: a Hugging Face folder to use instead of SmolLM2; it need not know the answer.
        vllm_python: the Python of an environment with vLLM, for actors on that engine.
    """

    runs_dir: Path
    lr: float = 3e-5
    steps: int = 16
    engine: str = TRANSFORMERS
    seed: int = 1
    keep_data: bool = False
    model: Path | None = None
    vllm_python: Path | None = None
    groups: int = 4
    group_size: int = 8
    max_new_tokens: int = 10
    trainer_threads: int = 2
    actor_nice: int = 5  # a step waits for the trainer, not for sampling ahead of it
    accuracy_rise: float = 0.3
    accuracy_window: int = 3  # steps at either end that are averaged: 96 samples each
    learning_lr: float = 1e-5  # below it nothing visible is learned in so few steps
    learning_steps: int = 12
    give_up_s: float = 1500.0  # the whole training; a healthy one takes three to five minutes
    end_within_s: float = 240.0  # last versions, final fingerprints, processes leaving

    def __post_init__(self) -> None:
        require(4 <= self.steps <= 10_000, "steps", self.steps, "4 to 10000")
        require(self.engine in ENGINES, "engine", self.engine, f"one of {', '.join(ENGINES)}")
        there = self.vllm_python is not None and self.vllm_python.is_file()
        there = there or self.engine != VLLM
        require(there, "vllm_python", str(self.vllm_python), "`make env-vllm` makes one")
        require(0 < self.lr <= 1e-3, "lr", self.lr, "above 0, at most 1e-3")

    @property
    def cast(self) -> Cast:
        """Who takes part."""
        return TWO if self.engine == VLLM else THREE

    @property
    def actor_python(self) -> Path | None:
        """The Python that actors run in; None: the demo's own."""
        return self.vllm_python if self.engine == VLLM else None

    @property
    def must_learn(self) -> bool:
        """Whether the accuracy has to rise for the demo to pass; else it is only reported."""
        enough = self.lr >= self.learning_lr and self.steps >= self.learning_steps
        return enough and self.model is None

    @property
    def kill_at_step(self) -> int:
        """After this many trained steps one actor is killed and a fresh one started."""
        return self.steps // 2
