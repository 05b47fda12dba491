"""A transfer that slows down for days is seen by nobody without numbers: these are for Prometheus.

`Metrics` is an EventSink: it folds events into counters, gauges and histograms of a registry of its
own, so that two runs in one process do not mix. It is a StoreObserver too: a region's store that is
opened with it (`storage/observed.py`) is counted. `docs/metrics.md` names every metric. Labels are
regions, stages, operations and kinds: never keys, versions or actors, whose number has no limit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    start_http_server,
)

from deltastore.errors import InvalidInputError, Kind
from deltastore.events import (
    ActivationFailed,
    ActorJoined,
    EngineHeld,
    EngineReleased,
    PromptParked,
    PublishFailed,
    RegionCommitted,
    RegionFailed,
    ResultSettled,
    SafePointPassed,
    StageFinished,
    StepTrained,
    VersionActivated,
    VersionPublished,
    VersionStaged,
)

if TYPE_CHECKING:
    from types import TracebackType

    from deltastore.errors import DeltastoreError
    from deltastore.events import Event
    from deltastore.storage.store_use import StoreUse

# From a request in a data centre to a checkpoint over a bad line.
SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
# A pause that anybody notices begins at some milliseconds.
PAUSE_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 120.0)

TOKENS = tuple(float(1 << power) for power in range(4, 18))


class Metrics:
    """Counters and histograms of one process. Thread-safe; an EventSink.

    Args:
        run: its name, on every metric.
    """

    def __init__(self, run: str) -> None:
        self.registry = CollectorRegistry()
        self._run = run
        self._stage_seconds = self._histogram("stage_seconds", "per stage", ["region", "stage"])
        self._stage_bytes = self._counter("stage_bytes", "per stage", ["region", "stage"])
        self._stage_parts = self._counter("stage_parts", "objects per stage", ["region", "stage"])
        self._published = self._counter("versions_published", "versions committed in home", [])
        self._publish_failed = self._counter("publish_failures", "by kind", ["kind"])
        self._publish_seconds = self._histogram("publish_seconds", "publish() to the commit", [])
        self._changed = self._counter("changed_elements", "stored changes", [])
        self._delta_bytes = self._counter("delta_bytes", "bytes of deltas", [])
        self._head = self._gauge("head_version", "newest version of home", [])
        self._density = self._gauge("density", "changed share of the last version", [])
        self._region_version = self._gauge("region_version", "newest it holds", ["region"])
        self._region_lag = self._histogram("region_lag_seconds", "behind home", ["region"])
        self._region_failed = self._counter("region_failures", "by kind", ["region", "kind"])
        at = ["region"]
        self._staged_seconds = self._histogram("actor_stage_seconds", "fetch to decoded", at)
        self._staged_bytes = self._counter("actor_staged_bytes", "bytes fetched", at)
        self._staged_parts = self._counter("actor_staged_parts", "objects fetched", at)
        self._activated = self._counter("activations", "of versions", [])
        self._pause = self._histogram("write_pause_seconds", "no forward pass", [], PAUSE_SECONDS)
        self._activation_failed = self._counter("activation_failures", "by kind", ["kind"])
        self._active = self._gauge("active_version", "of this process's actor", [])
        self._joined = self._counter("joins", "rebuilds of an actor's weights", [])
        self._joined_bytes = self._counter("join_bytes", "bytes read to join", [])
        self._safe_points = self._counter("safe_points", "by pause mode", ["mode"])
        self._safe_point = self._histogram(
            "safe_point_seconds", "per stage", ["stage"], PAUSE_SECONDS
        )
        self._held = self._gauge("engine_held", "1 while out of rotation", [])
        self._holds = self._counter("engine_holds", "times out of rotation", [])
        self._results = self._counter("results", "offered for jobs, by outcome", ["outcome"])
        self._result_tokens = self._histogram(
            "result_tokens", "lengths of results, by outcome", ["outcome"], TOKENS
        )
        self._parked = self._counter("prompts_parked", "not done in all attempts", [])
        self._ratio_mean = self._gauge("importance_ratio_mean", "before truncation", [])
        self._ratio_max = self._gauge("importance_ratio_max", "before truncation", [])
        self._mismatch = self._gauge("mismatch_kl", "per token of zero lag", [])
        labels = ["region", "op"]
        self._requests = self._counter("store_requests", "calls of a store", [*labels, "outcome"])
        self._request_seconds = self._histogram("store_request_seconds", "calls", labels)
        self._sent_bytes = self._counter("store_sent_bytes", "bodies put", ["region"])
        self._received_bytes = self._counter("store_received_bytes", "bodies got", ["region"])
        self._retries = self._counter("store_retries", "requests repeated", ["region", "cause"])

    def __call__(self, event: Event) -> None:
        """Count an event; those without a metric are passed over."""
        match event:
            case StageFinished():
                labels = (event.region, event.stage)
                self._stage_seconds.labels(self._run, *labels).observe(event.seconds)
                self._stage_bytes.labels(self._run, *labels).inc(event.size_bytes)
                self._stage_parts.labels(self._run, *labels).inc(event.parts)
            case VersionPublished():
                self._count_version(event)
            case PublishFailed():
                self._publish_failed.labels(self._run, event.kind).inc()
            case RegionCommitted():
                self._region_version.labels(self._run, event.region).set(event.version)
                self._region_lag.labels(self._run, event.region).observe(event.lag_s)
            case RegionFailed():
                self._region_failed.labels(self._run, event.region, event.kind).inc()
            case VersionStaged():
                self._staged_seconds.labels(self._run, event.region).observe(event.stage_s)
                self._staged_bytes.labels(self._run, event.region).inc(event.size_bytes)
                self._staged_parts.labels(self._run, event.region).inc(event.parts)
            case VersionActivated():
                self._activated.labels(self._run).inc()
                self._pause.labels(self._run).observe(event.write_pause_s)
                self._active.labels(self._run).set(event.version)
            case SafePointPassed():
                self._count_safe_point(event)
            case EngineHeld():
                self._holds.labels(self._run).inc()
                self._held.labels(self._run).set(1)
            case EngineReleased():
                self._held.labels(self._run).set(0)
                self._active.labels(self._run).set(event.version)
            case ActivationFailed():
                self._activation_failed.labels(self._run, event.kind).inc()
            case ActorJoined():
                self._joined.labels(self._run).inc()
                self._joined_bytes.labels(self._run).inc(event.size_bytes)
                self._active.labels(self._run).set(event.version)
            case ResultSettled():
                self._results.labels(self._run, event.outcome).inc()
                self._result_tokens.labels(self._run, event.outcome).observe(event.tokens)
            case PromptParked():
                self._parked.labels(self._run).inc()
            case StepTrained():
                self._set_ratios(event)
            case _:
                return

    def _set_ratios(self, event: StepTrained) -> None:
        """A step that learned from no such token says nothing of them: the last value stays."""
        for gauge, value in (
            (self._ratio_mean, event.ratio_mean),
            (self._ratio_max, event.ratio_max),
            (self._mismatch, event.mismatch_kl),
        ):
            if math.isfinite(value):
                gauge.labels(self._run).set(value)

    def called(self, region: str, op: str, outcome: str, seconds: float) -> None:
        """A call of a region's store has ended; see StoreObserver."""
        self._requests.labels(self._run, region, op, outcome).inc()
        self._request_seconds.labels(self._run, region, op).observe(seconds)

    def moved(self, region: str, *, sent_bytes: int = 0, received_bytes: int = 0) -> None:
        """A body has passed a region's store."""
        if sent_bytes:
            self._sent_bytes.labels(self._run, region).inc(sent_bytes)
        if received_bytes:
            self._received_bytes.labels(self._run, region).inc(received_bytes)

    def retried(self, region: str, err: DeltastoreError) -> None:
        """A request to a region's store is made again because of `err`."""
        self._retries.labels(self._run, region, err.kind.value).inc()

    def used(self, use: StoreUse) -> None:
        """What another process counted of its store since it was asked last."""
        for (op, outcome), calls in use.requests.items():
            self._requests.labels(self._run, use.region, op, outcome).inc(calls)
        for cause, times in use.retries.items():
            self._retries.labels(self._run, use.region, cause).inc(times)
        self.moved(use.region, sent_bytes=use.sent_bytes, received_bytes=use.received_bytes)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _count_version(self, event: VersionPublished) -> None:
        self._published.labels(self._run).inc()
        self._publish_seconds.labels(self._run).observe(event.total_s)
        self._changed.labels(self._run).inc(event.nnz)
        self._delta_bytes.labels(self._run).inc(event.delta_bytes)
        self._head.labels(self._run).set(event.version)
        if event.elements:
            self._density.labels(self._run).set(event.nnz / event.elements)

    def _count_safe_point(self, event: SafePointPassed) -> None:
        self._safe_points.labels(self._run, event.mode).inc()
        self._active.labels(self._run).set(event.version)
        for stage in ("pause", "write", "reset", "resume"):
            seconds = getattr(event, f"{stage}_s")
            self._safe_point.labels(self._run, stage).observe(seconds)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        full = f"deltastore_{name}"
        return Counter(full, text, ["run", *labels], registry=self.registry)

    def _gauge(self, name: str, text: str, labels: list[str]) -> Gauge:
        return Gauge(f"deltastore_{name}", text, ["run", *labels], registry=self.registry)

    def _histogram(
        self, name: str, text: str, labels: list[str], buckets: tuple[float, ...] = SECONDS
    ) -> Histogram:
        full = f"deltastore_{name}"
        return Histogram(full, text, ["run", *labels], registry=self.registry, buckets=buckets)


class MetricsServer:
    """Answers `GET /metrics` on a port of its own until it is closed.

    Args:
        port: 0 takes any free one; see `port`.
        host: the address it listens on; metrics are for who may read logs, so not for everybody.

    Raises InvalidInputError(setting) when the port is taken.
    """

    def __init__(self, metrics: Metrics, *, port: int, host: str = "127.0.0.1") -> None:
        try:
            self._server, self._thread = start_http_server(port, host, metrics.registry)
        except OSError as err:
            raise InvalidInputError(
                f"metrics cannot be served on {host}:{port}: {err.strerror}",
                kind=Kind.SETTING,
                hint="choose another metrics_port, or none",
            ) from err
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
