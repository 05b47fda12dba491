"""Weights that are more than the checkpoint serve a mixture after an update: refused at the start.

What the configuration of an engine says, without looking at its weights. Everything here is read
by name from vLLM's configuration objects, so that tests can make them up.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltastore.errors import InvalidInputError, Kind

if TYPE_CHECKING:
    from deltastore.adapters.vllm.settings import EngineSettings

LOADED_ELSEWHERE = ("dummy", "bitsandbytes", "tensorizer", "sharded_state", "gguf")
"""Load formats after which the weights are not the checkpoint's, element by element."""


def refuse_unfollowable(vllm_config: Any) -> None:
    """Raise InvalidInputError(setting) when this engine cannot follow a run, naming why."""
    model = vllm_config.model_config
    if getattr(vllm_config, "lora_config", None) is not None:
        raise _refused(
            "the engine has LoRA enabled: adapters would be merged with weights that move",
            "start it without --enable-lora",
        )
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and str(draft.model) == str(model.model):
        raise _refused(
            "the engine's draft model is part of the checkpoint, and would stay at its old weights",
            "start it without --speculative-config, or with a draft model of its own",
        )
    declared = getattr(getattr(model, "hf_config", None), "quantization_config", None)
    quantized = getattr(model, "quantization", None)
    if quantized is not None and declared is None:
        raise _refused(
            f"the engine quantizes its weights while it loads ({quantized}):"
            " no checkpoint has the bits that it runs with",
            "start it without --quantization, or from a quantized checkpoint and run",
        )
    load_format = str(vllm_config.load_config.load_format).rpartition(".")[2].lower()
    if load_format in LOADED_ELSEWHERE:
        raise _refused(
            f"the engine was loaded with the load format {load_format!r}, not from a checkpoint",
            "start it with --load-format auto",
        )
    nodes = int(getattr(vllm_config.parallel_config, "nnodes", 1))
    if nodes > 1:
        raise _refused(
            f"the engine spans {nodes} hosts, and a stager serves one",
            "use one engine per host",
        )


def checkpoint_folder(vllm_config: Any, settings: EngineSettings) -> Path:
    """The folder whose bytes the engine has loaded.

    Raises InvalidInputError(checkpoint) when it is not on this host.
    """
    model = vllm_config.model_config
    name = settings.checkpoint or str(model.model)
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            name,
            revision=getattr(model, "revision", None),
            cache_dir=getattr(vllm_config.load_config, "download_dir", None),
            local_files_only=True,
        )
    except (OSError, ValueError) as err:
        raise InvalidInputError(
            f"the checkpoint {name!r} that the engine was loaded from is not on this host: {err}",
            kind=Kind.CHECKPOINT,
            hint="set `checkpoint` to its folder",
        ) from err
    return Path(found)


def _refused(message: str, hint: str) -> InvalidInputError:
    return InvalidInputError(message, kind=Kind.SETTING, hint=hint)
