"""Numbers spread over an orchestrator cannot be checked together: the demo's are here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.config import require

if TYPE_CHECKING:
    from pathlib import Path

HOME, OTHER = "east", "west"
RUN_NAME = "demo"
ENGINES = ("transformers",)  # of `workers.actor`, which imports torch


@dataclass(frozen=True, slots=True)
class ActorPlan:
    """One actor of the demo."""

    actor_id: str
    region: str
    local_checkpoint: bool
    """Whether it has version 0 on disk; else it rebuilds everything from its region's bucket."""


FIRST_ACTORS = (
    ActorPlan("a1", HOME, local_checkpoint=True),
    ActorPlan("a2", HOME, local_checkpoint=True),
    ActorPlan("a3", OTHER, local_checkpoint=False),
)
KILLED = "a2"
JOINER = ActorPlan("a4", HOME, local_checkpoint=True)


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What `make demo` can be told.

    Args:
        runs_dir: a folder of its own is made in it for this run.
        lr: 3e-5 learns visibly within 16 steps; 1e-6 has the sparsity of real runs.
        keep_data: whether the buckets' files stay in the run's folder.
        model: a Hugging Face folder to use instead of SmolLM2; it need not know the answer.
    """

    runs_dir: Path
    lr: float = 3e-5
    steps: int = 16
    engine: str = "transformers"
    seed: int = 1
    keep_data: bool = False
    model: Path | None = None
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
        require(0 < self.lr <= 1e-3, "lr", self.lr, "above 0, at most 1e-3")

    @property
    def must_learn(self) -> bool:
        """Whether the accuracy has to rise for the demo to pass; else it is only reported."""
        enough = self.lr >= self.learning_lr and self.steps >= self.learning_steps
        return enough and self.model is None

    @property
    def kill_at_step(self) -> int:
        """After this many trained steps one actor is killed and a fresh one started."""
        return self.steps // 2
