"""Five imports to publish a version are four too many: a run's URL is enough.

    run = deltastore.connect("s3://bucket/prefix/my-run")
    publisher = run.publisher(ModuleSource(model))
    publisher.publish(step)

and on the other side, at points where no forward pass is in flight:

    actor = run.actor(ModuleTarget(model, run.layout))
    actor.activate()

With `metrics` whatever the run does is counted: requests, bytes and retries of its store, and every
event of its publisher, actor and replays.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from deltastore.clock import Clock, SystemClock
from deltastore.config import FollowerSettings, PublisherSettings, require
from deltastore.errors import IntegrityError, InvalidInputError, Kind
from deltastore.events import ActorJoined, EventSink, StageFinished, both, discard
from deltastore.ids import check_name
from deltastore.pipeline.applier import Applier, write_state
from deltastore.pipeline.follower import Follower
from deltastore.pipeline.history import locate
from deltastore.pipeline.publisher import Publisher
from deltastore.pipeline.replay import Held, Replayed, replay
from deltastore.pipeline.replicator import Region
from deltastore.repository.resolve import find_head
from deltastore.repository.run import Run, open_run
from deltastore.storage.observed import open_observed
from deltastore.storage.transfer import DEFAULT_STREAMS
from deltastore.storage.url import split_run_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltastore.format.layout import Layout
    from deltastore.format.signing import Signer, TrustedKeys
    from deltastore.observability.metrics import Metrics
    from deltastore.pipeline.protocols import WeightSource, WeightTarget
    from deltastore.repository.points import ActiveVersion


def connect(
    url: str,
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    access_key: str | None = None,
    secret_key: str | None = None,
    session_token: str | None = None,
    streams: int | None = None,
    name: str | None = None,
    metrics: Metrics | None = None,
    clock: Clock | None = None,
    trusted: TrustedKeys | None = None,
) -> RunHandle:
    """Open an existing run by its URL: `file:///dir/run`, `s3://bucket/prefix/run`, or fsspec's.

    Args:
        endpoint_url, region, profile: of an S3-compatible store.
        access_key, secret_key, session_token: without them credentials are found as boto3 finds
            them (environment, profile, instance role).
        streams: requests in flight to this bucket, 1 to 256; None: 8, unless settings say more.
        name: what events and metrics call this bucket's region; None: as the run calls its home.
        metrics: counts what passes the store and what happens to the run.
        trusted: keys of your own configuration; with them, whatever they did not sign is refused.

    Raises NotFoundError(run_missing, bucket_missing), StorageError, InvalidInputError(url).
    """
    clock = clock or SystemClock()
    if name is not None:
        check_name(name, "region")
    require(streams is None or 1 <= streams <= 256, "streams", streams, "1 to 256")
    store_url, run_name = split_run_url(url)
    opened = partial(
        open_observed,
        store_url,
        clock=clock,
        endpoint_url=endpoint_url,
        region=region,
        profile=profile,
        access_key=access_key,
        secret_key=secret_key,
        session_token=session_token,
        streams=streams or DEFAULT_STREAMS,
    )
    if name is None and metrics is not None:  # what is counted under no name keeps none
        with closing(opened(None, "")) as unnamed:
            name = open_run(unnamed, run_name).region
    run = open_run(opened(metrics, name or ""), run_name, region=name)
    return RunHandle(run, clock, trusted, streams, metrics)


@dataclass(frozen=True, slots=True)
class RunHandle:
    """A run as one bucket holds it, with a clock.

    Args:
        streams: requests in flight to the bucket; None: as the settings of who uses it say.
        metrics: is told what happens to the run.
    """

    run: Run
    clock: Clock
    trusted: TrustedKeys | None = None
    streams: int | None = None
    metrics: Metrics | None = None

    @property
    def layout(self) -> Layout:
        """The tensor table."""
        return self.run.layout

    def head(self) -> int:
        """The newest committed version in this bucket."""
        return find_head(self.run)

    def publisher(
        self,
        source: WeightSource,
        *,
        step: int = 0,
        regions: Mapping[str, RunHandle] | None = None,
        settings: PublisherSettings | None = None,
        sink: EventSink = discard,
        baseline: Held | None = None,
        signer: Signer | None = None,
    ) -> Publisher:
        """Take over the run as its one writer; commits HEAD + 1 at once. See `Publisher.open`.

        Args:
            regions: name to run of the other regions, each connected on its own: with its endpoint,
                credentials and `streams`. This handle must be home's.
            settings: without them `streams` of this handle; `spool_folder` is where the backlog of
                a region that is slow or away goes when memory is full.
            signer: signs the manifests (`deltastore.format.signing.sign_with`).

        Raises InvalidInputError(setting) where metrics would count a region under another's name.
        """
        others = dict(regions or {})
        for name, handle in {self.run.record.home: self, **others}.items():
            handle._require_named(name)
        return Publisher.open(
            self.run,
            source,
            clock=self.clock,
            step=step,
            regions=[Region(name, one.run, one.streams) for name, one in others.items()],
            settings=settings or PublisherSettings(streams=self.streams or DEFAULT_STREAMS),
            sink=self._told(sink),
            baseline=baseline,
            signer=signer,
        )

    def actor(
        self,
        target: WeightTarget,
        *,
        name: str = "actor",
        settings: FollowerSettings | None = None,
        sink: EventSink = discard,
    ) -> Actor:
        """Follow the run with live weights, from whatever version they are at.

        The version is recognised by the fingerprint of the weights; weights of no version of this
        run are overwritten with HEAD, rebuilt from the bucket.
        """
        started_s = self.clock.monotonic_s()
        head = find_head(self.run)
        settings = settings or FollowerSettings(streams=self.streams or DEFAULT_STREAMS)
        sink = self._told(sink)
        via, read_bytes = "its own weights", 0
        active = locate(
            self.run,
            target.fingerprint(),
            newest=head,
            streams=settings.streams,
            trusted=self.trusted,
        )
        if active is None:
            replayed = self.replay(head)
            write_state(target, replayed.state)
            active = replayed.held.point
            via, read_bytes = replayed.report.via, replayed.report.size_bytes
            if target.fingerprint() != active.fingerprint:
                raise IntegrityError(
                    f"the weights do not hold version {active.version} after it was written",
                    kind=Kind.FINGERPRINT,
                    run=self.run.name,
                    version=active.version,
                    hint="something else writes to these weights",
                )
        seconds = self.clock.monotonic_s() - started_s
        sink(ActorJoined(name, active.version, via, read_bytes, seconds))
        follower = Follower(
            self.run,
            active,
            name=name,
            clock=self.clock,
            settings=settings,
            sink=sink,
            trusted=self.trusted,
        )
        applier = Applier(target, active, name=name, clock=self.clock, settings=settings, sink=sink)
        return Actor(follower, applier)

    def replay(self, version: int | None = None, *, held: Held | None = None) -> Replayed:
        """Rebuild a version (None: HEAD) on the host, bit for bit."""
        streams = self.streams or DEFAULT_STREAMS
        replayed = replay(
            self.run, version, clock=self.clock, held=held, streams=streams, trusted=self.trusted
        )
        report, found = replayed.report, replayed.manifest.core.version
        self._told(discard)(
            StageFinished(
                self.run.region, found, "replay", report.parts, report.size_bytes, report.seconds
            )
        )
        return replayed

    def _require_named(self, name: str) -> None:
        """Raise InvalidInputError(setting) where this bucket is counted under another name."""
        if self.metrics is not None and self.run.region != name:
            raise InvalidInputError(
                f"region {name!r} is counted as {self.run.region!r}",
                kind=Kind.SETTING,
                run=self.run.name,
                hint=f"connect(..., name={name!r}, metrics=...)",
            )

    def _told(self, sink: EventSink) -> EventSink:
        """`sink`, and the metrics where there are any."""
        return sink if self.metrics is None else both(sink, self.metrics)


@dataclass(frozen=True, slots=True, eq=False)
class Actor:
    """Live weights that follow a run: stage at any time, activate at safe points."""

    follower: Follower
    applier: Applier

    @property
    def active(self) -> ActiveVersion:
        """The version the weights are at."""
        return self.applier.active

    def start(self) -> None:
        """Stage in the background from now on."""
        self.follower.start()

    def stop(self) -> None:
        """Stop staging."""
        self.follower.stop()

    def stage(self) -> bool:
        """Stage all there is now; return whether something waits for activation."""
        self.follower.catch_up()
        return self.follower.staged() is not None

    def activate(self) -> ActiveVersion:
        """Activate what is staged, if anything is. Call it only where no forward pass runs.

        Raises ApplyError: `rolled_back` (the weights are at the version before; what was staged
        is fetched anew) or `poisoned` (do not serve).
        """
        update = self.follower.take()
        if update is None:
            return self.applier.active
        try:
            return self.applier.activate(update)
        except BaseException:
            self.follower.reset(self.applier.active)
            raise
