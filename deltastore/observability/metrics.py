"""A transfer that slows down for days is seen by nobody without numbers: these are for Prometheus.

`Metrics` is an EventSink: it folds events into counters, gauges and histograms of a registry of its
own, so that two runs in one process do not mix. `MeteredStore` wraps a region's store and counts
what passes it. `docs/metrics.md` names every metric. Labels are regions, stages, operations and
kinds: never keys, versions or actors, whose number has no limit.
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

from deltastore.errors import DeltastoreError, InvalidInputError, Kind
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
from deltastore.storage.wrapper import StoreWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType
    from typing import TypeVar

    from deltastore.clock import Clock
    from deltastore.events import Event
    from deltastore.storage.store import (
        Body,
        ByteRange,
        ObjectInfo,
        ObjectStore,
        PutMode,
        PutOutcome,
    )

    T = TypeVar("T")

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
        self._staged_seconds = self._histogram("actor_stage_seconds", "fetch to decoded", [])
        self._staged_bytes = self._counter("actor_staged_bytes", "bytes fetched", [])
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
        self.requests = self._counter("store_requests", "calls of a store", [*labels, "outcome"])
        self.request_seconds = self._histogram("store_request_seconds", "calls", labels)
        self.sent_bytes = self._counter("store_sent_bytes", "bodies put", ["region"])
        self.received_bytes = self._counter("store_received_bytes", "bodies got", ["region"])
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
                self._staged_seconds.labels(self._run).observe(event.stage_s)
                self._staged_bytes.labels(self._run).inc(event.size_bytes)
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

    def retried(self, region: str, err: DeltastoreError) -> None:
        """A request to a region's store is made again because of `err`."""
        self._retries.labels(self._run, region, err.kind.value).inc()

    def metered(self, store: ObjectStore, region: str, clock: Clock) -> MeteredStore:
        """A region's store whose calls are counted here."""
        return MeteredStore(store, self, run=self._run, region=region, clock=clock)

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


class MeteredStore(StoreWrapper):
    """A store whose calls, bytes and seconds are counted per region; failures by kind."""

    def __init__(
        self, inner: ObjectStore, metrics: Metrics, *, run: str, region: str, clock: Clock
    ) -> None:
        super().__init__(inner)
        self._metrics = metrics
        self._run = run
        self._region = region
        self._clock = clock

    def put(self, key: str, body: Body, *, mode: PutMode) -> PutOutcome:
        """A counted put."""
        outcome = self._call("put", lambda: self.inner.put(key, body, mode=mode))
        self._metrics.sent_bytes.labels(self._run, self._region).inc(memoryview(body).nbytes)
        return outcome

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """A counted get."""
        body = self._call("get", lambda: self.inner.get(key, byte_range))
        self._metrics.received_bytes.labels(self._run, self._region).inc(len(body))
        return body

    def head(self, key: str) -> ObjectInfo:
        """A counted head."""
        return self._call("head", lambda: self.inner.head(key))

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """A counted listing, one however many pages it has."""
        return self._call("list", lambda: self.inner.list(prefix, start_after=start_after))

    def delete(self, keys: Iterable[str]) -> None:
        """A counted deletion, one however many keys it has."""
        self._call("delete", lambda: self.inner.delete(keys))

    def _call(self, op: str, call: Callable[[], T]) -> T:
        started_s = self._clock.monotonic_s()
        outcome = "ok"
        try:
            return call()
        except DeltastoreError as err:
            outcome = err.kind.value
            raise
        finally:
            seconds = self._clock.monotonic_s() - started_s
            self._metrics.requests.labels(self._run, self._region, op, outcome).inc()
            self._metrics.request_seconds.labels(self._run, self._region, op).observe(seconds)


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
