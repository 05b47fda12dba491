"""Whatever fails at a safe point, an engine serves one proved version or nothing."""

from __future__ import annotations

import itertools

import pytest

from deltastore.errors import ApplyError, InvalidInputError, Kind
from deltastore.events import (
    ActivationFailed,
    ActorJoined,
    EngineHeld,
    EngineReleased,
    SafePointPassed,
)
from deltastore.pipeline.engine_control import PauseMode, RankStatus
from deltastore.pipeline.safe_point import SafePointDriver, SafePointSettings, Turn
from deltastore.testing.clock import FakeClock
from tests.unit.pipeline.scripted_engine import Rank, ScriptedEngine, hash_of, served

PROMPT = SafePointSettings(min_interval_s=0, jitter_s=0, settle_s=0)


class Driven:
    """A driver over a scripted engine on a fake clock, already following version 1."""

    def __init__(self, settings: SafePointSettings = PROMPT, **engine: object) -> None:
        self.engine = ScriptedEngine(**engine)
        self.clock = FakeClock()
        self.events: list[object] = []
        self.driver = SafePointDriver(
            self.engine,
            self.clock,
            name="engine-1",
            settings=settings,
            sink=self.events.append,
            seed=7,
        )
        assert self.driver.turn() is Turn.NOTHING
        assert self.driver.view().served == served(1)
        assert self.events == [ActorJoined("engine-1", 1, "engine", 0, 0)]
        self.events.clear()
        self.engine.calls.clear()
        self.engine.requests.clear()

    def turns_until(self, wanted: Turn, most: int = 200) -> int:
        """Turn, half a second apart, until a turn ends so; how many it took."""
        for count in range(1, most):
            outcome = self.driver.turn()
            self.engine.forward()
            assert self.engine.wrong == []
            if outcome is wanted:
                return count
            self.clock.advance_s(0.5)
        raise AssertionError(f"never {wanted}: {self.driver.view()}")

    def kinds(self) -> list[str]:
        """The events so far, by class."""
        return [type(event).__name__ for event in self.events]


def test_a_staged_version_is_activated_in_the_only_safe_order() -> None:
    """Pause, write, every rank's proof, caches, resume; one event says how long each took."""
    driven = Driven()
    driven.engine.staged = 4
    assert driven.driver.turn() is Turn.ACTIVATED
    assert driven.engine.calls == [
        "is_paused",
        "status",
        "pause(keep)",
        "update(newest)",
        "status",
        "reset",
        "is_paused",
        "resume",
    ]
    assert driven.events == [SafePointPassed("engine-1", 1, 4, hash_of(4), "keep", 0, 0, 0, 0)]
    view = driven.driver.view()
    assert (view.served, view.staged, view.held, view.trouble) == (served(4), None, "", "")
    assert driven.engine.forward()
    assert driven.engine.wrong == []


def test_seconds_are_those_of_the_stages() -> None:
    """Every stage's seconds are measured apart, on the driver's clock."""
    driven = Driven()
    driven.engine.staged = 2
    for call, seconds in (("pause", 1.0), ("update", 2.0), ("reset_caches", 4.0), ("resume", 8.0)):
        before = getattr(driven.engine, call)

        def slow(*arguments: object, _before=before, _seconds=seconds) -> object:
            driven.clock.advance_s(_seconds)
            return _before(*arguments)

        setattr(driven.engine, call, slow)
    driven.driver.turn()
    passed = driven.driver.view().passed
    assert passed is not None
    assert [passed.pause_s, passed.write_s, passed.reset_s, passed.resume_s] == [1, 2, 4, 8]


@pytest.mark.parametrize("mode", list(PauseMode))
def test_requests_in_flight_are_treated_as_the_policy_says(mode: PauseMode) -> None:
    """The engine is paused with the mode that was set, once per activation (CASE R18)."""
    driven = Driven(SafePointSettings(mode=mode, min_interval_s=0, jitter_s=0))
    driven.engine.staged = 2
    assert driven.driver.turn() is Turn.ACTIVATED
    assert driven.engine.requests == [mode.value]


def test_activations_keep_their_distance_and_a_fleet_spreads() -> None:
    """Never sooner than `min_interval_s` after the last, and up to `jitter_s` later, by chance."""
    settings = SafePointSettings(min_interval_s=10, jitter_s=4, settle_s=0)
    waited = set()
    for seed in range(8):
        engine, clock = ScriptedEngine(staged=2), FakeClock()
        driver = SafePointDriver(engine, clock, name="e", settings=settings, seed=seed)
        first_s = _seconds_to(driver, clock, Turn.ACTIVATED)
        engine.staged = 3
        second_s = _seconds_to(driver, clock, Turn.ACTIVATED)
        assert first_s <= 4.5
        assert 10 <= second_s <= 14.5
        waited.add(first_s)
    assert len(waited) > 3


def _seconds_to(driver: SafePointDriver, clock: FakeClock, wanted: Turn) -> float:
    started_s = clock.monotonic_s()
    while driver.turn() is not wanted:
        clock.advance_s(0.25)
        assert clock.monotonic_s() - started_s < 100
    return clock.monotonic_s() - started_s


def test_ranks_that_stage_at_different_speeds_get_a_moment() -> None:
    """While ranks have staged different versions the engine is not paused for `settle_s`."""
    driven = Driven(SafePointSettings(min_interval_s=0, jitter_s=0, settle_s=2))
    driven.engine.staged = 2
    statuses = driven.engine.status

    def uneven() -> list[RankStatus]:
        one, two = statuses()
        return [one, RankStatus(two.rank, two.active)]

    driven.engine.status = uneven
    assert driven.driver.turn() is Turn.NOTHING
    driven.clock.advance_s(1.9)
    assert driven.driver.turn() is Turn.NOTHING
    driven.engine.status = statuses
    assert driven.driver.turn() is Turn.ACTIVATED


@pytest.mark.parametrize(
    ("call", "how"),
    [("pause", "before"), ("pause", "after"), ("update", "before")],
)
def test_a_failure_that_wrote_nothing_resumes_the_version_before(call: str, how: str) -> None:
    """Every rank clean at the old version: it serves on, and is tried again later (CASE R2)."""
    driven = Driven()
    driven.engine.staged = 2
    driven.engine.faults = [(call, how)]
    assert driven.driver.turn() is Turn.FAILED
    assert not driven.engine.paused
    assert driven.driver.view().served == served(1)
    assert driven.kinds() == ["ActivationFailed"]
    assert driven.turns_until(Turn.ACTIVATED) > 1
    assert driven.driver.view().served == served(2)
    assert driven.driver.view().trouble == ""


@pytest.mark.parametrize("how", ["mixed", "poisoned"])
def test_ranks_that_disagree_are_never_resumed(how: str) -> None:
    """A mix, or weights in doubt: held, rebuilt from the bucket, then released (CASE R2, R20)."""
    driven = Driven()
    driven.engine.staged = 2
    driven.engine.faults = [("update", how), ("re_anchor", "before")]
    assert driven.driver.turn() is Turn.HELD
    assert driven.engine.paused
    assert driven.driver.view().held
    assert not driven.engine.forward()
    driven.turns_until(Turn.RECOVERED)
    assert driven.engine.calls.count("re_anchor") == 2
    assert driven.driver.view().held == ""
    assert driven.kinds() == ["ActivationFailed", "EngineHeld", "EngineReleased"]


def test_a_reset_that_reports_failure_fails_the_activation() -> None:
    """Caches that are not empty are not served from, though the weights are right (CASE R7)."""
    driven = Driven()
    driven.engine.staged = 2
    driven.engine.faults = [("reset", "false")] * 7
    assert driven.driver.turn() is Turn.HELD
    assert driven.engine.paused
    failed, held = driven.events
    assert isinstance(failed, ActivationFailed)
    assert failed.kind == "cache_reset"
    assert isinstance(held, EngineHeld)
    assert "could not be reset" in held.reason
    assert driven.clock.slept_s == [0.2] * 4
    driven.turns_until(Turn.RECOVERED)
    assert driven.driver.view().served == served(2)
    assert "re_anchor" not in driven.engine.calls
    assert isinstance(driven.events[-1], EngineReleased)


@pytest.mark.parametrize(
    "faults",
    [
        [("update", "after")],
        [("reset", "before")],
        [("reset", "after")],
        [("resume", "before")],
        [("resume", "after")],
        [("update", "before"), ("status", "before"), ("status", "before")],
    ],
)
def test_an_unknown_state_is_held_until_it_is_known(faults: list[tuple[str, str]]) -> None:
    """A lost answer is asked for again; nothing is rebuilt that every rank can prove (CASE R20)."""
    driven = Driven()
    driven.engine.staged = 2
    driven.engine.faults = list(faults)
    if faults[-1][0] == "status":  # the look that finds the version answers
        driven.engine.faults.insert(0, ("status", ""))
    assert driven.driver.turn() is Turn.HELD
    driven.turns_until(Turn.RECOVERED)
    assert "re_anchor" not in driven.engine.calls
    assert not driven.engine.paused
    assert driven.driver.view().served is not None


def test_weights_found_in_doubt_while_they_serve_end_what_they_answer() -> None:
    """A whole check that fails between safe points: held at once, requests in flight are cut."""
    driven = Driven()
    driven.engine.ranks[1].poisoned = "the live weights are no version's"
    assert driven.driver.turn() is Turn.HELD
    assert driven.engine.requests == ["abort"]
    assert "rank 1: the live weights" in driven.driver.view().held
    driven.turns_until(Turn.RECOVERED)


def test_requests_wait_for_a_held_engine_no_longer_than_told() -> None:
    """After `hold_max_s` requests in flight are ended, once (CASE R18)."""
    driven = Driven(SafePointSettings(min_interval_s=0, jitter_s=0, hold_max_s=30))
    driven.engine.staged = 2
    driven.engine.faults = [("update", "poisoned"), *[("re_anchor", "before")] * 8]
    started_s = driven.clock.monotonic_s()
    assert driven.driver.turn() is Turn.HELD
    while "abort" not in driven.engine.requests:
        driven.clock.advance_s(0.5)
        driven.driver.turn()
    assert 30 <= driven.clock.monotonic_s() - started_s <= 31
    driven.turns_until(Turn.RECOVERED, most=2000)
    assert driven.engine.requests.count("abort") == 1


def test_attempts_grow_apart_up_to_a_limit() -> None:
    """Re-anchors that fail are a second apart, then two, four, and never more than a minute."""
    driven = Driven()
    driven.engine.staged = 2
    driven.engine.faults = [("update", "poisoned"), *[("re_anchor", "before")] * 9]
    moments_s = []
    while driven.driver.turn() is not Turn.RECOVERED:
        if driven.engine.calls[-1] == "re_anchor":
            moments_s.append(driven.clock.monotonic_s())
            driven.engine.calls.append("-")
        driven.clock.advance_s(0.25)
    gaps = [after - before for before, after in itertools.pairwise(moments_s)]
    assert gaps == [2 * 2**n for n in range(5)] + [60.0] * 3


def test_an_engine_left_paused_by_a_killed_driver_is_resumed() -> None:
    """Paused, every rank clean: the next driver empties its caches and lets it serve (CASE R18)."""
    engine = ScriptedEngine(paused=True, cached=0)
    driver = SafePointDriver(engine, FakeClock(), name="e", settings=PROMPT)
    assert driver.turn() is Turn.NOTHING
    assert engine.forward()
    assert engine.wrong == []


@pytest.mark.parametrize("call", ["reset", "resume"])
def test_an_engine_that_cannot_be_made_ready_is_held(call: str) -> None:
    """It found its version but not a safe point: out of rotation until it has had one."""
    engine, clock = ScriptedEngine(faults=[(call, "before")]), FakeClock()
    driver = SafePointDriver(engine, clock, name="e", settings=PROMPT)
    assert driver.turn() is Turn.HELD
    assert "not ready to serve" in driver.view().held
    clock.advance_s(1.0)
    assert driver.turn() is Turn.RECOVERED
    assert engine.forward()


def test_an_engine_left_mixed_by_a_killed_driver_is_not() -> None:
    """Paused, ranks at different versions: rebuilt before it serves (CASE R2)."""
    engine = ScriptedEngine(paused=True, ranks=[Rank(1), Rank(2)])
    clock = FakeClock()
    driver = SafePointDriver(engine, clock, name="e", settings=PROMPT)
    assert driver.turn() is Turn.HELD
    assert engine.paused
    assert driver.turn() is Turn.RECOVERED
    assert engine.forward()
    assert engine.wrong == []


def test_a_run_that_cannot_be_followed_leaves_the_engine_alone() -> None:
    """Initialising fails: the engine serves what it loaded, and it is tried again (CASE R22)."""
    engine, clock = ScriptedEngine(faults=[("initialise", "before")] * 2), FakeClock()
    driver = SafePointDriver(engine, clock, name="e", settings=PROMPT)
    assert driver.turn() is Turn.FAILED
    assert driver.error is not None
    assert driver.view().trouble == "engine: initialise failed"
    assert engine.calls[2:] == ["pause(keep)", "initialise", "status", "is_paused", "resume"]
    assert engine.forward()
    while driver.turn() is not Turn.NOTHING or driver.view().served is None:
        clock.advance_s(0.5)
    assert (driver.view().trouble, driver.error) == ("", None)


def test_a_start_that_broke_off_while_it_wrote_is_held() -> None:
    """Weights that are no version's are not served until a start has proved some (CASE R2)."""
    engine, clock = ScriptedEngine(faults=[("initialise", "poisoned")]), FakeClock()
    driver = SafePointDriver(engine, clock, name="e", settings=PROMPT)
    assert driver.turn() is Turn.HELD
    assert engine.paused
    assert engine.requests == ["keep"]
    clock.advance_s(1.0)
    assert driver.turn() is Turn.RECOVERED
    assert "re_anchor" not in engine.calls
    assert driver.turn() is Turn.NOTHING
    assert engine.forward()
    assert engine.wrong == []


def test_workers_that_were_started_again_are_initialised_again() -> None:
    """Ranks that know no version are not in doubt: they are asked to find theirs."""
    driven = Driven()
    for rank in driven.engine.ranks:
        rank.version = None
    assert driven.driver.turn() is Turn.NOTHING
    assert driven.engine.calls == [
        "is_paused",
        "status",
        "pause(keep)",
        "initialise",
        "status",
        "reset",
        "is_paused",
        "resume",
    ]


def test_an_update_that_changed_nothing_is_a_failure() -> None:
    """An engine that says yes and stays where it is does not pause again and again."""
    driven = Driven()
    driven.engine.staged = 2
    driven.engine.update = lambda wanted: None
    assert driven.driver.turn() is Turn.FAILED
    assert "still at version 1" in driven.driver.view().trouble
    assert driven.driver.turn() is Turn.NOTHING
    assert driven.engine.calls.count("pause(keep)") == 1


def test_nobody_resumes_a_held_engine_by_hand() -> None:
    """`resume` refuses while weights are in doubt, and works when they are not (CASE R18)."""
    driven = Driven()
    driven.driver.resume()
    driven.engine.staged = 2
    driven.engine.faults = [("update", "mixed")]
    driven.driver.turn()
    with pytest.raises(ApplyError, match="is held") as caught:
        driven.driver.resume()
    assert caught.value.kind is Kind.POISONED
    assert driven.engine.paused


@pytest.mark.parametrize(
    "document",
    [
        None,
        "7",
        {},
        {"rank": -1},
        {"rank": True},
        {"rank": 0, "active": {"version": 1}},
        {"rank": 0, "active": {"version": 1, "policy_hash": "short"}},
        {"rank": 0, "staged": "2"},
        {"rank": 0, "poisoned": 1},
        {"rank": 0, "last_pause_s": -1.0},
        {"rank": 0, "dense_share": "much"},
        {"rank": 0, "asleep": 1},
    ],
)
def test_a_status_that_is_none_is_refused(document: object) -> None:
    """What a rank of another release says is not guessed at (CASE R25)."""
    with pytest.raises(ApplyError, match="status is not one") as caught:
        RankStatus.parse(document)
    assert caught.value.kind is Kind.ENGINE


@pytest.mark.parametrize(
    "settings", [{"look_s": 0}, {"reset_attempts": 0}, {"retry_min_s": 99.0}, {"jitter_s": -1}]
)
def test_impossible_settings_are_refused(settings: dict[str, float]) -> None:
    """A setting that could wait for ever, or never, is named at once."""
    with pytest.raises(InvalidInputError, match=next(iter(settings))):
        SafePointSettings(**settings)
