"""A batch that waits for its longest prompt pads all others: prompts of one length run together.

The reference engine: a transformers model in float32 on the exact bits of the serving layout, a KV
cache, one prefill per group. Sampling inverts the cumulative distribution at each sample's own
random numbers, so a sample does not depend on what else is in its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deltastore.errors import InvalidInputError, Kind
from workers.actor.engine import Completions, GenerationStopped
from workers.causal_lm import prefill

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.actor.engine import Progress, Prompt
    from workers.sampling import Sampling


class TransformersEngine:
    """An `Engine` over a transformers causal language model.

    Args:
        model: in float32, ready to run.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._positions = int(model.config.max_position_embeddings)
        self._vocabulary = int(model.config.vocab_size)

    def generate(self, prompts: Sequence[Prompt], progress: Progress) -> list[Completions]:
        """Sample every prompt; prompts of one length and group size are decoded together."""
        batches: dict[tuple[int, int], list[int]] = {}
        for index, prompt in enumerate(prompts):
            self._check(prompt)
            shape = (len(prompt.tokens), prompt.sampling.group_size)
            batches.setdefault(shape, []).append(index)
        done: dict[int, Completions] = {}
        before = 0

        def advance(tokens: int) -> bool:
            return progress(before + tokens)

        for indices in batches.values():
            with torch.inference_mode():
                made = self._decode([prompts[i] for i in indices], advance)
            done.update(zip(indices, made, strict=True))
            before += sum(len(row) for item in made for row in item.tokens)
        return [done[index] for index in range(len(prompts))]

    def _check(self, prompt: Prompt) -> None:
        longest = len(prompt.tokens) + prompt.sampling.max_new_tokens
        if longest > self._positions or max(prompt.tokens) >= self._vocabulary:
            raise InvalidInputError(
                f"a prompt of {len(prompt.tokens)} tokens and {prompt.sampling.max_new_tokens}"
                f" new ones does not fit this model",
                kind=Kind.PAYLOAD,
                hint=f"{self._positions} positions, token ids below {self._vocabulary}",
            )

    def _decode(self, prompts: Sequence[Prompt], progress: Progress) -> list[Completions]:
        repeats = prompts[0].sampling.group_size
        ids = torch.tensor([prompt.tokens for prompt in prompts], dtype=torch.long)
        rows = Rows.of([prompt.sampling for prompt in prompts])
        cache, logits = prefill(self._model, ids, repeats)
        tokens: list[list[int]] = [[] for _ in range(rows.count)]
        logprobs: list[list[float]] = [[] for _ in range(rows.count)]
        alive = torch.ones(rows.count, dtype=torch.bool)
        made = 0
        for position in range(int(rows.limit.max())):
            chosen, values = draw(logits, rows, position)
            for row in alive.nonzero()[:, 0].tolist():
                tokens[row].append(int(chosen[row]))
                logprobs[row].append(float(values[row]))
                made += 1
            alive &= (chosen != rows.stop) & (rows.limit > position + 1)
            if not progress(made):
                raise GenerationStopped
            if not alive.any():
                break
            logits = self._model(input_ids=chosen[:, None], past_key_values=cache).logits[:, -1]
        finished = [row[-1] == int(rows.stop[i]) for i, row in enumerate(tokens)]
        return [
            Completions(
                tokens[i : i + repeats], logprobs[i : i + repeats], finished[i : i + repeats]
            )
            for i in range(0, rows.count, repeats)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """How each row of a batch samples."""

    uniforms: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    stop: torch.Tensor
    limit: torch.Tensor
    count: int

    @classmethod
    def of(cls, samplings: Sequence[Sampling]) -> Rows:
        """The rows of a batch, a group's side by side."""
        width = max(s.max_new_tokens for s in samplings)
        numbers = torch.zeros(sum(s.group_size for s in samplings), width, dtype=torch.float64)
        row = 0
        for sampling in samplings:
            made = torch.from_numpy(sampling.uniforms())
            numbers[row : row + made.shape[0], : made.shape[1]] = made
            row += made.shape[0]

        def per_row(name: str, dtype: torch.dtype) -> torch.Tensor:
            values = [getattr(s, name) for s in samplings for _ in range(s.group_size)]
            return torch.tensor(values, dtype=dtype)

        return cls(
            uniforms=numbers,
            temperature=per_row("temperature", torch.float32),
            top_p=per_row("top_p", torch.float32),
            stop=per_row("stop_token", torch.long),
            limit=per_row("max_new_tokens", torch.long),
            count=row,
        )


def draw(logits: torch.Tensor, rows: Rows, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row and its log-probability in the distribution it was drawn from."""
    logprobs = torch.log_softmax(logits / rows.temperature[:, None], dim=-1)
    if bool((rows.top_p < 1).any()):
        logprobs = keep_top_p(logprobs, rows.top_p)
    cumulative = torch.exp(logprobs.double()).cumsum(-1)
    wanted = rows.uniforms[:, position, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, wanted, right=True)[:, 0]
    chosen = chosen.clamp(max=logits.shape[-1] - 1)
    return chosen, logprobs.gather(-1, chosen[:, None])[:, 0]


def keep_top_p(logprobs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep per row the likeliest tokens that reach `top_p` together, and scale them to 1."""
    ordered, order = torch.sort(logprobs, dim=-1, descending=True)
    share = torch.exp(ordered)
    before = share.cumsum(-1) - share
    kept = before < top_p[:, None]
    kept[:, 0] = True
    masked = torch.where(kept, ordered, -torch.inf)
    masked = masked - torch.logsumexp(masked, dim=-1, keepdim=True)
    return torch.empty_like(logprobs).scatter_(-1, order, masked)
