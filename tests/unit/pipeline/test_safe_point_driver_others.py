"""What somebody else does to an engine (sleep, pause, resume) is met, or noticed; never undone."""

from __future__ import annotations

import pytest

from deltastore.errors import ApplyError, Kind
from deltastore.events import ActivationFailed, EngineHeld
from deltastore.pipeline.safe_point import SafePointDriver, SafePointSettings, Turn
from deltastore.testing.clock import FakeClock
from tests.unit.pipeline.scripted_engine import Rank, ScriptedEngine, served

PROMPT = SafePointSettings(min_interval_s=0, jitter_s=0, settle_s=0)
WRITES = {"update(newest)", "initialise", "re_anchor"}


class Shared:
    """A driver of an engine that others use too, already following version 1."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.clock = FakeClock()
        self.events: list[object] = []
        self.driver = SafePointDriver(
            self.engine, self.clock, name="e", settings=PROMPT, sink=self.events.append
        )
        assert self.driver.turn() is Turn.NOTHING
        self.forget()

    def forget(self) -> None:
        """What happened before does not count."""
        self.engine.calls.clear()
        self.engine.requests.clear()
        self.events.clear()

    def turn_until(self, wanted: Turn) -> None:
        """Turn, half a second apart, until a turn ends so."""
        for _ in range(50):
            if self.driver.turn() is wanted:
                return
            self.clock.advance_s(0.5)
        raise AssertionError(f"never {wanted}: {self.driver.view()}")


def test_a_sleeping_engine_is_left_alone() -> None:
    """Neither paused, written nor resumed while it sleeps; activated once it is awake."""
    shared = Shared()
    shared.engine.staged = 2
    shared.engine.sleep()
    for _ in range(5):
        assert shared.driver.turn() is Turn.NOTHING
    assert shared.engine.paused
    assert set(shared.engine.calls) == {"is_paused", "status"}
    assert "sleeps" in shared.driver.view().trouble
    shared.engine.wake_up()
    assert shared.driver.turn() is Turn.ACTIVATED
    assert shared.driver.view().trouble == ""
    assert shared.engine.forward()
    assert shared.engine.wrong == []


def test_one_rank_whose_memory_is_away_is_enough() -> None:
    """A partial awakening is a sleep: the caches are not there yet."""
    shared = Shared()
    shared.engine.staged = 2
    shared.engine.sleep()
    shared.engine.ranks[0].asleep = False
    assert shared.driver.turn() is Turn.NOTHING
    assert shared.engine.paused


def test_an_engine_that_sleeps_at_the_start_is_followed_when_it_is_awake() -> None:
    """Nothing is traced in memory that is away."""
    engine = ScriptedEngine()
    engine.sleep()
    driver = SafePointDriver(engine, FakeClock(), name="e", settings=PROMPT)
    assert driver.turn() is Turn.NOTHING
    assert "initialise" not in engine.calls
    engine.wake_up()
    assert driver.turn() is Turn.NOTHING
    assert driver.view().served == served(1)
    assert engine.wrong == []


def test_an_engine_that_falls_asleep_before_the_write_is_not_resumed() -> None:
    """The update is refused, and the engine stays asleep until somebody wakes it up."""
    shared = Shared()
    shared.engine.staged = 2
    shared.engine.meanwhile["update"] = shared.engine.sleep
    assert shared.driver.turn() is Turn.FAILED
    assert "resume" not in shared.engine.calls
    assert shared.engine.paused
    assert shared.driver.view().held == ""
    shared.engine.wake_up()
    shared.turn_until(Turn.ACTIVATED)
    assert shared.engine.wrong == []


def test_discarded_weights_are_rebuilt_after_the_awakening() -> None:
    """Sleep level 2: in doubt, but held and rebuilt only when the memory is back."""
    shared = Shared()
    shared.engine.sleep()
    for rank in shared.engine.ranks:
        rank.poisoned = "the weights were discarded"
    assert shared.driver.turn() is Turn.NOTHING
    assert not WRITES & set(shared.engine.calls)
    for rank in shared.engine.ranks:
        rank.asleep = False  # the engine core refuses to resume weights in doubt
    assert shared.driver.turn() is Turn.HELD
    shared.turn_until(Turn.RECOVERED)
    assert shared.engine.forward()
    assert shared.engine.wrong == []


def test_a_held_engine_that_sleeps_waits() -> None:
    """No rebuild, and no end of requests, while there is no memory to rebuild in."""
    shared = Shared()
    shared.engine.ranks[1].poisoned = "torn"
    assert shared.driver.turn() is Turn.HELD
    shared.engine.sleep()
    shared.forget()
    for _ in range(200):
        assert shared.driver.turn() is Turn.HELD
        shared.clock.advance_s(1.0)
    assert set(shared.engine.calls) == {"status"}
    shared.engine.wake_up()
    shared.engine.paused = True
    shared.turn_until(Turn.RECOVERED)
    assert shared.engine.wrong == []


def test_nobody_resumes_a_sleeping_engine_by_hand() -> None:
    """`resume` refuses while memory is away: forward passes would read what is not there."""
    shared = Shared()
    shared.engine.sleep()
    with pytest.raises(ApplyError, match="wake it up") as caught:
        shared.driver.resume()
    assert caught.value.kind is Kind.ENGINE
    assert shared.engine.paused


def test_a_pause_of_somebody_else_stays() -> None:
    """Nothing is written under it, and it is theirs to end (CASE R18)."""
    shared = Shared()
    shared.engine.paused = True
    shared.engine.staged = 2
    for _ in range(5):
        assert shared.driver.turn() is Turn.NOTHING
    assert set(shared.engine.calls) == {"is_paused", "status"}
    assert "somebody else" in shared.driver.view().trouble
    shared.engine.resume()
    assert shared.driver.turn() is Turn.ACTIVATED


def test_a_recovery_leaves_a_pause_of_somebody_else() -> None:
    """Weights in doubt are rebuilt; the engine is as paused afterwards as its owner left it."""
    shared = Shared()
    shared.engine.paused = True
    assert shared.driver.turn() is Turn.NOTHING
    shared.engine.ranks[0].poisoned = "torn"
    assert shared.driver.turn() is Turn.HELD
    shared.turn_until(Turn.RECOVERED)
    assert shared.engine.paused
    assert "resume" not in shared.engine.calls
    assert shared.driver.view().held == ""
    shared.driver.resume()
    assert shared.engine.forward()
    assert shared.engine.wrong == []


def test_an_owner_who_resumes_a_held_engine_has_it_run_afterwards() -> None:
    """Their wish is remembered: it runs when it is proved, not for ever paused."""
    shared = Shared()
    shared.engine.paused = True
    assert shared.driver.turn() is Turn.NOTHING
    shared.engine.ranks[0].poisoned = "torn"
    assert shared.driver.turn() is Turn.HELD
    shared.engine.resume()
    shared.turn_until(Turn.RECOVERED)
    assert shared.engine.forward()
    assert shared.engine.wrong == []


def test_a_rebuild_is_kept_apart_from_whoever_resumed_meanwhile() -> None:
    """A held engine is paused again before every rebuild (CASE R18)."""
    shared = Shared()
    shared.engine.staged = 2
    shared.engine.faults = [("update", "poisoned"), ("re_anchor", "before")]
    assert shared.driver.turn() is Turn.HELD
    shared.engine.resume()  # past the driver
    shared.turn_until(Turn.RECOVERED)
    assert shared.engine.wrong == []


@pytest.mark.parametrize("call", ["update", "write"])
def test_a_resume_during_a_write_fails_the_activation(call: str) -> None:
    """Noticed before the own resume: its requests are ended, then it serves anew (CASE R18)."""
    shared = Shared()
    shared.engine.staged = 2
    shared.engine.meanwhile[call] = shared.engine.resume
    assert shared.driver.turn() is Turn.HELD
    failed, held = shared.events
    assert isinstance(failed, ActivationFailed)
    assert "somebody resumed e" in failed.message
    assert isinstance(held, EngineHeld)
    assert shared.engine.requests == ["keep", "abort"]
    assert shared.engine.paused
    shared.turn_until(Turn.RECOVERED)
    assert shared.driver.view().served == served(2)
    assert shared.engine.forward()
    assert shared.engine.wrong == []


def test_a_resume_during_a_write_that_failed_is_noticed_too() -> None:
    """Rolled back on all ranks, yet forward passes may have met what was undone (CASE R18)."""
    shared = Shared()
    shared.engine.staged = 2
    update = shared.engine.update

    def rolled_back(_wanted: object) -> None:
        shared.engine.resume()
        raise ApplyError("rolled back", kind=Kind.ROLLED_BACK)

    shared.engine.update = rolled_back
    assert shared.driver.turn() is Turn.HELD
    assert shared.engine.requests == ["keep", "abort"]
    shared.engine.update = update
    shared.turn_until(Turn.RECOVERED)
    shared.turn_until(Turn.ACTIVATED)
    assert shared.engine.wrong == []


def test_a_resume_during_a_rebuild_ends_what_it_let_in() -> None:
    """A rebuild that did not stay apart: requests are cut, caches dropped (CASE R18)."""
    shared = Shared()
    shared.engine.ranks[0].poisoned = "torn"
    assert shared.driver.turn() is Turn.HELD
    shared.forget()
    re_anchor = shared.engine.re_anchor

    def resumed_after() -> None:
        re_anchor()
        shared.engine.resume()

    shared.engine.re_anchor = resumed_after
    shared.turn_until(Turn.RECOVERED)
    assert shared.engine.requests == ["keep", "abort"]
    assert shared.engine.wrong == []


def test_a_start_that_writes_another_version_is_a_safe_point() -> None:
    """Weights loaded are no version's: rebuilt while nothing runs (CASE R7, R20)."""
    engine = ScriptedEngine(start=5, loaded=0, cached=0)
    engine.meanwhile["initialise"] = engine.forward
    driver = SafePointDriver(engine, FakeClock(), name="e", settings=PROMPT)
    assert engine.forward()
    assert driver.turn() is Turn.NOTHING
    assert driver.view().served == served(5)
    assert engine.forward()
    assert engine.wrong == []
    assert engine.forwards == 2
    assert engine.requests == ["keep"]


def test_a_start_that_somebody_resumed_is_not_served() -> None:
    """Requests in a rebuild have met a mix: they are ended before the engine serves (CASE R18)."""
    engine, clock = ScriptedEngine(start=5, loaded=0), FakeClock()
    engine.meanwhile["initialise"] = engine.resume
    driver = SafePointDriver(engine, clock, name="e", settings=PROMPT)
    assert driver.turn() is Turn.HELD
    assert engine.requests == ["keep", "abort"]
    clock.advance_s(1.0)
    assert driver.turn() is Turn.RECOVERED
    assert engine.forward()
    assert engine.wrong == []


@pytest.mark.parametrize("how", ["before", "after"])
def test_a_start_that_cannot_pause_serves_what_it_loaded(how: str) -> None:
    """Nothing is initialised that is not paused; the engine serves on and is tried again."""
    engine, clock = ScriptedEngine(faults=[("pause", how)]), FakeClock()
    driver = SafePointDriver(engine, clock, name="e", settings=PROMPT)
    assert driver.turn() is Turn.FAILED
    assert "initialise" not in engine.calls
    assert engine.forward()
    clock.advance_s(1.0)
    assert driver.turn() is Turn.NOTHING
    assert driver.view().served == served(1)


def test_a_start_of_which_nothing_is_known_is_held_until_it_is() -> None:
    """It may be writing still; once no rank follows, what was loaded serves (CASE R22)."""
    engine, clock = ScriptedEngine(), FakeClock()
    engine.faults = [("status", ""), ("initialise", "before"), ("status", "before")]
    driver = SafePointDriver(engine, clock, name="e", settings=PROMPT)
    assert driver.turn() is Turn.HELD
    assert "state is unknown" in driver.view().held
    assert engine.paused
    clock.advance_s(1.0)
    assert driver.turn() is Turn.RECOVERED
    assert (driver.view().held, driver.view().served) == ("", None)
    assert engine.forward()
    assert driver.turn() is Turn.NOTHING
    assert driver.view().served == served(1)


def test_workers_started_again_under_a_pause_of_somebody_else_wait_for_its_end() -> None:
    """They find their version when the engine is given back."""
    shared = Shared()
    shared.engine.ranks = [Rank(), Rank()]
    shared.engine.paused = True
    assert shared.driver.turn() is Turn.NOTHING
    assert "initialise" not in shared.engine.calls
    shared.engine.resume()
    assert shared.driver.turn() is Turn.NOTHING
    assert shared.driver.view().served == served(1)
    assert shared.engine.wrong == []
