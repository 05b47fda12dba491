"""What an engine samples is what its seeds say, at the probabilities it reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from deltastore.errors import InvalidInputError
from deltastore.testing.checkpoints import tiny_checkpoint
from workers.actor.engine import GenerationStopped, Prompt
from workers.actor.transformers_engine import TransformersEngine, keep_top_p
from workers.causal_lm import load_model
from workers.sampling import Sampling
from workers.trainer.grpo import token_logprobs

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TransformersEngine:
    """A tiny Llama that generates."""
    folder: Path = tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=3)
    return TransformersEngine(load_model(folder))


def prompt(seed: int, *tokens: int, **changes: Any) -> Prompt:
    """A prompt for four samples of at most six tokens; token 1 stops."""
    settings: dict[str, Any] = {"group_size": 4, "max_new_tokens": 6, "stop_token": 1, "seed": seed}
    return Prompt(tokens, Sampling(**(settings | changes)))


def always(tokens: int) -> bool:
    """Go on."""
    return True


def test_a_sample_does_not_depend_on_its_batch(engine: TransformersEngine) -> None:
    """The same prompt gives the same tokens alone, beside others, and in another order."""
    one, two, long = prompt(1, 5, 6, 7), prompt(2, 8, 9, 10), prompt(3, 4, 5, 6, 7)
    (alone,) = engine.generate([one], always)
    together = engine.generate([long, two, one], always)
    assert together[2].tokens == alone.tokens
    assert [len(row) for row in together[0].tokens] == [len(row) for row in together[0].logprobs]
    for mine, theirs in zip(together[2].logprobs, alone.logprobs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)
    assert engine.generate([prompt(4, 5, 6, 7)], always)[0].tokens != alone.tokens


def test_reported_logprobs_are_the_losss(engine: TransformersEngine) -> None:
    """Behaviour log-probs equal what the loss computes at the same weights and temperature."""
    asked = prompt(5, 20, 21, 22, temperature_milli=700, stop_token=127)
    (made,) = engine.generate([asked], always)
    width = max(len(row) for row in made.tokens)
    samples = torch.tensor([row + [0] * (width - len(row)) for row in made.tokens])
    with torch.no_grad():
        wanted = token_logprobs(engine._model, torch.tensor([asked.tokens]), samples, 4, 0.7)
    for row, logprobs in enumerate(made.logprobs):
        assert logprobs == pytest.approx(wanted[row, : len(logprobs)].tolist(), abs=1e-4)


def test_samples_stop_at_their_stop_token_or_limit(engine: TransformersEngine) -> None:
    """A sample ends with the stop token and says so, or is cut and does not."""
    asked = [prompt(seed, 5, 6, 7, temperature_milli=3000) for seed in range(30)]
    made = engine.generate(asked, always)
    finished = 0
    for completions in made:
        for row, done in zip(completions.tokens, completions.finished, strict=True):
            assert done == (row[-1] == 1)
            assert done or len(row) == 6
            assert 1 not in row[:-1]
            finished += done
    assert 0 < finished < 120


def test_tokens_come_as_often_as_their_probability_says(engine: TransformersEngine) -> None:
    """A thousand first tokens follow the model's own distribution."""
    asked = prompt(6, 30, 31, group_size=1000, max_new_tokens=1)
    (made,) = engine.generate([asked], always)
    with torch.no_grad():
        logits = engine._model(input_ids=torch.tensor([asked.tokens])).logits[0, -1]
    share = torch.softmax(logits, -1)
    counts = torch.bincount(torch.tensor([row[0] for row in made.tokens]), minlength=128)
    top = share.topk(8).indices
    for token in top.tolist():
        expected = 1000 * float(share[token])
        assert abs(int(counts[token]) - expected) < 6 * expected**0.5 + 3


def test_top_p_keeps_the_likeliest_and_scales_them_to_one() -> None:
    """Tokens beyond the kept share have probability 0; the kept ones sum to 1."""
    logprobs = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.97, 0.01, 0.01, 0.01]]))
    kept = torch.exp(keep_top_p(logprobs, torch.tensor([0.7, 0.5])))
    assert torch.allclose(kept[0], torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=1e-6)
    assert torch.allclose(kept[1], torch.tensor([1.0, 0.0, 0.0, 0.0]), atol=1e-6)


def test_progress_counts_tokens_and_can_stop(engine: TransformersEngine) -> None:
    """Progress rises with every decoding step over all batches; False ends the generation."""
    seen: list[int] = []
    asked = [prompt(1, 5, 6, stop_token=127), prompt(2, 5, 6, 7, stop_token=127)]
    made = engine.generate(asked, lambda tokens: seen.append(tokens) or True)
    assert seen == sorted(seen)
    assert seen[-1] == sum(len(row) for item in made for row in item.tokens)
    with pytest.raises(GenerationStopped):
        engine.generate(asked, lambda tokens: tokens < 8)


def test_a_prompt_that_does_not_fit_is_refused(engine: TransformersEngine) -> None:
    """A token beyond the vocabulary or a length beyond the positions is a clear error."""
    with pytest.raises(InvalidInputError, match="does not fit"):
        engine.generate([prompt(1, 500)], always)
    with pytest.raises(InvalidInputError, match="512 positions"):
        engine.generate([prompt(1, 5, max_new_tokens=512)], always)
