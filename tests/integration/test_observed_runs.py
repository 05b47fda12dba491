"""What a library's user asks to be counted is counted, over real sockets, region by region."""

from __future__ import annotations

import subprocess
import sys
import threading
import urllib.request
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import deltastore
from deltastore.config import PublisherSettings
from deltastore.errors import InvalidInputError, Kind
from deltastore.events import ActorJoined, VersionStaged
from deltastore.format.layout import BitState, Layout
from deltastore.format.mixing import fingerprint_state
from deltastore.observability.metrics import Metrics, MetricsServer
from deltastore.pipeline.host import HostSource, HostTarget
from deltastore.repository.fetch import load_manifest
from deltastore.repository.run import create_run
from deltastore.storage.url import open_store
from deltastore.testing.clock import FakeClock
from deltastore.testing.s3_proxy import Before, DropResponse, Reply, S3Proxy
from tests.unit.pipeline.harness import ENTRIES, RUN, change_some, random_state, write_files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from deltastore.api import RunHandle
    from deltastore.testing.servers import SeaweedServer

TIMEOUT_S = 60.0


class Site:
    """A run in two regions of one server, each behind a line of its own."""

    def __init__(self, server: SeaweedServer, bucket: str, folder: Path) -> None:
        self.lines = {name: S3Proxy(server.endpoint) for name in ("east", "west")}
        self.keys = {"access_key": server.access_key, "secret_key": server.secret_key}
        self.bucket = bucket
        self.state = random_state(Layout.build(ENTRIES), 1)
        self.zero: BitState = self.state.copy()
        stores = {
            name: open_store(f"s3://{bucket}/{name}", endpoint_url=server.endpoint, **self.keys)
            for name in self.lines
        }
        create_run(
            stores["east"],
            RUN,
            layout=self.state.layout,
            files=write_files(self.state, folder),
            fingerprint=fingerprint_state(self.state),
            clock=FakeClock(),
            regions={"west": stores["west"]},
            home_name="east",
            probe=False,
        )
        for store in stores.values():
            store.close()

    def connect(self, where: str, **options: Any) -> RunHandle:
        """A handle of the run in that region, with keys given as they are."""
        return deltastore.connect(
            f"s3://{self.bucket}/{where}/{RUN}",
            endpoint_url=self.lines[where].endpoint,
            clock=FakeClock(),
            **self.keys,
            **options,
        )


@pytest.fixture
def site(s3_server: SeaweedServer, s3_bucket: str, tmp_path: Path) -> Iterator[Site]:
    """A run, and lines to it that break on command."""
    made = Site(s3_server, s3_bucket, tmp_path / "files")
    with made.lines["east"], made.lines["west"]:
        yield made


def scraped(metrics: Metrics) -> dict[str, float]:
    """Every sample as a scrape over HTTP has it, by `name{labels}`; the run's label left out."""
    with MetricsServer(metrics, port=0) as server:
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sorted((name, value) for name, value in sample.labels.items() if name != "run")
            said = ",".join(f'{name}="{value}"' for name, value in labels)
            found[f"{sample.name.removeprefix('deltastore_')}{{{said}}}"] = sample.value
    return found


def test_retries_bytes_and_parts_of_every_region_are_counted(site: Site) -> None:
    """A 503 in one region and a lost answer in the other show by cause, in their own region only;
    bodies, parts and stages of publisher, actor and replay are there with their regions."""
    site.lines["west"].add("PUT", "/deltas/", Reply(503, "SlowDown"), times=2)
    site.lines["east"].add("PUT", "/versions/", DropResponse())
    metrics, events = Metrics(RUN), []
    home = site.connect("east", metrics=metrics)
    regions = {"west": site.connect("west", metrics=metrics, name="west")}
    change_some(site.state, np.random.default_rng(1))
    publisher = home.publisher(HostSource(site.state), regions=regions, sink=events.append)
    assert publisher.wait_regions(TIMEOUT_S) == []
    publisher.close()
    live = site.zero.copy()
    actor = regions["west"].actor(HostTarget(live), sink=events.append)
    home.replay()
    assert actor.active.version == 0
    change_some(site.state, np.random.default_rng(2))
    again = home.publisher(HostSource(site.state), regions=regions)
    assert again.wait_regions(TIMEOUT_S) == []
    again.close()
    while actor.stage():
        actor.activate()
    assert live.equals(site.state)
    core = load_manifest(home.run, 1).core
    segments = len(core.segments)
    found = scraped(metrics)
    assert found['store_retries_total{cause="throttled",region="west"}'] == 2
    assert found['store_retries_total{cause="unavailable",region="east"}'] == 1
    retried = {name for name in found if name.startswith("store_retries_total")}
    assert len(retried) == 2, retried
    for region in ("east", "west"):
        assert found[f'store_sent_bytes_total{{region="{region}"}}'] > core.delta_bytes
        assert found[f'store_received_bytes_total{{region="{region}"}}'] > core.delta_bytes
        calls = f'{{op="put",outcome="ok",region="{region}"}}'
        assert found[f"store_requests_total{calls}"] >= segments + 2
    assert found['stage_parts_total{region="east",stage="upload"}'] >= segments
    assert found['stage_parts_total{region="west",stage="copy"}'] >= segments
    assert found['stage_parts_total{region="east",stage="replay"}'] == segments + 1
    assert found['stage_seconds_count{region="east",stage="replay"}'] == 1
    assert found['actor_staged_parts_total{region="west"}'] >= 2 * segments
    assert found['actor_stage_seconds_count{region="west"}'] == 2
    assert found["joins_total{}"] == 1
    assert found["active_version{}"] == actor.active.version == 2
    told = [event for event in events if isinstance(event, VersionStaged)]
    assert {(event.region, event.parts > 0) for event in told} == {("west", True)}
    assert [event.via for event in events if isinstance(event, ActorJoined)] == ["its own weights"]


def test_streams_of_a_region_are_its_own(site: Site) -> None:
    """Each handle's streams reach its connection pool, its region's threads and home's uploader."""
    home = site.connect("east", streams=3)
    west = site.connect("west", streams=100)
    pools = [handle.run.store._settings for handle in (home, west)]
    assert [(one.streams, one.max_connections) for one in pools] == [(3, 64), (100, 100)]
    publisher = home.publisher(HostSource(site.state), regions={"west": west})
    (region,) = publisher._fanout._regions
    assert (publisher._settings.streams, region._streams) == (3, 100)
    publisher.close()
    said = PublisherSettings(streams=5)
    publisher = home.publisher(
        HostSource(site.state), regions={"west": site.connect("west")}, settings=said
    )
    (region,) = publisher._fanout._regions
    assert (publisher._settings.streams, region._streams) == (5, 5)
    publisher.close()
    follower = west.actor(HostTarget(site.zero.copy())).follower
    assert follower._settings.streams == 100


def test_a_region_that_is_away_waits_in_the_folder_that_was_named(
    site: Site, tmp_path: Path
) -> None:
    """`spool_folder` is reached from the API: what memory has no room for lies there meanwhile."""
    there = threading.Event()
    site.lines["west"].add("PUT", "/deltas/", Before(lambda: bool(there.wait(TIMEOUT_S))))
    home, west = site.connect("east"), site.connect("west", streams=1)
    change_some(site.state, np.random.default_rng(1))
    settings = PublisherSettings(region_memory_bytes=1000, spool_folder=str(tmp_path))
    publisher = home.publisher(HostSource(site.state), regions={"west": west}, settings=settings)
    change_some(site.state, np.random.default_rng(2))
    publication = publisher.publish(1)
    assert publication is not None
    waiting = publication.result(TIMEOUT_S).core.delta_bytes  # behind the first on west's one line
    (region,) = publisher._fanout._regions
    for _ in range(1000):
        if region._backlog.disk_bytes:
            break
        threading.Event().wait(0.01)
    assert region._backlog.disk_bytes == waiting
    there.set()
    assert publisher.wait_regions(TIMEOUT_S) == []
    publisher.close()


@pytest.mark.parametrize("streams", [0, 257])
def test_streams_that_cannot_be_are_refused(site: Site, streams: int) -> None:
    """Before anything is opened, by name."""
    with pytest.raises(InvalidInputError, match=f"streams = {streams}") as err:
        site.connect("east", streams=streams)
    assert err.value.kind is Kind.SETTING


def test_no_region_is_counted_under_anothers_name(site: Site) -> None:
    """A handle whose metrics have another name than the publisher's regions is refused."""
    metrics = Metrics(RUN)
    home = site.connect("east", metrics=metrics)
    with pytest.raises(InvalidInputError, match="'west' is counted as 'east'") as err:
        home.publisher(
            HostSource(site.state), regions={"west": site.connect("west", metrics=metrics)}
        )
    assert "name='west'" in str(err.value.hint)
    other = site.connect("east", metrics=metrics, name="home")
    with pytest.raises(InvalidInputError, match="'east' is counted as 'home'"):
        other.publisher(HostSource(site.state))
    assert home.head() == 0


def test_who_wants_no_metrics_needs_no_library_for_them() -> None:
    """The API can be imported, and a run opened, where prometheus_client is not."""
    program = (
        "import sys; sys.modules['prometheus_client'] = None; import deltastore;"
        "from deltastore.errors import NotFoundError\n"
        "try: deltastore.connect('file:///nowhere/at-all')\n"
        "except NotFoundError as err: print(err.kind.value)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "run_missing\n"
