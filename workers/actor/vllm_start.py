"""An engine on whatever lies in a folder serves weights of no version: its ranks prove what it is.

Starts vLLM with this library's weight transfer backend on a checkpoint of the run: the local one,
or, without any, HEAD as the region's bucket has it. The ranks find by fingerprint which version
that is, and stage by themselves. The engine is shut down on every way out.
"""

from __future__ import annotations

import importlib.util
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltastore.adapters.safetensors_write import write_checkpoint
from deltastore.cli.checkpoint_parts import read_parts
from deltastore.cli.keys import read_trusted
from deltastore.errors import IntegrityError, InvalidInputError, Kind
from deltastore.format.fingerprint import Fingerprint
from deltastore.pipeline.replay import replay
from workers.actor.ready import ReadyEngine
from workers.wiring import lend_credentials

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.adapters.vllm.verbs import RankVerbs
    from deltastore.clock import Clock
    from deltastore.format.signing import TrustedKeys
    from deltastore.pipeline.replay import JoinReport
    from deltastore.repository.run import Run
    from workers.actor.safe_point import SafePoint
    from workers.config import ActorConfig, RegionConfig
    from workers.vllm_settings import VllmSettings
    from workers.wiring import Surroundings

BACKEND = "deltastore"
STREAMS = 8


@dataclass(frozen=True, slots=True)
class Start:
    """A checkpoint folder to start an engine on; `report` says how it was made, if it was."""

    folder: Path
    report: JoinReport | None = None


@contextmanager
def start_vllm(
    around: Surroundings, settings: ActorConfig, safe_point: SafePoint
) -> Iterator[ReadyEngine]:
    """Start vLLM as the file says; its weights are at a proved version of the run.

    Raises InvalidInputError(setting) where vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise InvalidInputError(
            "vLLM is not installed in this environment",
            kind=Kind.SETTING,
            hint="`make env-vllm` makes one that has it: start this actor with its Python",
        )
    run = around.regions[settings.region]
    if around.checkpoint is not None:
        start = Start(around.checkpoint)
    else:
        folder = around.folder.made_scratch(settings.actor_id)
        trusted = trusted_keys(settings)
        start = fetch_checkpoint(run, folder, clock=around.clock, trusted=trusted)
    region = around.config.region(settings.region)
    lend_credentials(region)
    spool = around.folder.made_scratch(settings.actor_id) / "spool"
    follow = follow_settings(run_at(region, around.config.run), settings, spool)
    seed = around.config.seed
    arguments = engine_arguments(start.folder, settings.vllm, follow, seed=seed)
    # Only now: the import takes seconds, and what is wrong with the settings is known before.
    from vllm import LLM, SamplingParams

    from deltastore.adapters.vllm.control import LLMControl
    from workers.actor.vllm_engine import VllmEngine
    from workers.actor.vllm_weights import VllmWeights

    llm = LLM(**arguments)
    try:
        control = LLMControl(llm)
        control.initialise()
        weights = VllmWeights(
            control,
            run,
            name=settings.actor_id,
            fingerprint=lambda: live_fingerprint(control),
            start=start.report,
            most_rebuilds=settings.leave_poisoned_after,
            catch_up_s=settings.catch_up_s,
            clock=around.clock,
            sink=around.sink,
            safe_point=safe_point,
            used=around.used,
        )
        yield ReadyEngine(VllmEngine(llm, SamplingParams), weights, weights.via)
    finally:
        llm.llm_engine.engine_core.shutdown()


def live_fingerprint(control: RankVerbs) -> Fingerprint:
    """A whole pass over the live weights of all ranks, on which they must agree.

    Raises IntegrityError(fingerprint) when their answers differ.
    """
    answers = control.call_ranks("deltastore_fingerprint", control.bounds.re_anchor_s)
    if len(set(answers)) != 1:
        raise IntegrityError(
            f"the ranks took different fingerprints of their weights: {sorted(set(answers))[:4]}",
            kind=Kind.FINGERPRINT,
        )
    return Fingerprint.parse(str(answers[0]))


def engine_arguments(
    checkpoint: Path, settings: VllmSettings, follow: dict[str, Any], *, seed: int
) -> dict[str, Any]:
    """What `vllm.LLM` is started with.

    Args:
        follow: this library's section of vLLM's additional configuration.
        seed: of requests that name none; an actor's requests all do.
    """
    arguments: dict[str, Any] = {
        "model": str(checkpoint),
        "dtype": settings.dtype,
        "seed": seed,
        "tensor_parallel_size": settings.tensor_parallel,
        "enforce_eager": settings.enforce_eager,
        "skip_tokenizer_init": True,  # jobs are token ids
        "generation_config": "vllm",  # else the checkpoint's defaults change what jobs ask for
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": BACKEND},
        "additional_config": {BACKEND: follow},
    }
    chosen = {
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "block_size": settings.block_size,
    }
    return arguments | {name: value for name, value in chosen.items() if value is not None}


def trusted_keys(settings: ActorConfig) -> TrustedKeys | None:
    """The keys that must have signed what the actor follows; None trusts the bucket."""
    return read_trusted(None if settings.trusted_keys is None else Path(settings.trusted_keys))


def follow_settings(run: dict[str, Any], settings: ActorConfig, spool: Path) -> dict[str, Any]:
    """This library's section of vLLM's additional configuration, as its workers read it.

    Args:
        spool: where the engine's own stager works, where the host has none for its actors.
    """
    section = run | {"engine": settings.actor_id, "allow_dense": settings.vllm.allow_dense}
    if settings.trusted_keys is not None:
        trusted_keys(settings)  # what is wrong with the file is said here, not by an engine's rank
        section["trusted_keys"] = Path(settings.trusted_keys).read_text("ascii").splitlines()
    if settings.stager_folder is not None:
        return section | {"stager": "shared", "folder": settings.stager_folder}
    return section | {"folder": str(spool.absolute())}


def run_at(region: RegionConfig, run: str) -> dict[str, Any]:
    """How the engine's workers reach the run in that region; no secret is in it."""
    found = {
        "run": f"{region.url.rstrip('/')}/{run}",
        "endpoint": region.endpoint_url,
        "region": region.region,
        "profile": region.profile,
        "region_name": region.name,
    }
    return {name: value for name, value in found.items() if value is not None}


def fetch_checkpoint(
    run: Run, folder: Path, *, clock: Clock, trusted: TrustedKeys | None = None
) -> Start:
    """HEAD of the run, proved by fingerprint, as a checkpoint folder inside `folder`.

    What an earlier start left there is removed. A crash leaves a folder that the next start
    removes.
    """
    for stale in folder.glob("checkpoint-*"):
        shutil.rmtree(stale)
    replayed = replay(run, clock=clock, streams=STREAMS, trusted=trusted)
    parts = read_parts(run, streams=STREAMS)
    out = folder / f"checkpoint-{replayed.manifest.core.version}"
    write_checkpoint(replayed.state, out, headers=parts.headers, extras=parts.extras)
    return Start(out, replayed.report)
