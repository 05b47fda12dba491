"""An update that dies half way leaves a policy nobody trained: here it is the target or the base.

Two passes over the blocks at a safe point:
  1. read only: gather the old bits, compute the new ones, compare each block's fingerprint change
     with what it declares, of small blocks many at a time. Nothing has been written; a mismatch
     refuses the activation.
  2. write: scatter block by block. Before a block is written its old bits are kept, so that a
     scatter that fails in the middle of it can be undone too. Finished blocks of steps are undone
     by the inverse steps; of absolute values the old bits are kept, up to `undo_max_bytes`.
After a rollback the whole fingerprint is taken; if it is not the base's, the actor is poisoned: it
refuses every further activation, and its caller must refuse to serve, until it has re-anchored.

Memory: one block's old and new bits, what `ShortBlocks` holds, the undo log, and the
`scratch_max_bytes` of old bits that the first pass keeps for the second, so that they are read
once. None of it depends on the shape of the weights: one changed element costs one element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.chain.apply import inverse, new_bits, unsettled_tensors
from deltastore.chain.apply_many import ShortBlocks
from deltastore.config import FollowerSettings
from deltastore.errors import ApplyError, IntegrityError, Kind
from deltastore.events import ActivationFailed, VersionActivated, discard
from deltastore.format.block import ValueKind
from deltastore.format.box import MAX_BOX_ELEMENTS, Box

if TYPE_CHECKING:
    from deltastore.clock import Clock
    from deltastore.events import EventSink
    from deltastore.format.block import Block
    from deltastore.format.dtypes import Bits
    from deltastore.format.layout import BitState
    from deltastore.pipeline.protocols import WeightTarget
    from deltastore.pipeline.staged import StagedUpdate
    from deltastore.repository.points import ActiveVersion


class Applier:
    """Drives one target from version to version. Call it at safe points only, from one thread."""

    def __init__(
        self,
        target: WeightTarget,
        active: ActiveVersion,
        *,
        name: str,
        clock: Clock,
        settings: FollowerSettings | None = None,
        sink: EventSink = discard,
    ) -> None:
        self._target = target
        self._active = active
        self._name = name
        self._clock = clock
        self._settings = settings or FollowerSettings()
        self._sink = sink
        self._poisoned: str | None = None
        self._since_full_check = 0

    @property
    def active(self) -> ActiveVersion:
        """The version the weights are at. Never names a target that is not wholly written."""
        return self._active

    @property
    def poisoned(self) -> bool:
        """Whether the weights are in doubt: do not serve them."""
        return self._poisoned is not None

    def check_whole(self) -> None:
        """Prove all live weights; IntegrityError (fingerprint, alias_drift) poisons this actor."""
        try:
            got = self._target.fingerprint()
        except IntegrityError as err:  # they hold what no version can
            self._poisoned = f"the live weights are no version's: {err.message}"
            raise
        if got != self._active.fingerprint:
            self._poisoned = f"the live weights are {got}, not version {self._active.version}"
            raise IntegrityError(
                self._poisoned,
                kind=Kind.FINGERPRINT,
                version=self._active.version,
                hint="re-anchor: load a full version and replay",
            )
        self._since_full_check = 0

    def activate(self, update: StagedUpdate) -> ActiveVersion:
        """Bring the weights from the active version to the update's target.

        Raises ApplyError(rolled_back): the weights are still at the active version, bit for bit;
        ApplyError(poisoned): they are in doubt. IntegrityError: the first pass met weights that
        hold what no version can, and wrote nothing, or a whole check afterwards failed.
        """
        if self._poisoned is not None:
            raise ApplyError(
                f"{self._name} is poisoned: {self._poisoned}",
                kind=Kind.POISONED,
                version=self._active.version,
                hint="re-anchor: load a full version and replay",
            )
        if update.base != self._active:
            raise ApplyError(
                f"the update starts at version {update.base.version}"
                f" ({update.base.policy_hash[:12]}), active is {self._active.version}"
                f" ({self._active.policy_hash[:12]})",
                kind=Kind.ROLLED_BACK,
                version=update.target.version,
                hint="stage again from the active version",
            )
        started_s = self._clock.monotonic_s()
        try:
            if update.state is None:
                self._activate_blocks(update)
            else:
                self._activate_state(update.state, update.target)
        except (ApplyError, IntegrityError) as err:
            self._sink(
                ActivationFailed(self._name, update.target.version, err.kind.value, str(err))
            )
            raise
        base, self._active = self._active, update.target
        self._since_full_check += 1
        pause_s = self._clock.monotonic_s() - started_s
        self._sink(
            VersionActivated(
                actor=self._name,
                base_version=base.version,
                version=self._active.version,
                policy_hash=self._active.policy_hash,
                nnz=update.nnz,
                write_pause_s=pause_s,
            )
        )
        if self._since_full_check >= self._settings.full_check_every_versions:
            self.check_whole()
        return self._active

    def _activate_blocks(self, update: StagedUpdate) -> None:
        kept = self._verify(update)
        target = self._target
        most_bytes = self._settings.undo_max_bytes
        undo: list[tuple[Block, Bits | None]] = []
        kept_bytes = 0
        writing: tuple[Block, Bits] | None = None
        try:
            for number, block in enumerate(update.blocks):
                old = kept.pop(number, None)
                if old is None:
                    old = target.gather(block.tensor, block.box, block.indices)
                writing = (block, old)
                target.scatter(block.tensor, block.box, block.indices, new_bits(block, old))
                writing = None
                steps = block.kind is ValueKind.STEPS
                if not steps:
                    kept_bytes += old.nbytes
                if kept_bytes <= most_bytes:
                    undo.append((block, None if steps else old))
        except BaseException as err:
            reversible = kept_bytes <= most_bytes
            self._roll_back(undo if reversible else None, writing, update.target.version, err)
            raise ApplyError(
                f"activation failed and was rolled back: {err}",
                kind=Kind.ROLLED_BACK,
                version=update.target.version,
                hint="the weights are still at the version before; it will be tried again",
            ) from err

    def _verify(self, update: StagedUpdate) -> dict[int, Bits]:
        """Pass 1: prove on the live weights that every block does what it declares.

        Returns the old bits of the first blocks, as many as the scratch memory holds.
        """
        layout = self._target.layout
        short = ShortBlocks(layout)
        kept: dict[int, Bits] = {}
        left_bytes = self._settings.scratch_max_bytes
        for number, block in enumerate(update.blocks):
            old = self._target.gather(block.tensor, block.box, block.indices)
            short.add(block, old)
            if old.nbytes <= left_bytes:
                kept[number] = old
                left_bytes -= old.nbytes
        short.settle()
        total = self._active.fingerprint + short.total
        wrong = [layout.tensors[tensor].name for tensor in unsettled_tensors(short.found)]
        if wrong:
            raise ApplyError(
                f"{len(wrong)} tensors do not hold the bits that version {update.target.version}"
                f" builds on: {wrong[:5]}; nothing was written",
                kind=Kind.ROLLED_BACK,
                version=update.target.version,
                hint="check the live weights with a whole fingerprint; re-anchor if it differs",
            )
        if total != update.target.fingerprint:
            raise ApplyError(
                f"the update does not lead to version {update.target.version}; nothing was written",
                kind=Kind.ROLLED_BACK,
                version=update.target.version,
                hint="stage it again",
            )
        return kept

    def _roll_back(
        self,
        undo: list[tuple[Block, Bits | None]] | None,
        writing: tuple[Block, Bits] | None,
        version: int,
        cause: BaseException,
    ) -> None:
        """Undo in reverse order, then prove the whole state; poison when it cannot be proved."""
        try:
            if writing is not None:
                block, old = writing
                self._target.scatter(block.tensor, block.box, block.indices, old)
            for done, replaced in reversed(undo or []):
                block = inverse(done, done.values if replaced is None else replaced)
                now = self._target.gather(block.tensor, block.box, block.indices)
                self._target.scatter(block.tensor, block.box, block.indices, new_bits(block, now))
            whole = undo is not None and self._target.fingerprint() == self._active.fingerprint
        except BaseException as err:  # noqa: BLE001 - re-raised as what it means: poisoned
            self._poisoned = f"the rollback of version {version} failed: {err}"
            raise ApplyError(
                self._poisoned, kind=Kind.POISONED, version=version, hint="re-anchor"
            ) from cause
        if not whole:
            self._poisoned = f"version {version} was written in part and could not be undone"
            raise ApplyError(
                self._poisoned, kind=Kind.POISONED, version=version, hint="re-anchor"
            ) from cause

    def _activate_state(self, state: BitState, target: ActiveVersion) -> None:
        """Write a whole state. Not reversible: a failure poisons."""
        try:
            write_state(self._target, state)
            got = self._target.fingerprint()
        except BaseException as err:
            self._poisoned = f"full version {target.version} was written in part: {err}"
            raise ApplyError(
                self._poisoned, kind=Kind.POISONED, version=target.version, hint="re-anchor"
            ) from err
        if got != target.fingerprint:
            self._poisoned = f"full version {target.version} reads back as {got}"
            raise ApplyError(
                self._poisoned, kind=Kind.POISONED, version=target.version, hint="re-anchor"
            )


def write_state(target: WeightTarget, state: BitState) -> None:
    """Write every tensor of a state to a target, in runs of at most 2^22 elements."""
    for tensor, bits in enumerate(state.arrays):
        for low in range(0, bits.size, MAX_BOX_ELEMENTS):
            part = bits[low : low + MAX_BOX_ELEMENTS]
            target.scatter(tensor, Box.run(low, part.size), None, part)
