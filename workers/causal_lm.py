"""A prompt encoded once per sample costs eight times its price: a group shares one prefill.

What trainer and actor do alike with a transformers model: make one around weights that are not
there yet, and run a batch of prompts once for all samples of their groups.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from deltastore.errors import InvalidInputError, Kind

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


_LOADING = threading.Lock()  # transformers patches torch's globals while it builds a model


def load_model(folder: Path) -> Any:
    """The model of a checkpoint folder in float32 (an exact widening of bf16), ready to run."""
    return _call(folder, lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def empty_model(folder: Path) -> Any:
    """The model of a folder's config.json in float32, all weights 0: a place to put weights."""

    def build() -> Any:
        config = AutoConfig.from_pretrained(folder)
        from_config: Any = AutoModelForCausalLM.from_config  # untyped there
        return from_config(config, dtype=torch.float32)

    model = _call(folder, build)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def prefill(model: Any, prompts: torch.Tensor, repeats: int) -> tuple[Any, torch.Tensor]:
    """Run equal-length prompts once; return a cache and the next-token logits, per sample.

    Args:
        prompts: [groups, length]; the result has groups x repeats rows, a group's side by side.
    """
    cache = DynamicCache(config=model.config)
    logits = model(input_ids=prompts, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    if repeats > 1:
        cache.batch_repeat_interleave(repeats)
        logits = logits.repeat_interleave(repeats, dim=0)
    return cache, logits


def _call(folder: Path, build: Callable[[], Any]) -> Any:
    quiet: Any = transformers_logging  # untyped there; its bars would tear the worker's log
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    try:
        with _LOADING:
            model = build()
    except (OSError, ValueError, KeyError) as err:
        raise InvalidInputError(
            f"transformers cannot make a model from {folder}: {err}",
            kind=Kind.CHECKPOINT,
            hint="the folder needs a config.json of a causal language model",
        ) from err
    model.eval()  # dropout in the loss would be a policy that nobody sampled from
    return model
