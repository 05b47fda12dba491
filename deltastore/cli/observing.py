"""A command that runs for weeks is watched from outside: events go to a file, numbers to a port."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.cli.files import typed_errors
from deltastore.events import both, discard
from deltastore.observability.jsonl import JsonlSink

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

    from deltastore.clock import Clock
    from deltastore.events import EventSink
    from deltastore.observability.metrics import Metrics

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Observing:
    """Where a command says what happens.

    Args:
        events: a file that each event is appended to.
        metrics_port: of this machine, where metrics are served; 0 takes any free one.
    """

    events: Path | None = None
    metrics_port: int | None = None

    def begin(self, stack: ExitStack, run: str, clock: Clock) -> tuple[EventSink, Metrics | None]:
        """What takes events, and the metrics that are served, until the stack is closed."""
        sink: EventSink = discard
        metrics: Metrics | None = None
        if self.metrics_port is not None:
            # Only now: who serves no metrics needs no library for them.
            from deltastore.observability.metrics import Metrics, MetricsServer

            sink = metrics = Metrics(run)
            served = stack.enter_context(MetricsServer(metrics, port=self.metrics_port))
            _LOG.info("metrics are at http://127.0.0.1:%d/metrics", served.port)
        if self.events is not None:
            with typed_errors(self.events):
                sink = both(sink, stack.enter_context(JsonlSink(self.events, clock)))
        return sink, metrics
