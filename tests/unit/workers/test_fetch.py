"""A store that does not answer delays nobody: not the step, not the other regions, not the exit."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from deltastore.events import ResultSettled
from deltastore.storage.wrapper import StoreWrapper
from tests.unit.workers.kit import Desk, LengthTask, memory_run
from workers.config import TrainerConfig
from workers.trainer.dispatch import Dispatcher
from workers.trainer.fetch import FETCH_MAX_S, FETCH_THREADS
from workers.trainer.fleet import Fleet
from workers.trainer.steady import Steady

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deltastore.storage.store import ByteRange, ObjectStore

FAR = "us"


class Hanging(StoreWrapper):
    """A store whose reads answer only once it is freed."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.freed = threading.Event()
        self.keys: list[str] = []

    def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
        """Wait, then read."""
        self.keys.append(key)
        assert self.freed.wait(300.0)
        return super().get(key, byte_range)


@contextmanager
def two_regions(settings: TrainerConfig) -> Iterator[tuple[Desk, Hanging]]:
    """A desk whose second region's bucket hangs; freed at the end, so that no thread is left."""
    desk = Desk(settings)
    far = memory_run()
    hanging = Hanging(far.store)
    desk.dispatcher = Dispatcher(
        desk.coordination,
        {"eu": desk.run, FAR: replace(far, store=hanging)},
        LengthTask(),
        desk.table,
        desk.ledger,
        Fleet(desk.coordination),
        Steady(desk.clock, 60.0),
        settings,
        seed=0,
        clock=desk.clock,
        sink=desk.events.append,
    )
    try:
        yield desk, hanging
    finally:
        hanging.freed.set()


def outcomes(desk: Desk) -> list[str]:
    """What became of every result, in order."""
    return [event.outcome for event in desk.events if isinstance(event, ResultSettled)]


def test_a_region_that_hangs_costs_a_step_its_deadline_and_no_more() -> None:
    """The step ends at its deadline with what came; the signal to stop is looked at all the time;
    what never came is late, and its group missing."""
    settings = TrainerConfig(
        groups=3, group_size=2, max_new_tokens=4, step_deadline_s=2.0, give_up_s=20.0
    )
    with two_regions(settings) as (desk, hanging):
        desk.join("a")
        desk.dispatcher.deal(1)
        lease = desk.lease("a")
        assert lease is not None
        desk.settle(lease, "a", region=FAR)
        ticks: list[float] = []

        def tick() -> None:
            ticks.append(desk.clock.monotonic_s())
            desk.serve("a")

        batch = desk.dispatcher.collect(1, tick)
        assert len(hanging.keys) == 1
        assert (len(batch.groups), batch.missing, batch.dropped) == (2, 1, 0)
        assert 2.0 <= batch.wait_s < 4.0
        assert max(b - a for a, b in pairwise(ticks)) <= 1.0
        assert outcomes(desk) == ["admitted", "admitted", "late"]


def test_a_region_with_all_its_threads_hanging_keeps_no_other_waiting() -> None:
    """More hanging reads than threads in one region; another region's results come at once."""
    groups = 2 * FETCH_THREADS + 1
    settings = TrainerConfig(
        groups=groups, group_size=2, max_new_tokens=4, step_deadline_s=2.0, give_up_s=20.0
    )
    with two_regions(settings) as (desk, hanging):
        desk.join("a")
        desk.dispatcher.deal(1)
        for _ in range(groups - 1):
            lease = desk.lease("a")
            assert lease is not None
            desk.settle(lease, "a", region=FAR)
        desk.serve("a")
        batch = desk.dispatcher.collect(1, lambda: None)
        assert (len(batch.groups), batch.missing) == (1, groups - 1)
        assert len(hanging.keys) == FETCH_THREADS
        assert not desk.dispatcher._fetcher._desks[FAR].waiting  # or it would grow with every step


def test_a_claim_that_comes_again_is_not_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often Redis says that a job is settled, one object of it is on its way at a time."""
    settings = TrainerConfig(
        groups=2, group_size=2, max_new_tokens=4, step_deadline_s=2.0, give_up_s=20.0
    )
    with two_regions(settings) as (desk, hanging):
        desk.join("a")
        desk.dispatcher.deal(1)
        lease = desk.lease("a")
        assert lease is not None
        desk.settle(lease, "a", region=FAR)
        desk.serve("a")
        take = desk.coordination.take_settled
        monkeypatch.setattr(
            desk.coordination, "take_settled", lambda *args: [*(found := take(*args)), *found]
        )
        batch = desk.dispatcher.collect(1, lambda: None)
        assert (len(batch.groups), batch.missing) == (1, 1)
        assert len(hanging.keys) == 1
        assert sorted(outcomes(desk)) == ["admitted", "duplicate", "duplicate", "late"]


def test_work_whose_object_hangs_is_done_again_elsewhere() -> None:
    """A region that answers nothing for FETCH_MAX_S is given up, and the work goes to others: a
    step below its minimum does not wait for a dead region. Until then nobody does it twice."""
    settings = TrainerConfig(
        groups=1,
        group_size=2,
        max_new_tokens=4,
        step_deadline_s=FETCH_MAX_S + 5.0,
        give_up_s=2 * FETCH_MAX_S,
    )
    with two_regions(settings) as (desk, _):
        desk.join("a")
        desk.dispatcher.deal(1)
        lease = desk.lease("a")
        assert lease is not None
        desk.settle(lease, "a", region=FAR)

        def tick() -> None:
            desk.clock.advance_s(10.0)
            desk.serve("a")

        batch = desk.dispatcher.collect(1, tick)
        assert (len(batch.groups), batch.missing, batch.dropped) == (1, 0, 1)
        assert outcomes(desk) == ["corrupt", "admitted"]
        assert FETCH_MAX_S <= batch.wait_s < settings.give_up_s


def test_a_fault_of_ours_in_a_fetch_is_raised() -> None:
    """Only failures of a store mean that an object cannot be had; anything else ends the step."""

    class Broken(StoreWrapper):
        def get(self, key: str, byte_range: ByteRange | None = None) -> bytes:
            raise RuntimeError("a fault of ours")

    desk = Desk()
    desk.run = replace(desk.run, store=Broken(desk.run.store))
    desk.build()
    desk.join("a")
    desk.dispatcher.deal(1)
    desk.serve("a")
    with pytest.raises(RuntimeError, match="a fault of ours"):
        desk.dispatcher.collect(1, lambda: None)


def test_a_read_that_hangs_does_not_keep_the_process() -> None:
    """A trainer that ends while a store hangs is gone at once, not after the store's patience."""
    program = """
from dataclasses import replace
from tests.unit.workers.kit import Desk
from tests.unit.workers.test_fetch import Hanging
from workers.config import TrainerConfig
settings = TrainerConfig(
    groups=1, group_size=2, max_new_tokens=4, step_deadline_s=1.0, give_up_s=1.0
)
desk = Desk(settings)
hanging = Hanging(desk.run.store)
desk.run = replace(desk.run, store=hanging)
desk.build()
desk.join("a")
desk.dispatcher.deal(1)
desk.serve("a")
try:
    desk.dispatcher.collect(1, lambda: None)
finally:
    assert len(hanging.keys) == 1
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert "0 of 1 groups, fewer than min_groups" in done.stderr
