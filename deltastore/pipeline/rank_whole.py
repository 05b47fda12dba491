"""Two ranks that each trust their own half miss what lies between: the whole is summed over all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.errors import IntegrityError, Kind
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


def whole_fingerprint(target: RankTarget[P], group: Group) -> Fingerprint:
    """Of the weights of all ranks, before there is an applier. Collective.

    Raises IntegrityError (fingerprint, alias_drift) on every rank when the weights hold what no
    version can, InvalidInputError when nobody holds a tensor and nothing says what it is.
    """
    tally, cause = empty_tally(), None
    try:
        tally = target.whole()
    except Exception as err:  # noqa: BLE001 - it is voted, and raised below
        cause = err
    trouble = "" if cause is None else words(cause)
    said = group.exchange(Ballot(Round.WHOLE, "", "", trouble, tally=tally).to_bytes())
    ballots = [Ballot.from_bytes(text) for text in said]
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
