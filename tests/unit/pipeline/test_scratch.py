"""However much scratch memory an applier has, it writes the same bits and undoes the same."""

from __future__ import annotations

import pytest

from deltastore.config import FollowerSettings
from deltastore.errors import ApplyError, Kind
from deltastore.pipeline.applier import Applier
from deltastore.pipeline.host import HostTarget
from tests.unit.pipeline.harness import World


class CountingTarget(HostTarget):
    """Counts what is read, and can fail at the nth write."""

    def __init__(self, state, fails_at=0):
        super().__init__(state)
        self.gathers = 0
        self.scatters = 0
        self.fails_at = fails_at

    def gather(self, tensor, box, indices):
        """Count and read."""
        self.gathers += 1
        return super().gather(tensor, box, indices)

    def scatter(self, tensor, box, indices, bits):
        """Count, write, or fail once."""
        self.scatters += 1
        if self.scatters == self.fails_at:
            raise RuntimeError("injected")
        super().scatter(tensor, box, indices, bits)


@pytest.fixture
def staged(tmp_path):
    """A run, and an update of several versions that waits."""
    world = World(tmp_path)
    publisher = world.publisher()
    for step in range(1, 4):
        world.step(publisher, step)
    publisher.close()
    actor = world.actor()
    actor.follower.catch_up()
    return world, actor.follower.take()


@pytest.mark.parametrize("scratch_bytes", [0, 50, 1 << 20])
def test_old_bits_are_read_once_where_they_fit(staged, scratch_bytes):
    """With room for them the old bits are read once per block, without it twice: same result."""
    world, update = staged
    target = CountingTarget(world.zero.copy())
    settings = FollowerSettings(scratch_max_bytes=scratch_bytes)
    Applier(target, update.base, name="a", clock=world.clock, settings=settings).activate(update)
    assert target.state.equals(world.state)
    blocks = len(update.blocks)
    kept = {0: 0, 1 << 20: blocks}.get(scratch_bytes)
    assert blocks <= target.gathers <= 2 * blocks
    assert kept is None or target.gathers == 2 * blocks - kept


@pytest.mark.parametrize("scratch_bytes", [0, 50, 1 << 20])
def test_rollback_with_and_without_scratch(staged, scratch_bytes):
    """CASE R2: a write that fails at block k of n is undone, its old bits kept or read again."""
    world, update = staged
    for fails_at in range(1, len(update.blocks) + 1):
        target = CountingTarget(world.zero.copy(), fails_at)
        settings = FollowerSettings(scratch_max_bytes=scratch_bytes)
        applier = Applier(target, update.base, name="a", clock=world.clock, settings=settings)
        with pytest.raises(ApplyError) as err:
            applier.activate(update)
        assert err.value.kind is Kind.ROLLED_BACK
        assert target.state.equals(world.zero)
