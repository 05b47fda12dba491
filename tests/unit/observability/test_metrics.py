"""What happened can be read as numbers, under names that the documentation lists."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest

from deltastore.coordination.records import Settled
from deltastore.errors import FormatError, InvalidInputError, Kind, NotFoundError, StorageError
from deltastore.events import (
    EngineHeld,
    EngineReleased,
    PromptParked,
    ResultSettled,
    SafePointPassed,
    StepTrained,
    both,
)
from deltastore.observability.metrics import Metrics, MetricsServer
from deltastore.pipeline.replicator import Region
from deltastore.repository.run import open_run
from deltastore.storage.memory import MemoryStore
from deltastore.storage.observed import ObservedStore
from deltastore.storage.store import PutMode
from deltastore.storage.store_use import StoreUse, UseCounter
from deltastore.storage.wrapper import StoreWrapper
from deltastore.testing.clock import FakeClock
from deltastore.testing.faults import LatencyStore, unavailable
from tests.unit.pipeline.harness import RUN, World

DOCUMENT = Path(__file__).parents[3] / "docs" / "metrics.md"


def _value(metrics, name, **labels):
    return metrics.registry.get_sample_value(f"deltastore_{name}", {"run": RUN, **labels})


@pytest.fixture
def metrics():
    """Metrics of the run."""
    return Metrics(RUN)


def test_a_run_in_numbers(tmp_path, metrics):
    """Versions, stages, bytes, regions and activations of a real run are counted exactly."""
    far = MemoryStore()
    world = World(tmp_path, region_stores={"far": far})
    world.events = _Fold(metrics)
    publisher = world.publisher(regions=[Region("far", open_run(far, RUN))])
    manifests = [world.step(publisher, step) for step in range(1, 4)]
    assert publisher.wait_regions(30) == []
    publisher.close()
    world.actor().advance()
    delta_bytes = sum(m.core.delta_bytes for m in manifests)
    assert _value(metrics, "versions_published_total") == 4
    assert _value(metrics, "head_version") == 4
    assert _value(metrics, "delta_bytes_total") == delta_bytes
    assert _value(metrics, "changed_elements_total") == sum(m.core.nnz for m in manifests)
    uploaded = _value(metrics, "stage_bytes_total", region="home", stage="upload")
    assert uploaded == delta_bytes
    parts = _value(metrics, "stage_parts_total", region="home", stage="upload")
    assert parts == sum(len(m.core.segments) for m in manifests)
    assert _value(metrics, "stage_seconds_count", region="home", stage="encode") == 4
    assert _value(metrics, "region_version", region="far") == 4
    assert _value(metrics, "region_lag_seconds_count", region="far") == 4
    assert _value(metrics, "activations_total") == 1
    assert _value(metrics, "active_version") == 4
    assert _value(metrics, "actor_staged_bytes_total", region="home") == delta_bytes
    assert _value(metrics, "actor_staged_parts_total", region="home") == parts
    assert _value(metrics, "actor_stage_seconds_count", region="home") == 4


class _Fold(list):
    """A list of events that also counts them."""

    def __init__(self, metrics):
        super().__init__()
        self._metrics = metrics

    def append(self, event):
        """Count and keep."""
        self._metrics(event)
        super().append(event)


def test_how_far_sampler_and_learner_are_apart(metrics):
    """Ratios of the last step are gauges; a step with nothing to measure leaves them alone."""
    nothing = float("nan")
    metrics(StepTrained(1, 0, 0.5, 0, 0, 32, 0, 1, 0.99, 1.8, 0.003, 1, 1))
    metrics(StepTrained(2, 1, 0.5, 0, 0, 32, 0, 1, 1.01, 1.4, nothing, 1, 1))
    metrics(StepTrained(3, 2, 0.0, 0, 0, 32, 0, 1, nothing, nothing, nothing, 1, 1))
    assert _value(metrics, "importance_ratio_mean") == 1.01
    assert _value(metrics, "importance_ratio_max") == 1.4
    assert _value(metrics, "mismatch_kl") == 0.003


def test_every_outcome_of_a_result_is_counted(metrics):
    """All seven outcomes, what the trainer makes of results, their lengths, and parked prompts."""
    outcomes = [*(outcome.value for outcome in Settled), "corrupt", "stale"]
    for number, outcome in enumerate(outcomes, start=1):
        for _ in range(number):
            metrics(ResultSettled("j", "a", outcome, 100, 1.0))
    metrics(PromptParked("j", 3))
    for number, outcome in enumerate(outcomes, start=1):
        assert _value(metrics, "results_total", outcome=outcome) == number
        assert _value(metrics, "result_tokens_sum", outcome=outcome) == 100 * number
    assert _value(metrics, "prompts_parked_total") == 1


def test_store_calls_by_outcome(metrics):
    """A store's calls are counted by operation and outcome, with their seconds and bytes."""
    clock = FakeClock()
    slow = LatencyStore(MemoryStore(), request_s=0.3, clock=clock)
    store = ObservedStore(slow, metrics, region="far", clock=clock)
    store.put("a", b"12345", mode=PutMode.CREATE)
    store.get("a")
    with pytest.raises(NotFoundError):
        store.head("b")
    assert list(store.list(""))
    store.delete(["a"])
    for op, outcome in [("put", "ok"), ("get", "ok"), ("head", "object_missing"), ("list", "ok")]:
        assert _value(metrics, "store_requests_total", region="far", op=op, outcome=outcome) == 1
    missing = {"region": "far", "op": "list", "outcome": "bucket_missing"}
    assert _value(metrics, "store_requests_total", **missing) is None
    gone = ObservedStore(_Gone(MemoryStore()), metrics, region="far", clock=clock)
    with pytest.raises(NotFoundError):
        list(gone.list(""))
    assert _value(metrics, "store_requests_total", **missing) == 1
    assert _value(metrics, "store_sent_bytes_total", region="far") == 5
    assert _value(metrics, "store_received_bytes_total", region="far") == 5
    seconds = _value(metrics, "store_request_seconds_sum", region="far", op="put")
    assert seconds == pytest.approx(0.3)


class _Gone(StoreWrapper):
    """A bucket that is found missing when the first page of a listing is asked for."""

    def list(self, prefix, *, start_after=None):
        """Fails late, as a generator does."""
        raise NotFoundError("no such bucket", kind=Kind.BUCKET_MISSING)
        yield


def test_counts_of_another_process_are_added_up(metrics):
    """What a stager counts shows in a server's metrics once, whoever reads the counts how often."""
    stager, before = UseCounter(), None
    store = ObservedStore(MemoryStore(), stager, region="far", clock=FakeClock())
    for number in range(3):
        store.put(f"k{number}", b"12345", mode=PutMode.CREATE)
        store.get(f"k{number}")
        stager.retried("far", unavailable())
        now = StoreUse.parse(json.loads(json.dumps(stager.row("far"))))
        for _ in range(2):
            metrics.used(now.since(before))
            before = now
    again = UseCounter()  # a stager that was started anew counts from nothing
    again.moved("far", received_bytes=7)
    metrics.used(StoreUse.parse(again.row("far")).since(before))
    for op in ("put", "get"):
        assert _value(metrics, "store_requests_total", region="far", op=op, outcome="ok") == 3
    assert _value(metrics, "store_sent_bytes_total", region="far") == 15
    assert _value(metrics, "store_received_bytes_total", region="far") == 15 + 7
    assert _value(metrics, "store_retries_total", region="far", cause="unavailable") == 3


@pytest.mark.parametrize(
    "change",
    [
        {"counter": "../x"},
        {"region": ""},
        {"requests": [["get", "ok", -1]]},
        {"requests": [["get", "made up", 1]]},
        {"requests": [["steal", "ok", 1]]},
        {"requests": [["get", "ok"]]},
        {"requests": {}},
        {"retries": [["ok"]]},
        {"retries": [[["ok"], 1]]},
        {"sent_bytes": True},
        {"received_bytes": 1.5},
        {"received_bytes": None},
    ],
)
def test_counts_are_parsed_not_trusted(change):
    """What another process says can neither break a server nor make labels without end."""
    row = UseCounter().row("far")
    StoreUse.parse(row)
    for wrong in ({**row, **change}, [row], None):
        with pytest.raises(FormatError, match="does not say how a store was used") as err:
            StoreUse.parse(wrong)
        assert err.value.kind is Kind.FIELD


def test_retries_by_cause(metrics):
    """A repeated request is counted under the kind of error that caused it."""
    metrics.retried("far", unavailable())
    metrics.retried("far", StorageError("slow down", kind=Kind.THROTTLED))
    assert _value(metrics, "store_retries_total", region="far", cause="unavailable") == 1
    assert _value(metrics, "store_retries_total", region="far", cause="throttled") == 1


def test_every_metric_is_documented_and_the_other_way_round(metrics):
    """docs/metrics.md names exactly the metrics that there are."""
    found = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in metrics.registry.collect()
    }
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert {f"deltastore_{name}" for name in named} == found


def test_served_over_http(metrics):
    """A scrape returns the text format; after closing nobody answers; a taken port is named."""
    metrics.retried("far", unavailable())
    with MetricsServer(metrics, port=0) as server:
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        with pytest.raises(InvalidInputError) as err:
            MetricsServer(metrics, port=server.port)
    assert err.value.kind is Kind.SETTING
    line = f'deltastore_store_retries_total{{cause="unavailable",region="far",run="{RUN}"}} 1.0'
    assert line in text
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=10)


def test_two_sinks_hear_everything():
    """`both` passes every event to both sinks."""
    first, second = [], []
    sink = both(first.append, second.append)
    sink("event")
    assert first == second == ["event"]


def test_an_engine_in_numbers(metrics):
    """Safe points by stage, and whether the engine is out of rotation, are counted exactly."""
    metrics(SafePointPassed("e", 1, 3, "ab" * 32, "keep", 0.25, 0.5, 0.0625, 0.125))
    metrics(EngineHeld("e", 3, "rank 0: the rollback failed"))
    assert _value(metrics, "engine_held") == 1
    metrics(EngineReleased("e", 5, "cd" * 32, 7.0))
    assert _value(metrics, "engine_held") == 0
    assert _value(metrics, "engine_holds_total") == 1
    assert _value(metrics, "safe_points_total", mode="keep") == 1
    assert _value(metrics, "active_version") == 5
    for stage, seconds in (("pause", 0.25), ("write", 0.5), ("reset", 0.0625), ("resume", 0.125)):
        assert _value(metrics, "safe_point_seconds_sum", stage=stage) == seconds
