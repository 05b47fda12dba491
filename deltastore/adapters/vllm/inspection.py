"""An engine that is refused after the trainer has started costs the run: it is asked beforehand.

Starts the engine in this environment on a model's folder, has it find what it covers of a run, and
measures how long an activation takes: of what the run has beyond the folder, or else of a change of
1 % that is made up in a run of its own, on a local disk.
"""

from __future__ import annotations

import logging
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deltastore.adapters.safetensors_dir import checkpoint_layout, load_state, scan_checkpoint
from deltastore.adapters.vllm.control import LLMControl
from deltastore.adapters.vllm.settings import SECTION
from deltastore.adapters.vllm.verbs import engine_error
from deltastore.adapters.vllm.versions import find_facts, require_supported
from deltastore.errors import ApplyError, Kind
from deltastore.format.mixing import fingerprint_state
from deltastore.pipeline.engine_control import NEWEST, RankStatus, agreed
from deltastore.pipeline.host import HostSource
from deltastore.pipeline.publisher import Publisher
from deltastore.repository.run import CheckpointFile, create_run
from deltastore.storage.url import open_store

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from deltastore.clock import Clock

_LOG = logging.getLogger(__name__)
DENSITY = 0.01
"""Of the made-up change: what one step of reinforcement learning moves."""
SEED = 1
ENGINE = {
    "enforce_eager": True,  # nothing is generated: graphs would only take time
    "max_model_len": 512,
    "max_num_seqs": 2,
    "kv_cache_memory_bytes": 64 << 20,
    "disable_log_stats": True,
}
STOPS_WITHIN_S = 120.0
STAGED_WITHIN_S = 120.0  # a version of the run, fetched from its bucket
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class MeasuredPause:
    """How long one activation took.

    Args:
        source: "run", or "synthetic" for a change that was made up.
        base_version, version: of the run that it was measured on.
        nnz: changes, if they are known.
        density: changed share of the elements, if it is known.
    """

    source: str
    base_version: int
    version: int
    seconds: float
    nnz: int | None = None
    density: float | None = None


class Inspection:
    """An engine that was started to be looked at, and follows nothing yet.

    Args:
        section: settings, as in the engine's additional configuration.
    """

    def __init__(self, llm: Any, section: Mapping[str, Any], clock: Clock) -> None:
        self._llm = llm
        self._section = dict(section)
        self._clock = clock
        self._control = LLMControl(llm)

    def follow(self) -> list[RankStatus]:
        """Have it find what it covers and which version it is at; what every rank says then.

        Raises what following would be refused with.
        """
        self._control.initialise()
        return self._control.status()

    def pause_of_run(self, never: threading.Event, *, newest: int) -> MeasuredPause | None:
        """Activate what the run has beyond the folder; None when it has nothing."""
        base = self._at()
        if base >= newest:
            return None
        self._await_staged(never)
        return self._activate("run", base, None, None)

    def pause_of_made_up(self, model: Path, never: threading.Event) -> MeasuredPause:
        """Activate a made-up change of 1 % of the model; the engine's weights are of no use then.

        Takes the model's size on the disk of temporary files and twice that in memory.
        """
        self._control.call_ranks("shutdown_weight_transfer_engine", STOPS_WITHIN_S)
        with tempfile.TemporaryDirectory(prefix="deltastore-doctor-") as folder:
            store = open_store(f"file://{folder}/runs", clock=self._clock)
            checkpoint = scan_checkpoint(model)
            layout = checkpoint_layout(checkpoint)
            state = load_state(checkpoint, layout)
            run = create_run(
                store,
                "doctor",
                layout=layout,
                files=[CheckpointFile(file.name, file.path) for file in checkpoint.files],
                fingerprint=fingerprint_state(state),
                clock=self._clock,
            )
            section = {
                "run": f"file://{folder}/runs/doctor",
                "folder": f"{folder}/spool",
                "stager": "own",
                "trusted_keys": [],
            }
            control = LLMControl(self._llm, init_info=section)
            control.initialise()
            random = np.random.default_rng(SEED)
            changes = 0
            for bits in state.arrays:
                places = random.random(bits.size, np.float32) < DENSITY
                bits[places] += bits.dtype.type(1)
                changes += int(places.sum())
            Publisher.open(run, HostSource(state), clock=self._clock, step=1).close()
            self._await_staged(never)
            measured = self._activate("synthetic", 0, changes, changes / max(1, layout.elements))
            self._control.call_ranks("shutdown_weight_transfer_engine", STOPS_WITHIN_S)
            store.close()
        return measured

    def _activate(
        self, source: str, base: int, nnz: int | None, density: float | None
    ) -> MeasuredPause:
        self._control.update(NEWEST)
        seconds = max(one.last_pause_s or 0.0 for one in self._control.status())
        return MeasuredPause(source, base, self._at(), seconds, nnz, density)

    def _at(self) -> int:
        served = agreed(self._control.status())
        if served is None:
            raise ApplyError("the ranks do not agree where they are", kind=Kind.POISONED)
        return served.version

    def _await_staged(self, never: threading.Event) -> None:
        deadline_s = self._clock.monotonic_s() + STAGED_WITHIN_S
        while True:
            statuses = self._control.status()
            if all(one.staged is not None and one.staged == one.head for one in statuses):
                return
            if self._clock.monotonic_s() > deadline_s:
                why = next((one.trouble for one in statuses if one.trouble), "no reason is known")
                raise ApplyError(
                    f"nothing was staged within {STAGED_WITHIN_S:g} s: {why}",
                    kind=Kind.NOT_STAGED,
                    hint="see the engine's log",
                )
            self._clock.wait(never, LOOK_S)


@contextmanager
def started_engine(
    model: Path,
    section: Mapping[str, Any],
    clock: Clock,
    *,
    tensor_parallel: int = 1,
    more: Mapping[str, Any] | None = None,
) -> Iterator[Inspection]:
    """Start an engine on a model's folder, as a server of that run would be started.

    Args:
        section: deltastore's part of the additional configuration.
        more: arguments of `vllm.LLM` that win over those made to start quickly.

    Raises InvalidInputError(engine_version) when vLLM is not installed or not supported, what the
    engine refuses to start with, and ApplyError(engine) for faults of its own.
    """
    require_supported(find_facts())
    from vllm import LLM

    arguments = {
        **ENGINE,
        "tensor_parallel_size": tensor_parallel,
        "worker_extension_cls": "deltastore.adapters.vllm.extension.WorkerExtension",
        **(more or {}),
        "weight_transfer_config": {"backend": SECTION},
        "additional_config": {SECTION: dict(section)},
    }
    try:
        llm = LLM(model=str(model), **arguments)
    except Exception as err:
        raise engine_error("the start", err) from err
    try:
        yield Inspection(llm, section, clock)
    finally:
        llm.llm_engine.engine_core.shutdown()
