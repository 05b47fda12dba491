"""What an actor ignored, and damage that nobody saw, do not count as survived."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest

from deltastore.clock import SystemClock
from deltastore.errors import ConflictError
from deltastore.events import ResultSettled, StepTrained
from deltastore.observability.jsonl import JsonlSink
from deltastore.storage.memory import MemoryStore
from deltastore.storage.store import ByteRange, PutMode
from deltastore.testing.clock import FakeClock
from workers.chaos.deeds import READ_AGAIN, STORED, Deed, DeedLog
from workers.chaos.director import Director
from workers.chaos.engine import ScriptedEngine
from workers.chaos.injected import AGAIN_AFTER_S, DEED_OF, Injected
from workers.chaos.judge import ChaosFound, check_deeds, check_memory
from workers.chaos.orders import (
    OrderBook,
    Orders,
    SpoilingStore,
    SteppedClock,
    deeds_file,
    orders_file,
)
from workers.chaos.schedule import Fault, Planned
from workers.chaos.world import TRAINER_NAME, World
from workers.demo.fleet import DemoError
from workers.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

ACTOR = "a"
ORDERED = sorted(DEED_OF)
BODY = bytes(range(64))
SEGMENT = f"r/deltas/1/0-{hashlib.sha256(BODY).hexdigest()}.seg"


def injected(fault: Fault, *, number: int = 1, lasts_s: float = 0.0) -> Injected:
    """A fault that the director has just begun on the only actor."""
    return Injected.begin(Planned(0.0, fault, ACTOR, lasts_s), 0.0, number=number, line=0)


def answered(outcome: str, job: str) -> ResultSettled:
    """The trainer's answer to a result of the only actor."""
    return ResultSettled(job, ACTOR, outcome, 8, 1.0)


class Turns(FakeClock):
    """A clock whose every sleep is a turn of somebody else."""

    def __init__(self, turn: Callable[[str], None]) -> None:
        super().__init__()
        self._turn = turn

    def sleep_s(self, seconds: float) -> None:
        """Sleep; meanwhile the other one takes its turn, under a number of its own."""
        super().sleep_s(seconds)
        self._turn(str(len(self.slept_s)))


class Measured(World):
    """A world that notes whose memory it is asked for."""

    asked: list[set[str]]

    def memory_bytes(self, lives: Collection[str]) -> dict[str, int]:
        """Note it."""
        self.asked.append(set(lives))
        return {}


class Machine:
    """What of an actor carries orders out, and the director that gives them, without processes.

    Args:
        turn: what the actor does between two looks of the director.
    """

    def __init__(self, path: Path, turn: Callable[[Machine, str], None] | None = None) -> None:
        self.folder = RunFolder(path)
        self.clock = FakeClock() if turn is None else Turns(partial(turn, self))
        self.stored = MemoryStore()
        self.stored.put(SEGMENT, BODY, mode=PutMode.CREATE)
        self.events = JsonlSink(self.folder.events(TRAINER_NAME), self.clock)
        unused = cast("Any", None)  # no process is touched by an order
        self.world = Measured(
            "r", "home", self.folder, path, (), {}, unused, unused, self.clock, {ACTOR: "home"}
        )
        self.world.asked = []
        self.director = Director(self.world, lambda line: None)
        self.start()

    def start(self) -> None:
        """A new life of the actor."""
        log = DeedLog(deeds_file(self.folder, ACTOR))
        self.book = OrderBook(orders_file(self.folder, ACTOR), log)
        self.store = SpoilingStore(self.stored, self.book)
        self.wrong_clock = SteppedClock(self.book)

    def put(self, job: str) -> bytes:
        """Store a result as an actor does; what lies there then."""
        key = f"r/rollouts/0000000001/{job}/t{len(self.book_deeds())}-00"
        self.store.put(key, BODY, mode=PutMode.CREATE)
        return self.stored.get(key)

    def book_deeds(self) -> list[Deed]:
        """All that was written down so far."""
        return DeedLog(deeds_file(self.folder, ACTOR)).read_new()


@pytest.mark.parametrize("fault", ORDERED)
def test_an_order_that_nobody_carries_out_fails_the_run(tmp_path: Path, fault: Fault) -> None:
    """An actor that ignores its orders and has results admitted all the time survives nothing."""

    def work(machine: Machine, job: str) -> None:
        DeedLog(deeds_file(machine.folder, ACTOR)).append(Deed(STORED, 0, job))
        machine.events(answered("admitted", job))

    director = Machine(tmp_path, work).director
    with pytest.raises(DemoError, match=f"{fault.value} {ACTOR} \\(did not happen\\)"):
        director.play([Planned(0.0, fault, ACTOR, 0.0)], 1.0)
    with pytest.raises(ChaosFound, match=f"did 0 of 1 x {fault.value}"):
        check_deeds(director.injected, director.deeds, director.results)


@pytest.mark.parametrize("fault", [Fault.FLIP_RESULT, Fault.CUT_RESULT])
def test_a_damaged_result_has_to_be_called_corrupt(fault: Fault) -> None:
    """Admitted work proves nothing before; afterwards only work that was stored later does."""
    one = injected(fault)
    one.see_deed(Deed(STORED, 1, "early"), 1, 1.0)
    one.see_deed(Deed(DEED_OF[fault], 1, "j"), 2, 2.0)
    assert one.is_due(2.0)
    one.end(2.0, line=2)
    one.see_verdict(answered("admitted", "k"), stored_line=3, now_s=3.0)
    assert one.recovery_s is None
    one.see_verdict(answered("corrupt", "other"), stored_line=0, now_s=4.0)
    one.see_verdict(answered("admitted", "l"), stored_line=4, now_s=5.0)
    assert one.recovery_s is None
    one.see_verdict(answered("corrupt", "j"), stored_line=0, now_s=6.0)
    one.see_verdict(answered("admitted", "early"), stored_line=1, now_s=7.0)
    assert one.recovery_s is None
    one.see_verdict(answered("admitted", "m"), stored_line=5, now_s=8.0)
    assert one.recovery_s == 6.0


def test_a_flipped_read_has_to_be_read_again() -> None:
    """Work goes on after a flip only once the same object was read as it is."""
    one = injected(Fault.FLIP_READ)
    one.see_deed(Deed(READ_AGAIN, 1, "key"), 1, 0.5)
    one.see_deed(Deed(DEED_OF[Fault.FLIP_READ], 1, "key"), 2, 1.0)
    one.end(1.0, line=2)
    one.see_deed(Deed(READ_AGAIN, 1, "another"), 3, 1.5)
    one.see_verdict(answered("admitted", "j"), stored_line=4, now_s=2.0)
    assert one.recovery_s is None
    one.see_deed(Deed(READ_AGAIN, 1, "key"), 5, 2.5)
    one.see_verdict(answered("admitted", "k"), stored_line=6, now_s=3.0)
    assert one.recovery_s == 2.0


def test_what_lasts_begins_when_it_takes_effect() -> None:
    """A slow actor's time runs from its first slow batch; work stored meanwhile proves nothing."""
    one = injected(Fault.SLOW_ACTOR, number=7, lasts_s=12.0)
    one.see_deed(Deed("slow", 6), 1, 5.0)  # of the order before
    assert one.happened_s is None
    assert not one.is_due(100.0)
    one.see_deed(Deed("slow", 7), 2, 100.0)
    assert not one.is_due(111.0)
    assert one.is_due(112.0)
    one.end(112.0, line=9)
    one.see_verdict(answered("admitted", "j"), stored_line=9, now_s=113.0)
    assert one.recovery_s is None
    one.see_verdict(answered("admitted", "k"), stored_line=10, now_s=115.0)
    assert one.recovery_s == 3.0


def test_damage_that_nobody_looked_at_is_ordered_again(tmp_path: Path) -> None:
    """A damaged result that came late is no fault yet: one more is damaged."""
    jobs: list[str] = []

    def work(machine: Machine, job: str) -> None:
        if machine.put(job) == BODY:
            outcome = "admitted"
        else:
            jobs.append(job)
            outcome = "late" if len(jobs) == 1 else "corrupt"
        machine.events(answered(outcome, job))

    director = Machine(tmp_path, work).director
    director.play([Planned(0.0, Fault.CUT_RESULT, ACTOR, 0.0)], 1.0)
    assert len(jobs) == 2
    assert [one.about for one in director.injected] == jobs[1:]
    check_deeds(director.injected, director.deeds, director.results)
    unseen = [one for one in director.results if one.outcome != "corrupt"]
    with pytest.raises(ChaosFound, match=f"0 of 1 x {Fault.CUT_RESULT.value} noticed"):
        check_deeds(director.injected, director.deeds, unseen)


def test_silence_after_damage_is_bounded() -> None:
    """Damage without an answer is lost after a while, and a jump that no process lived through."""
    one = injected(Fault.FLIP_RESULT)
    assert not one.is_lost(10 * AGAIN_AFTER_S)  # not done yet: it is still to come
    one.see_deed(Deed("flip_results", 1, "j"), 1, 1.0)
    assert not one.is_lost(1.0 + AGAIN_AFTER_S)
    assert one.is_lost(1.1 + AGAIN_AFTER_S)
    one.order_again(30.0, 2)
    assert one.happened_s is None
    one.see_deed(Deed("flip_results", 2, "k"), 2, 31.0)
    one.see_verdict(answered("corrupt", "k"), stored_line=0, now_s=32.0)
    assert not one.is_lost(32.0 + 2 * AGAIN_AFTER_S)
    jump = injected(Fault.JUMP_CLOCK)
    assert not jump.is_lost(AGAIN_AFTER_S)
    assert jump.is_lost(0.1 + AGAIN_AFTER_S)


def test_what_a_director_does_itself_has_happened() -> None:
    """A killed actor is over a kill with a result stored after it, a region with a step."""
    kill = injected(Fault.KILL_ACTOR, number=0, lasts_s=1.0)
    assert kill.is_due(1.0)
    kill.see_step(1.5)
    kill.end(1.5, line=4)
    kill.see_verdict(answered("admitted", "j"), stored_line=4, now_s=2.0)
    assert kill.recovery_s is None
    kill.see_verdict(answered("admitted", "k"), stored_line=5, now_s=3.5)
    assert kill.recovery_s == 2.0
    hang = Injected.begin(Planned(0.0, Fault.HANG_REGION, "home", 6.0), 0.0, number=0, line=0)
    hang.see_step(3.0)
    assert hang.recovery_s is None
    hang.end(6.0, line=0)
    hang.see_step(7.0)
    assert hang.recovery_s == 1.0


def test_orders_add_up_over_lives(tmp_path: Path) -> None:
    """No later order takes an earlier one back, and no new process does one for a second time."""
    machine = Machine(tmp_path)
    Orders(number=1, flip_results=1).write(orders_file(machine.folder, ACTOR))
    Orders(number=2, flip_results=1, cut_results=2).write(orders_file(machine.folder, ACTOR))
    assert sum(x != y for x, y in zip(machine.put("j"), BODY, strict=True)) == 1
    assert machine.put("k") == BODY[:32]
    machine.start()
    assert machine.put("l") == BODY[:32]
    assert machine.put("m") == BODY
    machine.start()
    assert machine.put("n") == BODY
    assert [(deed.what, deed.about) for deed in machine.book_deeds()] == [
        ("flip_results", "j"),
        ("cut_results", "k"),
        ("cut_results", "l"),
        (STORED, "m"),
        (STORED, "n"),
    ]
    assert {deed.number for deed in machine.book_deeds()} == {2}


def test_a_result_that_was_not_stored_was_not_damaged(tmp_path: Path) -> None:
    """The order stays until an upload of a damaged result has come through."""
    machine = Machine(tmp_path)
    Orders(number=1, flip_results=1).write(orders_file(machine.folder, ACTOR))
    machine.stored.put("r/rollouts/0000000001/j/t0-00", b"another", mode=PutMode.CREATE)
    with pytest.raises(ConflictError):
        machine.put("j")
    assert machine.book_deeds() == []
    assert machine.put("k") != BODY
    assert machine.put("l") == BODY


def test_reading_again_counts_when_it_is_right(tmp_path: Path) -> None:
    """A part of the object is not the object: the deed is the first read of its own digest."""
    machine = Machine(tmp_path)
    Orders(number=1, flip_reads=1).write(orders_file(machine.folder, ACTOR))
    assert machine.store.get(SEGMENT) != BODY
    assert machine.store.get(SEGMENT, ByteRange(0, 8)) == BODY[:8]
    assert [deed.what for deed in machine.book_deeds()] == ["flip_reads"]
    assert machine.store.get(SEGMENT) == BODY
    assert machine.store.get(SEGMENT) == BODY
    assert [deed.what for deed in machine.book_deeds()] == ["flip_reads", READ_AGAIN]


def test_clocks_are_wrong_when_somebody_reads_them(tmp_path: Path) -> None:
    """A step is a deed once the clock was asked, by a process that began before the step."""
    machine = Machine(tmp_path)
    Orders(number=1, clock_step_s=3600.0, clock_ahead_s=3600.0).write(
        orders_file(machine.folder, ACTOR)
    )
    assert machine.book_deeds() == []
    for _ in range(2):
        assert machine.wrong_clock.utc_s() - SystemClock().utc_s() == pytest.approx(3600, abs=5)
        ahead_s = machine.wrong_clock.monotonic_s() - SystemClock().monotonic_s()
        assert ahead_s == pytest.approx(3600, abs=5)
    assert [deed.what for deed in machine.book_deeds()] == ["clock_step_s", "clock_ahead_s"]
    machine.start()
    assert machine.wrong_clock.utc_s() - SystemClock().utc_s() == pytest.approx(3600, abs=5)
    machine.wrong_clock.monotonic_s()
    assert len(machine.book_deeds()) == 2


def test_slowness_is_a_deed_once_it_is_felt(tmp_path: Path) -> None:
    """A batch at full speed writes nothing down; one that slept half a second longer does, once."""
    machine = Machine(tmp_path)
    engine = ScriptedEngine(cast("Any", None), machine.book, vocabulary=64, clock=machine.clock)

    def spent_s() -> float:
        began_s = machine.clock.monotonic_s()
        engine._spend(64, lambda tokens: True)
        return machine.clock.monotonic_s() - began_s

    quick_s = spent_s()
    assert machine.book_deeds() == []
    Orders(number=3, slow=10.0).write(orders_file(machine.folder, ACTOR))
    assert spent_s() > 8 * quick_s
    assert spent_s() > 8 * quick_s
    assert machine.book_deeds() == [Deed("slow", 3)]


def test_a_trainer_nobody_measured_is_no_flat_memory() -> None:
    """The trainer has to have been judged; what was at work for less than a minute is left out."""
    long = [(float(second), 600 << 20) for second in range(120)]
    assert check_memory({"trainer.1": long, "b.1": long[:50]}, must="trainer.1") == {
        "trainer.1": 1.0
    }
    for samples in ({}, {"b.1": long}, {"trainer.1": long[:50]}, {"trainer.1": long[::10]}):
        with pytest.raises(ChaosFound, match=r"trainer\.1 was not at work"):
            check_memory(samples, must="trainer.1")


def test_a_leak_of_a_megabyte_in_two_seconds_is_found() -> None:
    """It may grow while it settles; what goes on growing is found in two minutes."""
    settled = [(float(s), (400 << 20) + (min(s, 39) << 22)) for s in range(120)]
    assert check_memory({"t.1": settled}, must="t.1") == {"t.1": 1.0}
    leaking = [(float(s), (600 << 20) + (s << 19)) for s in range(120)]
    with pytest.raises(ChaosFound, match=r"t\.1 grew"):
        check_memory({"t.1": leaking}, must="t.1")


def test_memory_counts_from_the_first_work(tmp_path: Path) -> None:
    """The director measures nobody that has not worked in this life: it would be importing."""
    machine = Machine(tmp_path)
    machine.director.play([], 2.0)
    machine.put("j")
    machine.events(StepTrained(1, 1, 0.5, 0.0, 1.0, 8, 0, 0, 1.0, 1.0, 0.0, 1.0, 1.0))
    machine.director.play([], 2.0)
    assert machine.world.asked[0] == set()
    assert machine.world.asked[-1] == {f"{ACTOR}.0", f"{TRAINER_NAME}.0"}
