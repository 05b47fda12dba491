"""An anchor is made where it lets retention free more than it takes, and not before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.events import discard
from deltastore.format.signing import unsigned
from deltastore.maintenance.anchors import AnchorPolicy
from deltastore.maintenance.retention import run_retention
from deltastore.maintenance.retention_plan import RetentionPolicy
from deltastore.maintenance.room import make_room, room_due
from deltastore.maintenance.settings import MaintenanceSettings
from tests.unit.chain_life.kit import Chain

if TYPE_CHECKING:
    from pathlib import Path

POLICY = AnchorPolicy(join_seconds_max=1e9, share_of_anchor_bytes_max=1e9, multiple=8)
KEEP = RetentionPolicy(keep_versions=4, grace_s=10)


def test_room_is_made_when_it_pays(tmp_path: Path) -> None:
    """While an anchor takes more than the deltas below it there is none; then one is made, at the
    highest multiple that retention may use, and the floor follows."""
    chain = Chain(tmp_path)
    seen = []
    for _ in range(8):
        chain.extend(4)
        seen.append(room_due(chain.run, POLICY, KEEP, streams=2))
    deltas = [chain.run.store.head(key).size_bytes for key in chain.list_keys("/deltas/")]
    for number, due in enumerate(seen):
        head = 4 * (number + 1)
        candidate = (head - 3) - (head - 3) % 8
        pays = candidate > 0 and sum(deltas[:candidate]) > chain.run.dense_bytes
        assert due == (candidate if pays else None)
    assert seen[-1] == 24
    done = make_room(
        chain.run,
        POLICY,
        KEEP,
        clock=chain.clock,
        settings=MaintenanceSettings(),
        sink=discard,
        signer=unsigned,
    )
    assert done is not None
    assert done.core.target.version == 24
    assert room_due(chain.run, POLICY, KEEP, streams=2) is None
    assert run_retention(chain.run, KEEP, dry_run=False).floor == 24


def test_no_room_in_a_short_run(tmp_path: Path) -> None:
    """A run with no more versions than are kept needs no anchor."""
    chain = Chain(tmp_path)
    assert room_due(chain.run, POLICY, KEEP, streams=2) is None
    chain.extend(3)
    assert room_due(chain.run, POLICY, RetentionPolicy(keep_versions=9), streams=2) is None
