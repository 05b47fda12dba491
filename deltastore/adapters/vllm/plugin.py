"""A backend that must be switched on by hand in every process is missing in one: a plugin does it.

vLLM calls `register` in every process it has, some of them more than once. In each it
  - registers the weight transfer backend "deltastore" (a refusal, where vLLM is not supported);
  - gives every worker `deltastore_status`, `deltastore_fingerprint` and `deltastore_re_anchor`;
  - and, for engines whose backend it is, and no others: loads the model without packing weights on
    CPUs, says at which version the engine serves (`weight_marker.py`), tells the backend when the
    engine sleeps.
Of an engine that does not use the backend nothing is changed but its start on a CPU: the kernel is
asked for the tile registers, and vLLM's search for kernels passes by odd objects (`cpu_start.py`).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from deltastore.adapters.vllm.cpu_start import claim_tiles, pass_by_odd_attributes
from deltastore.adapters.vllm.prepacking import on_cpu, unpacked_weights
from deltastore.adapters.vllm.rank_call import answer_of
from deltastore.adapters.vllm.versions import find_facts, refusal
from deltastore.adapters.vllm.weight_marker import MOVING, OTHERS, mark_weights
from deltastore.errors import InvalidInputError, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

BACKEND = "deltastore"
_DONE = "_deltastore_registered"


def register() -> None:
    """The entry point of `vllm.general_plugins`. Idempotent."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if getattr(WeightTransferEngineFactory, _DONE, False):
        return
    setattr(WeightTransferEngineFactory, _DONE, True)
    module = "deltastore.adapters.vllm.versions"
    if refusal(find_facts()) is not None:
        WeightTransferEngineFactory.register_engine(BACKEND, module, "refused_engine")
        return
    WeightTransferEngineFactory.register_engine(BACKEND, module, "checked_engine")
    if on_cpu():
        claim_tiles()
        pass_by_odd_attributes()
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    _extend_worker(WorkerBase)
    mark_weights(EngineCore, uses_backend)


def uses_backend(vllm_config: Any) -> bool:
    """Whether an engine's weights come through this backend."""
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    return transfer is not None and transfer.backend == BACKEND


def _extend_worker(worker_class: Any) -> None:
    worker_class.deltastore_status = _status
    worker_class.deltastore_re_anchor = _re_anchor
    worker_class.deltastore_call = _call
    worker_class.deltastore_fingerprint = _fingerprint
    before = worker_class.__init__

    @functools.wraps(before)
    def init(self: Any, vllm_config: Any, *arguments: Any, **named: Any) -> None:
        before(self, vllm_config, *arguments, **named)
        if uses_backend(vllm_config):
            _prepare(self)

    worker_class.__init__ = init


def _prepare(worker: Any) -> None:
    """Wrap what this one worker does to its weights."""
    load = worker.load_model

    @functools.wraps(load)
    def load_model(*arguments: Any, **named: Any) -> None:
        with unpacked_weights():
            load(*arguments, **named)

    worker.load_model = load_model
    if not on_cpu():  # where vLLM ignores both
        worker.sleep = _telling(worker, worker.sleep, "fell_asleep")
        worker.wake_up = _telling(worker, worker.wake_up, "woke_up")
        if hasattr(worker, "discard"):
            worker.discard = _telling(worker, worker.discard, "let_go")


def _telling(worker: Any, call: Callable[..., Any], method: str) -> Callable[..., Any]:
    """`call`, after which the backend is told with the same arguments."""

    @functools.wraps(call)
    def told(*arguments: Any, **named: Any) -> Any:
        answer = call(*arguments, **named)
        getattr(worker.weight_transfer_engine, method)(*arguments, **named)
        return answer

    return told


def _engine_of(worker: Any) -> Any:
    engine = getattr(worker, "weight_transfer_engine", None)
    if engine is None or not uses_backend(worker.vllm_config):
        raise InvalidInputError(
            "this engine's weights do not come from deltastore",
            kind=Kind.SETTING,
            hint='start it with --weight-transfer-config \'{"backend": "deltastore"}\'',
        )
    return engine


def _status(self: Any) -> dict[str, Any]:
    """What this rank says of itself; see `DeltastoreEngine.status`."""
    found: dict[str, Any] = _engine_of(self).status()
    return found


def _fingerprint(self: Any) -> str:
    """The fingerprint of all live weights of all ranks; on every rank at once, while paused."""
    found: str = _engine_of(self).fingerprint()
    return found


def _call(self: Any, method: str, arguments: Any, named: Any) -> Any:
    """One of the calls after which weights may have moved; its error is an answer."""
    if method not in MOVING | OTHERS:
        raise InvalidInputError(f"{method!r} is not called this way", kind=Kind.NAME)
    _engine_of(self).errors_are_answers = True
    return answer_of(self, method, arguments, named)


def _re_anchor(self: Any) -> None:
    """Write the newest version whole, from the bucket; on every rank at once, while paused."""
    from vllm.config import set_current_vllm_config

    engine = _engine_of(self)
    with set_current_vllm_config(self.vllm_config):
        engine.re_anchor()
