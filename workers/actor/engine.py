"""An actor that knows its engine's insides cannot change engines: it speaks to this protocol only.

An engine holds live weights, generates, and does neither on its own: the actor's loop calls it from
one thread, so between two calls no forward pass is in flight (a safe point).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltastore.pipeline.protocols import WeightTarget
    from workers.sampling import Sampling

Progress: TypeAlias = Callable[[int], bool]
"""Told after every decoding step how many tokens there are; False stops the generation."""


class GenerationStopped(Exception):
    """Progress said stop: nothing was completed. Not a failure."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One group to generate: token ids and how to sample."""

    tokens: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Completions:
    """The samples of one prompt.

    Args:
        tokens: per sample, its stop token included.
        logprobs: per token, of the distribution it was sampled from (after temperature, top-p).
        finished: per sample, whether it stopped by itself.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    finished: list[bool]


class Engine(Protocol):
    """Generates with live weights that somebody else may change between two calls."""

    def target(self) -> WeightTarget:
        """The live weights."""
        ...

    def generate(self, prompts: Sequence[Prompt], progress: Progress) -> list[Completions]:
        """Sample every prompt; GenerationStopped when `progress` returned False."""
        ...
