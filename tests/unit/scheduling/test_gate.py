"""Work goes to actors at v or v - 1 of this history, alive and willing, and to nobody else."""

from __future__ import annotations

import pytest

from deltastore.coordination.backend import ActorRecord, ActorState, ActorStatus, Member
from deltastore.scheduling.gate import eligible, gate_for

HASHES = {version: f"{version:064x}" for version in range(10)}


def _member(
    version: int | None,
    *,
    state: ActorState = ActorState.ACTIVE,
    alive: bool = True,
    policy_hash: str | None = None,
) -> Member:
    if version is not None and policy_hash is None:
        policy_hash = HASHES[version]
    status = ActorStatus(state, version, policy_hash)
    return Member(ActorRecord("a", "eu", "test", 1), status, 0.0, alive)


def test_the_gate_holds_two_versions() -> None:
    """The gate of v is v and v - 1, newest first; of 0, and after a gap, what there is."""
    assert gate_for(5, HASHES) == ((5, HASHES[5]), (4, HASHES[4]))
    assert gate_for(0, HASHES) == ((0, HASHES[0]),)
    assert gate_for(5, {5: HASHES[5]}) == ((5, HASHES[5]),)
    assert gate_for(5, HASHES, max_lag=0) == ((5, HASHES[5]),)


@pytest.mark.parametrize(("version", "expected"), [(5, 5), (4, 4), (3, None), (6, None)])
def test_only_v_and_its_predecessor(version: int, expected: int | None) -> None:
    """An actor ahead of the head or more than one behind gets nothing."""
    assert eligible(_member(version), 5, HASHES) == expected


def test_only_this_history() -> None:
    """CASE R3: the right number with another history's hash gets nothing."""
    assert eligible(_member(5, policy_hash="f" * 64), 5, HASHES) is None


def test_only_the_living_and_willing() -> None:
    """Lost, draining and poisoned actors and those at no version get nothing."""
    assert eligible(_member(5, alive=False), 5, HASHES) is None
    assert eligible(_member(5, state=ActorState.DRAINING), 5, HASHES) is None
    assert eligible(_member(5, state=ActorState.POISONED), 5, HASHES) is None
    assert eligible(_member(None), 5, HASHES) is None
    assert eligible(_member(5, state=ActorState.JOINING), 5, HASHES) == 5
