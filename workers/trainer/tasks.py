"""A reward that a wrong answer can earn teaches the wrong thing: a task owns prompt and reward.

The reference task is single-digit sums, "What is a + b? Answer with a number.": every prompt has
the same number of tokens, so nothing is padded, and a sample earns 1 if its last number is the
sum and it ended by itself.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from transformers import AutoTokenizer

from deltastore.errors import InvalidInputError, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt as token ids, and what a right reply contains."""

    prompt: tuple[int, ...]
    answer: str


class Task(Protocol):
    """Where prompts and rewards come from."""

    @property
    def stop_token(self) -> int:
        """The token that ends a sample."""
        ...

    def problem(self, step: int, index: int) -> Problem:
        """Prompt `index` of a step: the same whenever it is asked for."""
        ...

    def reward(self, problem: Problem, tokens: Sequence[int]) -> float:
        """What the sample earns, 0 to 1."""
        ...


class Sums:
    """Single-digit sums, asked through the model's own chat template.

    Args:
        tokenizer: of the model, with a chat template.
        seed: of the problems.
    """

    def __init__(self, tokenizer: Any, seed: int) -> None:
        if tokenizer.eos_token_id is None or not tokenizer.chat_template:
            raise InvalidInputError(
                "the tokenizer has no end-of-text token or no chat template",
                kind=Kind.CHECKPOINT,
                hint="use an instruction-tuned checkpoint",
            )
        self._tokenizer = tokenizer
        self._seed = seed
        self.stop_token: int = int(tokenizer.eos_token_id)

    @classmethod
    def from_folder(cls, folder: Path, seed: int) -> Sums:
        """The task for the tokenizer of a checkpoint folder."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as err:
            raise InvalidInputError(
                f"transformers finds no tokenizer in {folder}: {err}", kind=Kind.CHECKPOINT
            ) from err
        return cls(tokenizer, seed)

    def problem(self, step: int, index: int) -> Problem:
        """Prompt `index` of a step."""
        digits = random.Random(f"{self._seed}/{step}/{index}")
        a, b = digits.randint(0, 9), digits.randint(0, 9)
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": f"What is {a} + {b}? Answer with a number."}],
            add_generation_prompt=True,
            tokenize=False,
        )
        prompt = self._tokenizer(text, add_special_tokens=False).input_ids
        return Problem(tuple(int(token) for token in prompt), str(a + b))

    def reward(self, problem: Problem, tokens: Sequence[int]) -> float:
        """1 if the sample ended by itself and its last number is the sum, else 0."""
        if not tokens or tokens[-1] != self.stop_token:
            return 0.0
        numbers = _NUMBER.findall(self._tokenizer.decode(list(tokens[:-1])))
        return float(bool(numbers) and numbers[-1] == problem.answer)
