"""A sampler seeded by arrival order cannot be replayed: every sample draws from a seed of its own.

The seed of a sample is (run, step, prompt, sample), so who generates it, when, and next to what
else leaves its random numbers the same. Log-probabilities are those of the distribution that was
sampled from: after temperature and top-p, as the loss needs them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deltastore.config import require

if TYPE_CHECKING:
    from numpy.typing import NDArray

MILLI = 1000  # temperature and top-p travel as thousandths: no floats in canonical documents
MAX_GROUP_SIZE = 1024
MAX_NEW_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the samples of one prompt are drawn.

    Args:
        group_size: samples per prompt.
        max_new_tokens: where a sample that does not stop is cut.
        stop_token: ends a sample, and is part of it.
        temperature_milli, top_p_milli: in thousandths; 1000 leaves the model's own distribution.
        seed: of this prompt; its samples derive theirs from it.
    """

    group_size: int
    max_new_tokens: int
    stop_token: int
    temperature_milli: int = MILLI
    top_p_milli: int = MILLI
    seed: int = 0

    def __post_init__(self) -> None:
        _between(self.group_size, "group_size", 1, MAX_GROUP_SIZE)
        _between(self.max_new_tokens, "max_new_tokens", 1, MAX_NEW_TOKENS)
        _between(self.stop_token, "stop_token", 0, (1 << 31) - 1)
        _between(self.temperature_milli, "temperature_milli", 1, 100 * MILLI)
        _between(self.top_p_milli, "top_p_milli", 1, MILLI)
        _between(self.seed, "seed", 0, (1 << 53) - 1)

    @property
    def temperature(self) -> float:
        """What the logits are divided by."""
        return self.temperature_milli / MILLI

    @property
    def top_p(self) -> float:
        """The share of probability that is kept."""
        return self.top_p_milli / MILLI

    def sample_seed(self, sample: int) -> int:
        """A 53-bit seed for one sample, for engines with random numbers of their own."""
        return _digest53(f"{self.seed}\0{sample}")

    def uniforms(self) -> NDArray[np.float64]:
        """The random numbers of every sample and position: [group_size, max_new_tokens]."""
        rows = [
            np.random.Generator(np.random.PCG64([self.seed, sample])).random(self.max_new_tokens)
            for sample in range(self.group_size)
        ]
        return np.stack(rows)


def prompt_seed(run: str, seed: int, step: int, prompt: int) -> int:
    """The 53-bit seed of one prompt of one step of one run."""
    return _digest53(f"{run}\0{seed}\0{step}\0{prompt}")


def _digest53(text: str) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little") & ((1 << 53) - 1)


def _between(value: int, name: str, low: int, high: int) -> None:
    require(type(value) is int and low <= value <= high, name, value, f"{low} to {high}")
