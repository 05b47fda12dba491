"""An engine whose ranks are at two versions samples from a policy nobody trained: all or none.

Two passes at a safe point, and a vote after each (`group.py`, `ballot.py`):
  1. read only: every rank works out what the update would do to the regions it holds. Vote 1: the
     sums over all ranks must be what the blocks of each tensor declare. A rank that throws still
     votes; unless all is right on every rank, nothing is written on any.
  2. write, part by part; every part knows how far it came. Vote 2: all were written, or every rank
     undoes what it wrote, and a third vote proves the whole fingerprint of the base again.
What cannot be proved poisons every rank: a rollback that fails, a vote to which somebody does not
come (nobody can know what the others know then), a base that is not there afterwards. A poisoned
rank refuses every activation, votes so, and thereby poisons the others, until `write_state` has
written and proved a whole state on all ranks. The version marker moves last: it never names a
version that is not wholly written on every rank.

A process that dies leaves nothing: its weights are gone with it. Its peers time out.

Memory: the located changes (of sparse blocks about 10 bytes per change, of runs none), old bits of
absolute values up to `undo_max_bytes`, and the target's scratch memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NoReturn

from deltastore.config import FollowerSettings
from deltastore.errors import ApplyError, DeltastoreError, IntegrityError, Kind
from deltastore.events import ActivationFailed, VersionActivated, discard
from deltastore.format.layout import require_same_layout
from deltastore.pipeline.ballot import (
    Ballot,
    Round,
    out_of_step,
    point_digest,
    troubles,
    words,
)
from deltastore.pipeline.prepared import PreparedUpdate
from deltastore.pipeline.rank_target import P
from deltastore.pipeline.rank_whole import REANCHOR, whole_fingerprint, whole_of
from deltastore.pipeline.tally import Sums, empty_tally
from deltastore.pipeline.voter import Voter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deltastore.clock import Clock
    from deltastore.events import EventSink
    from deltastore.format.layout import BitState
    from deltastore.pipeline.group import Group
    from deltastore.pipeline.rank_target import RankTarget
    from deltastore.pipeline.staged import StagedUpdate
    from deltastore.pipeline.tally import Tally
    from deltastore.repository.points import ActiveVersion

__all__ = ["PreparedUpdate", "RankApplier", "whole_fingerprint"]


class RankApplier(Generic[P]):
    """Drives one rank from version to version, together with all others of its group.

    Every rank makes the same calls in the same order, at safe points, each from one thread; only
    `prepare` may be called at any time. `activate`, `decline`, `check_whole` and `write_state` end
    alike on every rank.

    Args:
        target: what this rank holds.
        active: what `whole_fingerprint` was found to be.
        name: of this rank, for events.
    """

    def __init__(
        self,
        target: RankTarget[P],
        active: ActiveVersion,
        group: Group,
        *,
        name: str,
        clock: Clock,
        settings: FollowerSettings | None = None,
        sink: EventSink = discard,
    ) -> None:
        self._target = target
        self._active = active
        self._voter = Voter(group, name=name)
        self._name = name
        self._clock = clock
        self._settings = settings or FollowerSettings()
        self._sink = sink
        self._failure = ""
        self._since_full_check = 0

    @property
    def active(self) -> ActiveVersion:
        """The version the weights are at. Never names one that is not wholly written."""
        return self._active

    @property
    def poisoned(self) -> bool:
        """Whether the weights of the engine are in doubt: do not serve them."""
        return bool(self._voter.poison)

    @property
    def trouble(self) -> str:
        """Why it is poisoned, or else why the last activation failed; empty when all is well."""
        return self._voter.poison or self._failure

    def prepare(self, update: StagedUpdate) -> PreparedUpdate[P]:
        """Locate what of the update meets this rank. Any thread; touches no live weights.

        Raises ApplyError(rolled_back) when its blocks do not add up to its target, and
        InvalidInputError when they do not fit the layout. If others activate it all the same, this
        rank must `decline`.
        """
        declared = Sums.declared(update.blocks)
        if update.state is not None:
            require_same_layout(
                self._target.layout.digest, update.state.layout.digest, what="the staged state"
            )
        elif declared.total() != update.target.fingerprint - update.base.fingerprint:
            raise ApplyError(
                f"the update does not lead to version {update.target.version}",
                kind=Kind.ROLLED_BACK,
                version=update.target.version,
                hint="stage it again",
            )
        parts = self._target.plan(update.blocks)
        return PreparedUpdate(update.base, update.target, parts, declared, update.nnz, update.state)

    def activate(self, prepared: PreparedUpdate[P]) -> ActiveVersion:
        """Bring all ranks from the active version to the update's target. Collective.

        Raises ApplyError on every rank alike: `rolled_back`, all are still at the active version,
        bit for bit; `poisoned`, they are in doubt. IntegrityError when it succeeded and the whole
        check that was due afterwards failed: poisoned too.
        """
        started_s = self._clock.monotonic_s()
        try:
            if prepared.state is None:
                self._activate_parts(prepared)
            else:
                self._activate_state(prepared, prepared.state)
        except DeltastoreError as err:
            self._failed(prepared.target.version, err)
            raise
        self._failure = ""
        self._since_full_check += 1
        self._sink(
            VersionActivated(
                actor=self._name,
                base_version=prepared.base.version,
                version=self._active.version,
                policy_hash=self._active.policy_hash,
                nnz=prepared.nnz,
                write_pause_s=self._clock.monotonic_s() - started_s,
            )
        )
        if self._since_full_check >= self._settings.full_check_every_versions:
            self.check_whole()
        return self._active

    def decline(self, cause: BaseException) -> NoReturn:
        """Take part in an activation that this rank could not prepare: nobody writes. Collective.

        Raises what `activate` raises.
        """
        try:
            ballots = self._vote(self._ballot(Round.VERIFY, trouble=words(cause)))
            raise self._refused(troubles(ballots), self._active.version) from cause
        except DeltastoreError as err:
            self._failed(self._active.version, err)
            raise

    def check_whole(self) -> None:
        """Prove all live weights, on all ranks. Collective.

        IntegrityError (fingerprint, alias_drift, digest) poisons every rank.
        """
        try:
            self._target.check_derived()
            tally, cause = self._target.whole(), None
        except Exception as err:  # noqa: BLE001 - it is voted, and raised below
            tally, cause = empty_tally(), err
        trouble = words(cause)
        ballots = self._vote(self._ballot(Round.WHOLE, trouble=trouble, tally=tally))
        wrong = troubles(ballots) or self._not_at(ballots, self._active)
        if wrong:
            self._voter.in_doubt(
                f"the live weights are not version {self._active.version}: {wrong}",
                self._active.version,
            )
            raise IntegrityError(
                self._voter.poison,
                kind=cause.kind if isinstance(cause, IntegrityError) else Kind.FINGERPRINT,
                version=self._active.version,
                hint=REANCHOR,
            ) from cause
        self._since_full_check = 0

    def write_state(self, state: BitState, target: ActiveVersion) -> None:
        """Write a whole state on all ranks and prove it: the way out of poison. Collective.

        Raises ApplyError on every rank alike: `rolled_back` when on some rank the state is of
        another layout, or the ranks were given different ones: nothing was written, and who was
        poisoned still is; `poisoned` when it was written and cannot be proved, or a vote failed.
        """
        cause: Exception | None = None
        self._voter.renew(target.version)
        try:
            require_same_layout(
                self._target.layout.digest, state.layout.digest, what="the whole state"
            )
        except IntegrityError as err:
            cause = err
        ballots = self._vote(
            Ballot(Round.STATE, "", point_digest(target), words(cause)),
            poisons=False,
        )
        wrong = troubles(ballots) or out_of_step(ballots)
        if wrong:
            raise self._refused(wrong, target.version) from cause
        self._write_whole(state, target)
        self._voter.poison = self._failure = ""
        self._since_full_check = 0

    def _activate_parts(self, prepared: PreparedUpdate[P]) -> None:
        tensors = [int(tensor) for tensor in prepared.declared.tensors]
        self._vote_verified(prepared, lambda: self._target.tally(prepared.parts, tensors))
        keep = prepared.undo_bytes <= self._settings.undo_max_bytes
        cause: BaseException | None = None
        try:
            self._target.write_all(prepared.parts, keep=keep)
            self._target.settle(tensors, undoing=False)
        except BaseException as err:  # noqa: BLE001 - it is voted, and raised below
            cause = err
        ballots = self._vote(self._ballot(Round.WRITTEN, prepared, trouble=words(cause)))
        wrong = troubles(ballots)
        if wrong:
            self._roll_back(prepared, tensors, wrong, cause, reversible=keep)
        self._active = prepared.target
        self._target.unheld.move(prepared.declared)
        for part in prepared.parts:
            part.forget()

    def _vote_verified(self, prepared: PreparedUpdate[P], work: Callable[[], Tally]) -> None:
        """Pass 1 and vote 1: returns when every rank may write, raises alike on all otherwise."""
        cause: BaseException | None = None
        tally = empty_tally()
        try:
            self._require_base(prepared)
            tally = work()
        except BaseException as err:  # noqa: BLE001 - it is voted, and raised below
            cause = err
        trouble = words(cause)
        ballots = self._vote(self._ballot(Round.VERIFY, prepared, trouble=trouble, tally=tally))
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        wrong = troubles(ballots) or out_of_step(ballots)
        if not wrong and prepared.state is None:
            wrong = self._unproved(prepared, ballots)
        if wrong:
            raise self._refused(wrong, prepared.target.version) from cause

    def _unproved(self, prepared: PreparedUpdate[P], ballots: Sequence[Ballot]) -> str:
        """What the ranks' numbers say against the update; empty when they say nothing."""
        layout = self._target.layout
        try:
            found = Sums.joined(layout, [one.tally for one in ballots])
        except IntegrityError as err:
            return err.message
        unlike = [layout.tensors[tensor].name for tensor in found.unlike(prepared.declared)]
        if not unlike:
            return ""
        return (
            f"{len(unlike)} tensors do not hold the bits that version {prepared.target.version}"
            f" builds on: {unlike[:5]}"
        )

    def _roll_back(
        self,
        prepared: PreparedUpdate[P],
        tensors: Sequence[int],
        wrong: str,
        cause: BaseException | None,
        *,
        reversible: bool,
    ) -> NoReturn:
        """Undo in reverse order on every rank, then prove the whole base; poison if it is not."""
        version = prepared.target.version
        tally = empty_tally()
        trouble = ""
        try:
            if not reversible:
                self._raise_irreversible(prepared)
            self._target.undo_all(prepared.parts)
            self._target.settle(tensors, undoing=True)
            tally = self._target.whole()
        except BaseException as err:  # noqa: BLE001 - it is voted, and poisons
            trouble = words(err)
        ballots = self._vote(self._ballot(Round.UNDONE, prepared, trouble=trouble, tally=tally))
        left = troubles(ballots) or self._not_at(ballots, self._active)
        if left:
            raise self._voter.in_doubt(
                f"version {version} was written in part ({wrong}) and not undone: {left}", version
            ) from cause
        if cause is not None and not isinstance(cause, Exception):
            raise cause
        raise ApplyError(
            f"activation failed and was rolled back: {wrong}",
            kind=Kind.ROLLED_BACK,
            version=version,
            hint="the weights are still at the version before; it will be tried again",
        ) from cause

    def _activate_state(self, prepared: PreparedUpdate[P], state: BitState) -> None:
        """Vote, then write a whole state. Not reversible: a failure poisons."""
        self._vote_verified(prepared, empty_tally)
        self._write_whole(state, prepared.target)

    def _write_whole(self, state: BitState, target: ActiveVersion) -> None:
        tally = empty_tally()
        cause: BaseException | None = None
        try:
            self._target.write_state(state)
            tally = self._target.whole()
        except BaseException as err:  # noqa: BLE001 - it is voted, and poisons
            cause = err
        trouble = words(cause)
        ballot = Ballot(Round.WHOLE, "", point_digest(target), trouble, tally=tally)
        ballots = self._vote(ballot, poisons=False)
        wrong = troubles(ballots) or out_of_step(ballots) or self._not_at(ballots, target, state)
        if wrong:
            raise self._voter.in_doubt(
                f"full version {target.version} was written in part: {wrong}", target.version
            ) from cause
        self._active = target

    def _not_at(
        self, ballots: Sequence[Ballot], point: ActiveVersion, state: BitState | None = None
    ) -> str:
        """What the ranks' whole tallies say against the version; empty when they are it."""
        try:
            tallies = [one.tally for one in ballots]
            found = whole_of(self._target, tallies, state)
        except DeltastoreError as err:
            return err.message
        return "" if found == point.fingerprint else f"they are {found}"

    def _vote(self, ballot: Ballot, *, poisons: bool = True) -> list[Ballot]:
        return self._voter.vote(ballot, self._active.version, poisons=poisons)

    def _ballot(
        self,
        number: Round,
        prepared: PreparedUpdate[P] | None = None,
        *,
        trouble: str = "",
        tally: Tally | None = None,
    ) -> Ballot:
        base, target = (None, None) if prepared is None else (prepared.base, prepared.target)
        return Ballot(
            number,
            point_digest(base or self._active),
            point_digest(target),
            self._voter.poison or trouble,
            bool(self._voter.poison),
            empty_tally() if tally is None else tally,
        )

    def _require_base(self, prepared: PreparedUpdate[P]) -> None:
        if prepared.base != self._active:
            raise ApplyError(
                f"the update starts at version {prepared.base.version}"
                f" ({prepared.base.policy_hash[:12]}), active is {self._active.version}"
                f" ({self._active.policy_hash[:12]})",
                kind=Kind.ROLLED_BACK,
                version=prepared.target.version,
                hint="stage again from the active version",
            )

    def _raise_irreversible(self, prepared: PreparedUpdate[P]) -> NoReturn:
        raise ApplyError(
            f"its {prepared.undo_bytes} bytes of old bits were more than undo_max_bytes",
            kind=Kind.POISONED,
            version=prepared.target.version,
            hint="raise undo_max_bytes if the host has the memory",
        )

    def _refused(self, wrong: str, version: int) -> ApplyError:
        return ApplyError(
            f"{wrong}; nothing was written",
            kind=Kind.ROLLED_BACK,
            version=version,
            hint="check the live weights with a whole fingerprint; re-anchor if it differs",
        )

    def _failed(self, version: int, err: DeltastoreError) -> None:
        self._failure = err.message
        self._sink(ActivationFailed(self._name, version, err.kind.value, str(err)))
