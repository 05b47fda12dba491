"""The mathematics of a step, against the plain way to compute it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from deltastore.adapters.safetensors_dir import checkpoint_layout, scan_checkpoint
from deltastore.errors import InvalidInputError, Kind
from deltastore.format.layout import Layout
from deltastore.testing.checkpoints import tiny_checkpoint
from workers.causal_lm import empty_model, load_model
from workers.results import Provenance, pack
from workers.trainer.grpo import Group, advantages, backward, micro_batches, token_logprobs
from workers.trainer.optimizer import MasterOptimizer, OptimizerSettings

if TYPE_CHECKING:
    from pathlib import Path

WHO = Provenance("j", "a" * 32, "actor", 1, "b" * 64, 1, "b" * 64, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in BF16."""
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=4)


@pytest.fixture
def model(folder: Path) -> Any:
    """Its model in float32."""
    return load_model(folder)


def group(
    seed: int, rewards: tuple[float, ...], *, length: int = 5, lag: int = 0, behaviour: float = -4.0
) -> Group:
    """A group of random samples of different lengths."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(3, 100, int(rng.integers(1, 6))).tolist() for _ in rewards]
    logprobs = [[behaviour + 0.1 * i for i in range(len(row))] for row in rows]
    prompt = tuple(rng.integers(3, 100, length).tolist())
    return Group(prompt, pack(WHO, rows, logprobs), rewards, lag)


def plain_logprob(model: Any, group: Group, sample: int) -> list[torch.Tensor]:
    """One sample's log-probs by a full forward pass of its own: no cache, no padding, no batch."""
    row = group.result.tokens[sample, : group.result.lengths[sample]].tolist()
    logits = model(input_ids=torch.tensor([[*group.prompt, *row]])).logits[0]
    logprobs = torch.log_softmax(logits, -1)
    start = len(group.prompt) - 1
    return [logprobs[start + i, token] for i, token in enumerate(row)]


def gradients(model: Any) -> list[torch.Tensor]:
    """Take the gradients off the model."""
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return grads


def test_shared_prefill_equals_one_pass_per_sample(model: Any) -> None:
    """Encoding a prompt once for its group changes no log-probability."""
    groups = [group(1, (0.0, 1.0, 0.0)), group(2, (1.0, 0.0, 0.0))]
    width = max(g.result.tokens.shape[1] for g in groups)
    samples = np.concatenate(
        [np.pad(g.result.tokens, ((0, 0), (0, width - g.result.tokens.shape[1]))) for g in groups]
    )
    with torch.no_grad():
        prompts = torch.tensor([g.prompt for g in groups])
        shared = token_logprobs(model, prompts, torch.from_numpy(samples).long(), 3, 1.0)
        for row in range(6):
            plain = plain_logprob(model, groups[row // 3], row % 3)
            assert torch.allclose(shared[row, : len(plain)], torch.stack(plain), atol=1e-5)


def test_loss_and_gradient_equal_the_written_out_formula(model: Any) -> None:
    """Micro-batched, padded, cached: the same loss and gradient as the plain double sum."""
    cap = 2.0
    groups = [
        group(1, (0.0, 1.0, 0.0, 1.0)),
        group(2, (1.0, 0.0, 0.0, 0.5), behaviour=-9.0),
        group(3, (1.0, 1.0, 1.0, 1.0)),
        group(4, (0.0, 0.2, 0.4, 0.9), length=8),
    ]
    report = backward(model, groups, temperature=1.0, ratio_cap=cap, micro_batch_groups=2)
    got = gradients(model)
    total = sum(int(g.result.lengths.sum()) for g in groups)
    terms = []
    for g in groups:
        rewards = torch.tensor(g.rewards)
        spread = rewards.std() + 1e-4
        for sample in range(4):
            advantage = (rewards[sample] - rewards.mean()) / spread
            for i, logprob in enumerate(plain_logprob(model, g, sample)):
                ratio = torch.exp(logprob.detach() - float(g.result.logprobs[sample, i]))
                terms.append(-min(float(ratio), cap) * advantage * logprob / total)
    loss = torch.stack(terms).sum()
    loss.backward()
    assert report.groups_used == 3
    assert report.loss == pytest.approx(float(loss.detach()), rel=1e-3, abs=1e-6)
    for mine, plain in zip(got, gradients(model), strict=True):
        assert torch.allclose(mine, plain, rtol=1e-3, atol=1e-6)


def test_the_size_of_micro_batches_changes_nothing(model: Any) -> None:
    """One group at a time gives the gradient of all at once."""
    groups = [group(seed, (0.0, 1.0)) for seed in range(4)]
    settings = {"temperature": 0.7, "ratio_cap": 2.0}
    backward(model, groups, micro_batch_groups=1, **settings)
    single = gradients(model)
    backward(model, groups, micro_batch_groups=4, **settings)
    for one, all_at_once in zip(single, gradients(model), strict=True):
        assert torch.allclose(one, all_at_once, rtol=1e-3, atol=1e-6)


def test_equal_rewards_say_nothing(model: Any) -> None:
    """A batch whose groups all have equal rewards leaves no gradient and measures nothing."""
    groups = [group(1, (1.0, 1.0)), group(2, (0.0, 0.0))]
    assert list(micro_batches(groups, 2)) == []
    report = backward(model, groups, temperature=1.0, ratio_cap=2.0, micro_batch_groups=2)
    assert (report.loss, report.groups_used) == (0.0, 0)
    assert math.isnan(report.ratio_mean)
    assert all(p.grad is None for p in model.parameters())
    assert advantages((0.3, 0.3, 0.3)) == [0.0, 0.0, 0.0]
    assert sum(advantages((0.0, 0.0, 1.0))) == pytest.approx(0.0)


def test_ratios_are_measured_before_truncation(model: Any) -> None:
    """Behaviour far below the policy shows as a large maximum; only lag 0 enters the mismatch."""
    old = group(1, (0.0, 1.0), lag=1, behaviour=-12.0)
    report = backward(model, [old], temperature=1.0, ratio_cap=2.0, micro_batch_groups=2)
    assert report.ratio_max > 100
    assert math.isnan(report.mismatch_kl)
    model.zero_grad(set_to_none=True)
    fresh = group(1, (0.0, 1.0))
    with torch.no_grad():
        for sample in range(2):
            exact = [float(p) for p in plain_logprob(model, fresh, sample)]
            fresh.result.logprobs[sample, : len(exact)] = exact
    report = backward(model, [fresh], temperature=1.0, ratio_cap=2.0, micro_batch_groups=2)
    assert report.ratio_mean == pytest.approx(1.0, abs=1e-4)
    assert 0 <= report.mismatch_kl < 1e-6


def test_the_module_holds_rounded_masters(model: Any, folder: Path) -> None:
    """After a step every weight is a BF16 value, and a step too small to see counts next time."""
    layout = checkpoint_layout(scan_checkpoint(folder))
    optimizer = MasterOptimizer(model, layout, OptimizerSettings(lr=2e-5, beta1=0.0, beta2=0.0))
    embedding = next(iter(model.parameters()))
    before = embedding.detach().clone()
    changed = []
    for _ in range(60):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        assert optimizer.step() > 1.0
        for parameter in model.parameters():
            assert torch.equal(parameter.detach().bfloat16().float(), parameter.detach())
            assert parameter.grad is None
        changed.append(float((embedding != before).float().mean()))
    # One step of 2e-5 rounds away in most weights of about 0.2; the sum of 60 does not.
    assert changed[0] < 0.3
    assert changed[-1] > 0.9


def test_no_gradient_and_a_broken_gradient_change_nothing(model: Any, folder: Path) -> None:
    """An empty batch is an exactly empty delta; a gradient that is not finite is not applied."""
    layout = checkpoint_layout(scan_checkpoint(folder))
    optimizer = MasterOptimizer(model, layout, OptimizerSettings(lr=1e-2))
    before = [p.detach().clone() for p in model.parameters()]
    assert optimizer.step() == 0.0
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    assert math.isnan(optimizer.step())
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert optimizer.step() > 0
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_a_model_of_another_layout_cannot_be_trained(model: Any) -> None:
    """A parameter without a place in the layout is named (CASE R9)."""
    with pytest.raises(InvalidInputError, match=r"model\.embed_tokens\.weight") as caught:
        MasterOptimizer(model, Layout.build([]), OptimizerSettings(lr=1e-3))
    assert caught.value.kind is Kind.TENSOR_NAMES


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    """A folder without config.json is a clear error, not a traceback of transformers."""
    with pytest.raises(InvalidInputError, match=r"config\.json") as caught:
        empty_model(tmp_path)
    assert caught.value.kind is Kind.CHECKPOINT
