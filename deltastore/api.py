"""Five imports to publish a version are four too many: a run's URL is enough.

    run = deltastore.connect("s3://bucket/prefix/my-run")
    publisher = run.publisher(ModuleSource(model))
    publisher.publish(step)

and on the other side, at points where no forward pass is in flight:

    actor = run.actor(ModuleTarget(model, run.layout))
    actor.activate()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.clock import Clock, SystemClock
from deltastore.config import FollowerSettings, PublisherSettings
from deltastore.errors import IntegrityError, Kind
from deltastore.events import EventSink, discard
from deltastore.pipeline.applier import Applier, write_state
from deltastore.pipeline.follower import Follower
from deltastore.pipeline.history import locate
from deltastore.pipeline.publisher import Publisher
from deltastore.pipeline.replay import Held, Replayed, replay
from deltastore.pipeline.replicator import Region
from deltastore.repository.resolve import find_head
from deltastore.repository.run import Run, open_run
from deltastore.storage.url import open_store, split_run_url

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltastore.format.layout import Layout
    from deltastore.format.signing import Signer, TrustedKeys
    from deltastore.pipeline.protocols import WeightSource, WeightTarget
    from deltastore.repository.points import ActiveVersion


def connect(
    url: str,
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    clock: Clock | None = None,
    trusted: TrustedKeys | None = None,
) -> RunHandle:
    """Open an existing run by its URL: `file:///dir/run`, `s3://bucket/prefix/run`, or fsspec's.

    Args:
        trusted: keys of your own configuration; with them, whatever they did not sign is refused.
        endpoint_url, region, profile: of an S3-compatible store. Credentials are found as boto3
            finds them (environment, profile, instance role).

    Raises NotFoundError(run_missing, bucket_missing), StorageError, InvalidInputError(url).
    """
    clock = clock or SystemClock()
    store_url, name = split_run_url(url)
    store = open_store(
        store_url, endpoint_url=endpoint_url, region=region, profile=profile, clock=clock
    )
    return RunHandle(open_run(store, name), clock, trusted)


@dataclass(frozen=True, slots=True)
class RunHandle:
    """A run as one bucket holds it, with a clock."""

    run: Run
    clock: Clock
    trusted: TrustedKeys | None = None

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
            regions: name to run of the other regions; this handle must be home's.
            signer: signs the manifests (`deltastore.format.signing.sign_with`).
        """
        return Publisher.open(
            self.run,
            source,
            clock=self.clock,
            step=step,
            regions=[Region(name, handle.run) for name, handle in (regions or {}).items()],
            settings=settings,
            sink=sink,
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
        head = find_head(self.run)
        streams = (settings or FollowerSettings()).streams
        active = locate(
            self.run, target.fingerprint(), newest=head, streams=streams, trusted=self.trusted
        )
        if active is None:
            replayed = self.replay(head)
            write_state(target, replayed.state)
            active = replayed.held.point
            if target.fingerprint() != active.fingerprint:
                raise IntegrityError(
                    f"the weights do not hold version {active.version} after it was written",
                    kind=Kind.FINGERPRINT,
                    run=self.run.name,
                    version=active.version,
                    hint="something else writes to these weights",
                )
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
        return replay(self.run, version, clock=self.clock, held=held, trusted=self.trusted)


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
