"""Ranks that each follow the run on their own end up at different versions: they move together.

One rank of an engine, from its first fingerprint to its last update; knows nothing of vLLM. Every
rank makes the same collective calls (`begin`, `require_sound`, `update`, `re_anchor`) in the same
order; each of them ends alike on all ranks. Rank 0 decides what is activated; everything that takes
long, or can fail without weights, is met around (`rendezvous.py`) before the first vote.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from deltastore.adapters.vllm.answers import point_of, point_row, spooled_of, spooled_row
from deltastore.adapters.vllm.feed import PreparedFeed, not_staged
from deltastore.adapters.vllm.rendezvous import meet
from deltastore.adapters.vllm.whole_spool import WholeSpool, map_whole
from deltastore.errors import ApplyError, DeltastoreError, FormatError, IntegrityError, Kind
from deltastore.events import discard
from deltastore.pipeline.history import locate
from deltastore.pipeline.rank_applier import RankApplier
from deltastore.pipeline.rank_whole import NO_VERSION, joined_whole, own_whole
from deltastore.pipeline.replay import replay
from deltastore.pipeline.stager_rank import StagedFeed
from deltastore.repository.resolve import find_head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from deltastore.adapters.vllm.rendezvous import Answer
    from deltastore.adapters.vllm.settings import EngineSettings
    from deltastore.clock import Clock
    from deltastore.events import EventSink
    from deltastore.format.fingerprint import Fingerprint
    from deltastore.format.layout import BitState
    from deltastore.pipeline.group import Group
    from deltastore.pipeline.rank_applier import PreparedUpdate
    from deltastore.pipeline.rank_target import RankTarget
    from deltastore.pipeline.replay import Held
    from deltastore.pipeline.spool import SpooledUpdate
    from deltastore.pipeline.tally import Tally
    from deltastore.repository.points import ActiveVersion
    from deltastore.repository.run import Run

T = TypeVar("T")
Wanted: TypeAlias = "int | Literal['newest']"
WAIT_LOOK_S = 0.05


class EngineRank:
    """One rank of an engine that follows a run.

    Args:
        target: what this rank holds of the weights.
        engine: the engine's name on this host, the same on every rank.
        folder: of the host's stager.
    """

    def __init__(
        self,
        run: Run,
        target: RankTarget[Any],
        group: Group,
        *,
        engine: str,
        folder: Path,
        settings: EngineSettings,
        clock: Clock,
        sink: EventSink = discard,
    ) -> None:
        self._run = run
        self._target = target
        self._group = group
        self._name = f"{engine}-{group.rank}"
        self._engine = engine
        self._folder = folder
        self._settings = settings
        self._clock = clock
        self._sink = sink
        self._applier: RankApplier[Any] | None = None
        self._feed: PreparedFeed | None = None
        self._whole: WholeSpool | None = None
        self._doubt = ""
        self._trouble = ""
        self._never = threading.Event()
        self.last_pause_s: float | None = None

    @property
    def active(self) -> ActiveVersion | None:
        """The version that the weights are at, proved; None before `begin`."""
        return None if self._applier is None else self._applier.active

    @property
    def poisoned(self) -> str:
        """Why the weights are in doubt; empty when they are not."""
        if self._applier is not None and self._applier.poisoned:
            return self._applier.trouble
        return self._doubt

    @property
    def trouble(self) -> str:
        """What keeps the rank from the next version, for people; empty when nothing does."""
        error = None if self._feed is None else self._feed.error
        return f"{error.kind.value}: {error}" if error is not None else self._trouble

    @property
    def staged(self) -> int | None:
        """The version that an update would bring now."""
        return None if self._feed is None else self._feed.ready

    @property
    def head(self) -> int | None:
        """The newest version that the stager knows of."""
        return None if self._feed is None else self._feed.head_seen

    def doubt(self, why: str) -> None:
        """Somebody else knows that the weights are gone: refuse updates until re-anchored."""
        self._doubt = why

    def begin(self) -> None:
        """Find the version that the weights are at, or write the newest; then stage. Collective.

        Raises InvalidInputError(lease_held) when the engine's name is taken, IntegrityError,
        StorageError, NotFoundError, ApplyError(poisoned), ApplyError(vote_timeout).
        """
        self._meet(self._claim)
        point = None
        try:
            found = self.fingerprint()
        except IntegrityError as err:
            if err.kind not in NO_VERSION:
                raise
            found = None  # they hold what no version can: on every rank alike
        if found is not None:
            at = self._lead(lambda: self._located(found))["at"]
            point = None if at is None else point_of(at)
        if point is None:
            self._write_newest()
        else:
            self._applier = self._applier_at(point)
        self._meet(self._follow)
        self._doubt = ""

    def require_sound(self) -> None:
        """ApplyError(poisoned) on every rank when the weights of one are in doubt. Collective."""
        self._meet(self._sound)

    def update(self, wanted: Wanted) -> ActiveVersion:
        """Bring all ranks to a staged version; "newest": to what is staged, if anything is.

        Collective. Raises on every rank alike: ApplyError (not_staged, rolled_back), or what kept
        the version from being staged: all are at the version before; ApplyError(poisoned).
        """
        applier, feed = self._following()
        spooled: SpooledUpdate | None = None
        try:
            chosen = self._meet(lambda: self._choice(wanted))[0]["update"]
            if chosen is None:
                return applier.active
            started_s = self._clock.monotonic_s()
            update = spooled = spooled_of(chosen)
            prepared: list[PreparedUpdate[Any]] = []
            self._meet(lambda: _kept(prepared, feed.prepared(update, applier.active)))
            applier.activate(prepared[0])
        except BaseException as err:
            self._trouble = str(err)
            if spooled is not None and applier.active != spooled.target:
                feed.reset(applier.active)
            raise
        finally:
            if spooled is not None and applier.active == spooled.target:
                feed.moved(applier.active, spooled)
            feed.ask(None)
        self._trouble = ""
        self.last_pause_s = self._clock.monotonic_s() - started_s
        return applier.active

    def re_anchor(self) -> None:
        """Write the newest version whole on all ranks, whatever is there. Collective.

        Raises ApplyError(poisoned) when it cannot be proved; what rebuilding it raises.
        """
        self._group.renew()
        self._write_newest()
        self._doubt = self._trouble = ""
        applier, feed = self._following()
        feed.moved(applier.active)

    def fingerprint(self) -> Fingerprint:
        """A whole pass over all live weights, the same on every rank. Collective.

        Raises on every rank alike: IntegrityError (fingerprint, alias_drift) when they hold what no
        version can, what else kept one rank from reading its own.
        """
        own: list[Tally | IntegrityError] = []
        self._meet(lambda: _kept(own, own_whole(self._target)))
        with self._doubting():
            return joined_whole(self._target, self._group, own[0])

    def check_whole(self) -> None:
        """Prove all live weights. Collective; IntegrityError poisons every rank."""
        self._following()[0].check_whole()

    def stop(self) -> None:
        """Stop staging and let go of the spool."""
        if self._feed is not None:
            self._feed.stop()
            self._feed = None
        if self._whole is not None:
            self._whole.close()
            self._whole = None

    def _applier_at(self, point: ActiveVersion) -> RankApplier[Any]:
        return RankApplier(
            self._target,
            point,
            self._group,
            name=self._name,
            clock=self._clock,
            settings=self._settings.follower,
            sink=self._sink,
        )

    def _claim(self) -> Answer:
        """Rank 0: the engine's name on this host."""
        if self._group.rank == 0:
            self._whole = WholeSpool(self._folder, self._engine)
        return {}

    def _follow(self) -> Answer:
        applier = self._applier
        if applier is None:
            raise _not_begun()
        feed = StagedFeed(
            self._folder,
            self._run.layout,
            applier.active,
            rank=self._name,
            clock=self._clock,
            catch_up_s=self._settings.stage_wait_s,
        )
        self._feed = PreparedFeed(feed, self._run.layout, applier.prepare, self._clock)
        self._feed.start()
        return {}

    def _following(self) -> tuple[RankApplier[Any], PreparedFeed]:
        if self._applier is None or self._feed is None:
            raise _not_begun()
        return self._applier, self._feed

    def _located(self, found: Fingerprint) -> Answer:
        """Rank 0: the version that weights of that fingerprint are at."""
        point = locate(
            self._run,
            found,
            newest=find_head(self._run),
            streams=self._settings.follower.streams,
            trusted=self._settings.trusted,
        )
        return {"at": None if point is None else point_row(point)}

    def _choice(self, wanted: Wanted) -> Answer:
        """Rank 0: the update to activate; others: nothing. All: whether it may be."""
        self._sound()
        applier, feed = self._following()
        active = applier.active.version
        if wanted == "newest":
            return _offer(feed.offered)
        if wanted == active:
            return _offer(None)
        if wanted < active:
            raise not_staged(wanted, f"the weights are at version {active} already")
        feed.ask(wanted)
        if self._group.rank != 0:
            return _offer(None)
        patience = _Patience(self._clock, self._settings)
        while True:
            offered = feed.offered
            if offered is not None and offered.target.version == wanted:
                return _offer(offered)
            patience.spend(wanted, feed.error)
            self._clock.wait(self._never, WAIT_LOOK_S)

    def _sound(self) -> Answer:
        if self.poisoned:
            raise ApplyError(
                f"{self._name} is poisoned: {self.poisoned}",
                kind=Kind.POISONED,
                hint="re-anchor it: collective_rpc('deltastore_re_anchor')",
            )
        return {}

    def _write_newest(self) -> None:
        """HEAD, rebuilt once from the bucket, into all weights of all ranks. Collective."""
        if self._group.size == 1:
            held = self._rebuilt()
            state, point = held.state, held.point
        else:
            spooled = spooled_of(self._lead(self._laid)["update"])
            mapped: list[BitState] = []
            self._meet(lambda: _kept(mapped, map_whole(spooled, self._run.layout)))
            state, point = mapped[0], spooled.target
            if self._whole is not None:
                self._whole.clear()
        applier = self._applier or self._applier_at(point)
        try:
            applier.write_state(state, point)
        except DeltastoreError as err:
            if applier.poisoned:
                self._doubt = str(err)
            raise
        self._applier = applier

    def _rebuilt(self) -> Held:
        trusted = self._settings.trusted
        return replay(self._run, clock=self._clock, trusted=trusted).held

    def _laid(self) -> Answer:
        """Rank 0: HEAD, where the others can map it."""
        held = self._rebuilt()
        if self._whole is None:
            raise _not_begun()
        return _offer(self._whole.lay(self._run.layout, held.state, held.point))

    def _lead(self, work: Callable[[], Answer]) -> Answer:
        """What rank 0's work answers, on every rank. Collective."""
        return self._meet(work if self._group.rank == 0 else dict)[0]

    def _meet(self, work: Callable[[], Answer]) -> list[Answer]:
        with self._doubting():
            return meet(self._group, self._clock, work)

    @contextmanager
    def _doubting(self) -> Iterator[None]:
        try:
            yield
        except ApplyError as err:
            if err.kind is Kind.VOTE_TIMEOUT:  # nobody knows what the others do now
                self._doubt = err.message
            raise


class _Patience:
    """How long a version is waited for: what cannot be read by waiting is not waited for."""

    def __init__(self, clock: Clock, settings: EngineSettings) -> None:
        self._clock = clock
        self._wait_s = settings.stage_wait_s
        self._error_wait_s = 2 * settings.poll_min_s + 1.0  # the stager has looked again by then
        self._began_s = clock.monotonic_s()
        self._bad_since_s: float | None = None

    def spend(self, wanted: int, error: DeltastoreError | None) -> None:
        """Return while it is worth waiting; raise what keeps the version away otherwise."""
        now_s = self._clock.monotonic_s()
        if not isinstance(error, IntegrityError | FormatError):
            self._bad_since_s = None
        elif self._bad_since_s is None:
            self._bad_since_s = now_s
        elif now_s - self._bad_since_s >= self._error_wait_s:
            raise error
        if now_s - self._began_s >= self._wait_s:
            raise not_staged(wanted, f"not after {self._wait_s} s; {error or 'no reason is known'}")


def _offer(spooled: SpooledUpdate | None) -> Answer:
    return {"update": None if spooled is None else spooled_row(spooled)}


def _kept(found: list[T], value: T) -> Answer:
    """Keep what is too large, or too much of this process, to be an answer."""
    found.append(value)
    return {}


def _not_begun() -> ApplyError:
    return ApplyError(
        "the engine does not follow a run yet",
        kind=Kind.NOT_STAGED,
        hint="call init_weight_transfer_engine first",
    )
