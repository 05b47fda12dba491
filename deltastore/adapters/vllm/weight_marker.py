"""Tokens that name a version whose weights never were are believed: the marker is what ranks prove.

The engine core's weight version is set to "version:policy-hash" after every call that may have
changed weights, from what all worker ranks say of themselves: for `LLM`, `AsyncLLM` and the API
server alike; while the engine follows a run nobody else can set another one. What was computed from
the weights before, prefix caches above all, is dropped when the version moves. When ranks are in
doubt, or do not agree, it says "poisoned", takes no new request, is kept from stepping, and is not
resumed, until they agree again.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import TYPE_CHECKING, Any

from deltastore.adapters.vllm.rank_call import raise_first
from deltastore.errors import ApplyError, Kind
from deltastore.pipeline.engine_control import RankStatus, agreed, asleep, doubt, unfollowed

if TYPE_CHECKING:
    from collections.abc import Callable

POISONED = "poisoned"
_log = logging.getLogger(__name__)
CALL = "deltastore_call"
"""The workers' method through which calls of `MOVING` and `OTHERS` are made: see `rank_call.py`."""
MOVING = frozenset(
    {
        "init_weight_transfer_engine",
        "update_weights",
        "finish_weight_update",
        "deltastore_re_anchor",
        "shutdown_weight_transfer_engine",
    }
)
"""Calls of workers after which an engine may be at another version, or in doubt."""
OTHERS = frozenset({"start_weight_update", "start_draft_weight_update"})
"""Further calls that fail on all ranks."""


def mark_weights(core_class: Any, uses_backend: Callable[[Any], bool]) -> None:
    """Have the cores of engines that use the backend keep their weight version true."""
    call, resume, add, name = (
        core_class.collective_rpc,
        core_class.resume_scheduler,
        core_class.preprocess_add_request,
        core_class.set_weight_version,
    )

    @functools.wraps(call)
    def collective_rpc(
        self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        ours = isinstance(method, str) and method in MOVING | OTHERS
        if not (ours and uses_backend(self.vllm_config)):
            return call(self, method, timeout, args, kwargs)
        before = getattr(self, "_deltastore_label", "")
        try:
            answers = call(self, CALL, timeout, (method, tuple(args), dict(kwargs or {})))
            raise_first(answers)
        except Exception as err:
            if method in MOVING:
                _mark_after(err, self, call)
            raise
        if method in MOVING:
            _mark(self, call)
            if self._deltastore_label not in {"", POISONED, before}:
                _drop_caches(self)
        return answers

    @functools.wraps(resume)
    def resume_scheduler(self: Any) -> None:
        if uses_backend(self.vllm_config):
            statuses = _mark(self, call)
            _refuse_in_doubt(self)
            _refuse_asleep(statuses)
        resume(self)

    @functools.wraps(add)
    def preprocess_add_request(self: Any, *arguments: Any, **named: Any) -> Any:
        _refuse_in_doubt(self)
        return add(self, *arguments, **named)

    @functools.wraps(name)
    def set_weight_version(self: Any, weight_version: str) -> None:
        proved = getattr(self, "_deltastore_label", "")
        if proved and weight_version != proved:
            _log.warning("the weight version stays %s: %r is not proved", proved, weight_version)
        name(self, proved or weight_version)

    core_class.collective_rpc = collective_rpc
    core_class.set_weight_version = set_weight_version
    core_class.resume_scheduler = resume_scheduler
    core_class.preprocess_add_request = preprocess_add_request


def _mark(core: Any, call: Callable[..., Any]) -> list[RankStatus]:
    """Ask all ranks where they are, and say so."""
    statuses = [RankStatus.parse(row) for row in call(core, "deltastore_status")]
    if unfollowed(statuses):
        core._deltastore_label = ""  # others may name what they load
        return statuses
    active = agreed(statuses)
    _keep_from_stepping(core, doubt(statuses))
    _label(core, POISONED if active is None else str(active))
    return statuses


def _mark_after(err: Exception, core: Any, call: Callable[..., Any]) -> None:
    """The same after a failure, which stays the one that is reported."""
    try:
        _mark(core, call)
    except Exception as second:  # noqa: BLE001 - the first one is raised, with this as its note
        _keep_from_stepping(core, f"the ranks do not say where they are: {second}")
        _label(core, POISONED)
        err.add_note(f"afterwards the ranks did not say where they are: {second}")


def _drop_caches(core: Any) -> None:
    """Have requests that run computed anew, and nobody find what the weights before computed.

    Who has paused the engine (the safe points here) resets again before it resumes, and judges what
    the connectors say; nobody else does.
    """
    from vllm.v1.core.sched.interface import PauseState

    if core.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
        return
    if core.scheduler.pause_state != PauseState.UNPAUSED:
        _log.warning("a KV cache was not emptied after a move to %s", core._deltastore_label)
        return
    raise ApplyError(
        f"the engine is at {core._deltastore_label}, but a KV cache did not empty itself",
        kind=Kind.CACHE_RESET,
        hint="before generating: reset_prefix_cache(reset_connector=True) until it returns True",
    )


def _label(core: Any, text: str) -> None:
    core._deltastore_label = text
    core.set_weight_version(text)


def _keep_from_stepping(core: Any, reason: str) -> None:
    from vllm.v1.core.sched.interface import PauseState

    before = getattr(core, "_deltastore_doubt", "")
    core._deltastore_doubt = reason
    if reason:
        _guard_front_end()
    if reason and not before:
        core._deltastore_paused_from = core.scheduler.pause_state
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    elif before and not reason:
        core.scheduler.set_pause_state(core._deltastore_paused_from)


def _guard_front_end() -> None:
    """Refuse requests of an `LLM` in this process before it has noted them.

    Refused by the core only, such a request would be waited for by the next `generate` for ever.
    """
    front = sys.modules.get("vllm.v1.engine.llm_engine")
    if front is None or getattr(front.LLMEngine, "_deltastore_guarded", False):
        return
    add = front.LLMEngine.add_request

    @functools.wraps(add)
    def add_request(self: Any, *arguments: Any, **named: Any) -> Any:
        _refuse_in_doubt(getattr(self.engine_core, "engine_core", None))
        return add(self, *arguments, **named)

    front.LLMEngine.add_request = add_request
    front.LLMEngine._deltastore_guarded = True


def _refuse_asleep(statuses: list[RankStatus]) -> None:
    """VLLM resumes whatever it is told to; an engine that sleeps is resumed by waking it up."""
    if asleep(statuses):
        raise ApplyError(
            "the engine sleeps: memory that a forward pass needs is not there",
            kind=Kind.ENGINE,
            hint="wake it up: that resumes it",
        )


def _refuse_in_doubt(core: Any) -> None:
    reason = getattr(core, "_deltastore_doubt", "")
    if reason:
        raise ApplyError(
            f"the engine does not serve: {reason}",
            kind=Kind.POISONED,
            hint="re-anchor it: collective_rpc('deltastore_re_anchor')",
        )
