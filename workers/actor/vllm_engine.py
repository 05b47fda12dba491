"""An engine that is only called back at the end cannot be stopped: here vLLM is stepped by hand.

Every sample is a request of its own, with a seed that follows from its job, so that tokens are
reported after every step, leases are renewed, and a generation that nobody wants any more ends
between two steps. Log-probabilities are of the distribution that was sampled from: the engine must
have been started with `logprobs_mode="processed_logprobs"`. Which weights made the tokens is what
vLLM says of each request, never what the caller believes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deltastore.errors import FormatError, InvalidInputError, Kind
from workers.actor.engine import Completions, GenerationStopped, parse_label
from workers.sampling import MILLI

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deltastore.pipeline.engine_control import ServedVersion
    from workers.actor.engine import Progress, Prompt
    from workers.sampling import Sampling

_LOG = logging.getLogger(__name__)
LEAST_TEMPERATURE_MILLI = MILLI // 100  # vLLM raises a lower one, and only warns
MOST_TEMPERATURE_MILLI = 2 * MILLI
WANTED_ENDS = ("stop", "length")
UNLABELLED = "unlabelled"


class VllmEngine:
    """An `Engine` over `vllm.LLM`.

    Args:
        llm: started with processed log-probabilities; nobody else steps it.
        parameters: `vllm.SamplingParams`.
    """

    def __init__(self, llm: Any, parameters: Callable[..., Any]) -> None:
        self._engine = llm.llm_engine
        self._parameters = parameters
        self._positions = int(llm.model_config.max_model_len)
        self._vocabulary = int(llm.model_config.get_vocab_size())
        self._calls = 0

    def generate(self, prompts: Sequence[Prompt], progress: Progress) -> list[Completions]:
        """Sample every prompt; vLLM batches the samples as it sees fit."""
        for prompt in prompts:
            self._check(prompt)
        self._calls += 1
        samples: dict[str, _Sample] = {}
        try:
            for index, prompt in enumerate(prompts):
                for number in range(prompt.sampling.group_size):
                    request = f"{self._calls}-{index}-{number}"
                    samples[request] = _Sample(index)
                    self._add(request, prompt, number)
            self._decode(samples, progress)
        finally:
            self._let_go(samples)
        made = samples.values()
        return [
            _completions(prompt.sampling, [sample for sample in made if sample.prompt == index])
            for index, prompt in enumerate(prompts)
        ]

    def _decode(self, samples: dict[str, _Sample], progress: Progress) -> None:
        while not all(sample.done for sample in samples.values()):
            for output in self._engine.step():
                sample = samples.get(output.request_id)
                if sample is not None:
                    sample.take(output)
            if not progress(sum(len(sample.tokens) for sample in samples.values())):
                raise GenerationStopped
        for request, sample in samples.items():
            if sample.reason not in WANTED_ENDS:
                _LOG.warning("request %s ended by %r: the work is given up", request, sample.reason)
                raise GenerationStopped

    def _let_go(self, samples: dict[str, _Sample]) -> None:
        """Leave no request in the engine: weights change when this call is over."""
        left = [request for request, sample in samples.items() if not sample.done]
        if left:
            self._engine.abort_request(left)

    def _add(self, request: str, prompt: Prompt, number: int) -> None:
        sampling = prompt.sampling
        parameters = self._parameters(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=sampling.sample_seed(number),
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=[sampling.stop_token],
            ignore_eos=True,  # a job names its stop token; the model's own may be another
            logprobs=0,  # of the sampled token alone
            detokenize=False,
        )
        self._engine.add_request(request, {"prompt_token_ids": list(prompt.tokens)}, parameters)

    def _check(self, prompt: Prompt) -> None:
        sampling = prompt.sampling
        longest = len(prompt.tokens) + sampling.max_new_tokens
        if longest > self._positions or max(prompt.tokens) >= self._vocabulary:
            raise InvalidInputError(
                f"a prompt of {len(prompt.tokens)} tokens and {sampling.max_new_tokens} new ones"
                f" does not fit this engine",
                kind=Kind.PAYLOAD,
                hint=f"{self._positions} positions, token ids below {self._vocabulary}",
            )
        if not LEAST_TEMPERATURE_MILLI <= sampling.temperature_milli <= MOST_TEMPERATURE_MILLI:
            raise InvalidInputError(
                f"vLLM does not sample at temperature {sampling.temperature}",
                kind=Kind.PAYLOAD,
                hint=f"{LEAST_TEMPERATURE_MILLI / MILLI} to {MOST_TEMPERATURE_MILLI / MILLI}",
            )


@dataclass(slots=True)
class _Sample:
    """One request: what has come of it so far."""

    prompt: int
    tokens: Sequence[int] = ()
    logprobs: list[float] = field(default_factory=list)
    done: bool = False
    reason: str | None = None
    labels: list[str] = field(default_factory=list)

    def take(self, output: Any) -> None:
        """Keep what a step reported; outputs are cumulative."""
        (made,) = output.outputs
        self.tokens = made.token_ids
        self.done = bool(output.finished)
        if self.done:
            self.tokens = list(made.token_ids)
            pairs = zip(made.logprobs, self.tokens, strict=True)
            self.logprobs = [float(at[token].logprob) for at, token in pairs]
            self.reason = made.finish_reason
            self.labels = [span.version for span in made.weight_versions or ()]


def _completions(sampling: Sampling, samples: Sequence[_Sample]) -> Completions:
    labels = [label for sample in samples for label in sample.labels or [UNLABELLED]]
    begin, end, unversioned = None, None, ""
    try:
        begin, end = _ends(labels)
    except FormatError as err:
        unversioned = err.message  # a reason to doubt, not to die: the work is handed back
    return Completions(
        [list(sample.tokens) for sample in samples],
        [sample.logprobs for sample in samples],
        [sample.tokens[-1] == sampling.stop_token for sample in samples],
        begin=begin,
        end=end,
        unversioned=unversioned,
    )


def _ends(labels: Sequence[str]) -> tuple[ServedVersion, ServedVersion]:
    """The first of the labels, and the last that differs from it, if one does.

    FormatError when any of them names no version.
    """
    named = [parse_label(label) for label in labels]
    odd = [version for version in named if version != named[0]]
    return named[0], odd[-1] if odd else named[0]
