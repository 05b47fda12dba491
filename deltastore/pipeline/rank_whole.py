"""Two ranks that each trust their own half miss what lies between: the whole is summed over all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.errors import ApplyError, IntegrityError, Kind
from deltastore.pipeline.ballot import Ballot, Round, troubles, words
from deltastore.pipeline.tally import Sums, empty_tally

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltastore.format.fingerprint import Fingerprint
    from deltastore.format.layout import BitState
    from deltastore.pipeline.group import Group
    from deltastore.pipeline.rank_target import P, RankTarget
    from deltastore.pipeline.tally import Tally

REANCHOR = "re-anchor all ranks of the engine: write a whole version"


NO_VERSION = frozenset({Kind.FINGERPRINT, Kind.ALIAS_DRIFT})
"""Kinds of IntegrityError of a pass that worked, over weights that no version can hold."""


def whole_fingerprint(target: RankTarget[P], group: Group) -> Fingerprint:
    """Of the weights of all ranks, before there is an applier. Collective.

    Raises on every rank alike: IntegrityError (fingerprint, alias_drift) when the weights hold what
    no version can, ApplyError(not_staged) when the pass failed on a rank, and nobody knows what
    they hold. InvalidInputError when nobody holds a tensor and nothing says what it is.
    """
    found: Tally | IntegrityError | None = None
    cause: Exception | None = None
    try:
        found = own_whole(target)
    except Exception as err:  # noqa: BLE001 - it is voted, and raised below
        cause = err
    ballot = Ballot(Round.WHOLE, "", "", words(cause))
    failed = troubles([Ballot.from_bytes(text) for text in group.exchange(ballot.to_bytes())])
    if found is None or failed:
        raise ApplyError(
            f"the live weights could not be read: {failed}",
            kind=Kind.NOT_STAGED,
            hint="nothing was written; see the cause and try again",
        ) from cause
    return joined_whole(target, group, found)


def own_whole(target: RankTarget[P]) -> Tally | IntegrityError:
    """This rank's part, or why its weights can be of no version; raises when it cannot tell."""
    try:
        return target.whole()
    except IntegrityError as err:
        if err.kind not in NO_VERSION:
            raise
        return err


def joined_whole(target: RankTarget[P], group: Group, own: Tally | IntegrityError) -> Fingerprint:
    """The fingerprint of which every rank has found its own part. Collective.

    Raises IntegrityError (fingerprint, alias_drift) on every rank alike.
    """
    cause = own if isinstance(own, IntegrityError) else None
    tally = empty_tally() if isinstance(own, IntegrityError) else own
    ballot = Ballot(Round.WHOLE, "", "", words(cause), tally=tally)
    ballots = [Ballot.from_bytes(text) for text in group.exchange(ballot.to_bytes())]
    wrong = troubles(ballots)
    if wrong:
        raise IntegrityError(
            f"the live weights have no fingerprint: {wrong}", kind=Kind.FINGERPRINT, hint=REANCHOR
        ) from cause
    return whole_of(target, [one.tally for one in ballots])


def whole_of(
    target: RankTarget[P], tallies: Sequence[Tally], state: BitState | None = None
) -> Fingerprint:
    """The fingerprint of a layout's state of which the ranks hold that.

    Args:
        state: that has just been written: what nobody holds is as it says from now on.
    """
    layout = target.layout
    sums = Sums.joined(layout, tallies)
    held = set(sums.tensors.tolist())
    unheld = [at for at, spec in enumerate(layout.tensors) if spec.elements and at not in held]
    if state is not None:
        target.unheld.replace(state, unheld)
    total = sums.total()
    for tensor in unheld:
        total = total + target.unheld.of(layout, tensor)
    return total
