"""A loss that forgets who sampled the tokens diverges quietly: every token brings its log-prob.

GRPO with truncated importance ratios. Rewards are compared inside a group (one prompt, many
samples); a group whose samples all earned the same says nothing and costs nothing. A token's
gradient is weighted by min(ratio, cap), ratio = now / when it was sampled. The sum is divided by
the tokens of the whole batch, so micro-batches of any size give the same gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from workers.causal_lm import prefill

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workers.results import RolloutResult

EPSILON = 1e-4  # under the spread of a group's rewards


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One admitted job as the loss sees it.

    Args:
        prompt: token ids.
        result: samples, behaviour log-probabilities, and which version made them.
        rewards: one per sample.
        lag: versions between the one that sampled and the one that learns.
    """

    prompt: tuple[int, ...]
    result: RolloutResult
    rewards: tuple[float, ...]
    lag: int


@dataclass(frozen=True, slots=True)
class LossReport:
    """What one batch's backward passes saw. Ratios are before truncation; NaN: nothing to measure.

    `mismatch_kl` is over tokens of lag 0, where sampler and learner hold the same weights: what is
    left is how differently they compute.
    """

    loss: float
    groups_used: int
    ratio_mean: float
    ratio_max: float
    mismatch_kl: float


def advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards of one group, centred and scaled; all 0 when they are equal."""
    values = np.asarray(rewards, np.float64)
    if (values == values[0]).all():
        return [0.0] * len(rewards)
    return [float(a) for a in (values - values.mean()) / (values.std(ddof=1) + EPSILON)]


def token_logprobs(
    model: Any, prompts: torch.Tensor, samples: torch.Tensor, repeats: int, temperature: float
) -> torch.Tensor:
    """Log-probabilities of the samples' tokens at `temperature`; prompts are encoded once.

    Args:
        prompts: [groups, length]. samples: [groups x repeats, width], a group's rows together.
    """
    cache, first = prefill(model, prompts, repeats)
    logits = first[:, None]
    if samples.shape[1] > 1:
        rest = model(input_ids=samples[:, :-1], past_key_values=cache).logits
        logits = torch.cat([logits, rest], dim=1)
    logits = logits if temperature == 1.0 else logits / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    return torch.gather(logprobs, -1, samples[..., None])[..., 0]


def backward(
    model: Any,
    groups: Sequence[Group],
    *,
    temperature: float,
    ratio_cap: float,
    micro_batch_groups: int,
) -> LossReport:
    """Add the batch's gradient to the model's parameters, a few groups at a time."""
    scale = sum(group.result.token_count for group in groups)
    meter = _Meter()
    loss = 0.0
    for part in micro_batches(groups, micro_batch_groups):
        batch = _stack(part)
        logprobs = token_logprobs(model, batch.prompts, batch.samples, batch.repeats, temperature)
        ratio = torch.exp(logprobs.detach() - batch.behaviour)
        weight = torch.clamp(ratio, max=ratio_cap) * batch.advantages * batch.mask
        part_loss = -(weight * logprobs).sum() / scale
        part_loss.backward()  # type: ignore[no-untyped-call]
        loss += float(part_loss.detach())
        meter.add(ratio, batch)
    return meter.report(loss)


def micro_batches(groups: Sequence[Group], size: int) -> Iterator[list[Group]]:
    """Groups that have something to say, in parts of one prompt length and one group size."""
    parts: dict[tuple[int, int], list[Group]] = {}
    for group in groups:
        if any(advantages(group.rewards)):
            shape = (len(group.prompt), len(group.rewards))
            parts.setdefault(shape, []).append(group)
    for alike in parts.values():
        for start in range(0, len(alike), size):
            yield alike[start : start + size]


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    prompts: torch.Tensor
    samples: torch.Tensor
    behaviour: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    fresh: torch.Tensor
    repeats: int
    groups: int


def _stack(groups: Sequence[Group]) -> _Batch:
    width = max(group.result.tokens.shape[1] for group in groups)

    def rows(name: str) -> torch.Tensor:
        return torch.from_numpy(
            np.concatenate([_widen(getattr(g.result, name), width) for g in groups])
        )

    values = [a for group in groups for a in advantages(group.rewards)]
    fresh = [group.lag == 0 for group in groups for _ in group.rewards]
    return _Batch(
        prompts=torch.tensor([group.prompt for group in groups], dtype=torch.long),
        samples=rows("tokens").long(),
        behaviour=rows("logprobs"),
        mask=rows("mask"),
        advantages=torch.tensor(values, dtype=torch.float32)[:, None],
        fresh=torch.tensor(fresh)[:, None],
        repeats=len(groups[0].rewards),
        groups=len(groups),
    )


def _widen(table: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    return np.pad(table, ((0, 0), (0, width - table.shape[1])))


class _Meter:
    """Ratios over all tokens that were learned from."""

    def __init__(self) -> None:
        self._tokens = 0
        self._ratio_sum = 0.0
        self._ratio_max = 0.0
        self._fresh_tokens = 0
        self._kl_sum = 0.0
        self._groups = 0

    def add(self, ratio: torch.Tensor, batch: _Batch) -> None:
        real = ratio[batch.mask].double()
        self._groups += batch.groups
        self._tokens += real.numel()
        self._ratio_sum += float(real.sum())
        self._ratio_max = max(self._ratio_max, float(real.max()))
        fresh = ratio[batch.mask & batch.fresh].double()
        self._fresh_tokens += fresh.numel()
        # KL(sampler || learner) by its non-negative estimator: r - 1 - log r
        self._kl_sum += float((fresh - 1 - torch.log(fresh)).sum())

    def report(self, loss: float) -> LossReport:
        return LossReport(
            loss=loss,
            groups_used=self._groups,
            ratio_mean=self._ratio_sum / self._tokens if self._tokens else math.nan,
            ratio_max=self._ratio_max if self._tokens else math.nan,
            mismatch_kl=self._kl_sum / self._fresh_tokens if self._fresh_tokens else math.nan,
        )
