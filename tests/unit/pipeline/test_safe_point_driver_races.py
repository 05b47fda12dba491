"""Pauses, resumes, activations and faults in any order: no forward pass meets what it must not."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from deltastore.errors import ApplyError
from deltastore.pipeline.safe_point import SafePointDriver, SafePointSettings, Turn
from deltastore.testing.clock import FakeClock
from tests.unit.pipeline.scripted_engine import ScriptedEngine

RACES = 10_000
PROMPT = SafePointSettings(min_interval_s=0, jitter_s=0, settle_s=0, retry_min_s=0.5)

FAULTS = st.sampled_from(
    [
        ("initialise", "before"),
        ("initialise", "poisoned"),
        ("status", "before"),
        ("is_paused", "before"),
        ("pause", "before"),
        ("pause", "after"),
        ("update", "before"),
        ("update", "after"),
        ("update", "mixed"),
        ("update", "poisoned"),
        ("reset", "before"),
        ("reset", "after"),
        ("reset", "false"),
        ("resume", "before"),
        ("resume", "after"),
        ("re_anchor", "before"),
        ("re_anchor", "after"),
    ]
)


def test_ten_thousand_races_of_resume_and_activate() -> None:
    """Whoever resumes and whoever activates: no forward pass during a write (CASE R18)."""
    engine, clock = ScriptedEngine(), FakeClock()
    driver = SafePointDriver(engine, clock, name="e", settings=PROMPT)
    driver.turn()
    over = threading.Event()

    def forwards() -> None:
        while not over.is_set():
            engine.forward(within_s=0.01)

    def resumes() -> int:
        count = 0
        while not over.is_set():
            driver.resume()
            count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(forwards) for _ in range(2)]
        resumed = pool.submit(resumes)
        try:
            for version in range(2, RACES + 2):
                engine.staged = version
                assert driver.turn() is Turn.ACTIVATED
        finally:
            over.set()
        for one in running:
            one.result(30)
        assert resumed.result(30) > 0
    assert engine.wrong == []
    assert engine.forwards > 0
    assert {rank.version for rank in engine.ranks} == {RACES + 1}


@given(st.lists(st.tuples(st.lists(FAULTS, max_size=3), st.booleans()), max_size=12))
def test_any_faults_in_any_order(script: list[tuple[list[tuple[str, str]], bool]]) -> None:
    """Never a pass over mixed, doubtful or stale weights; when faults end, it serves the newest."""
    engine, clock = ScriptedEngine(), FakeClock()
    driver = SafePointDriver(engine, clock, name="e", settings=PROMPT)
    version = 1
    for faults, stage in script:
        if stage:
            version += 1
            engine.staged = version
        engine.faults = list(faults)
        for _ in range(3):
            driver.turn()
            engine.forward()
            try:
                driver.resume()  # an operator's hand
            except ApplyError:
                clock.advance_s(0.5)
            engine.forward()
            clock.advance_s(0.5)
        assert engine.wrong == []
    engine.faults = []
    for _ in range(400):
        driver.turn()
        engine.forward()
        clock.advance_s(0.5)
    view = driver.view()
    assert engine.wrong == []
    assert (view.held, engine.paused) == ("", False)
    assert {rank.version for rank in engine.ranks} == {version}
    assert view.served is not None
    assert view.served.version == version
