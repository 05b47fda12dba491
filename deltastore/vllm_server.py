"""A follower whose events nobody takes is a black box: the server plugin is put together here.

The entry point of `vllm.endpoint_plugins`. Adapters know nothing of metrics and logs, so the two
meet in this module, above both: events go to the server's own `/metrics` and, if the setting
`events` names a file, to an event log.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY

from deltastore.adapters.vllm.server import DeltastoreEndpoints
from deltastore.clock import SystemClock
from deltastore.events import both
from deltastore.observability.jsonl import JsonlSink
from deltastore.observability.metrics import Metrics
from deltastore.storage.url import split_run_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deltastore.adapters.vllm.server_settings import ServerSettings
    from deltastore.events import EventSink
    from deltastore.storage.store_use import StoreUse


def endpoint_plugin() -> DeltastoreEndpoints:
    """What vLLM calls once per API server."""
    return DeltastoreEndpoints(observe)


@contextmanager
def observe(
    settings: ServerSettings,
) -> Iterator[tuple[EventSink, Callable[[StoreUse], None]]]:
    """What counts in this process's default registry, which vLLM's `/metrics` shows: a sink, and
    what takes the use that the engine's ranks and their stager make of their store."""
    metrics = Metrics(split_run_url(settings.engine.run)[1])
    with ExitStack() as stack:
        sink: EventSink = metrics
        if settings.events is not None:
            sink = both(metrics, stack.enter_context(JsonlSink(settings.events, SystemClock())))
        REGISTRY.register(metrics.registry)
        stack.callback(REGISTRY.unregister, metrics.registry)
        yield sink, metrics.used
