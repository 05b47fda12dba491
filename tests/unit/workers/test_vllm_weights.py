"""An engine's ranks are asked after everything they are told; only what they agree on is active."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from deltastore.adapters.safetensors_dir import checkpoint_layout, load_state, scan_checkpoint
from deltastore.clock import SystemClock
from deltastore.errors import ApplyError
from deltastore.events import ActivationFailed, ActorJoined, VersionActivated
from deltastore.format.fingerprint import ZERO
from deltastore.format.mixing import fingerprint_state
from deltastore.pipeline.host import HostSource
from deltastore.pipeline.publisher import Publisher
from deltastore.repository.run import create_run
from deltastore.storage.memory import MemoryStore
from deltastore.storage.store_use import StoreUse, UseCounter
from deltastore.testing.checkpoints import tiny_checkpoint
from deltastore.testing.clock import FakeClock
from tests.unit.pipeline.scripted_engine import Rank, ScriptedEngine, served
from workers.actor.safe_point import SafePoint
from workers.actor.vllm_weights import STALE, VllmWeights

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.repository.run import Run

CHANGES = 3  # elements that every version changes


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose versions 2, 3 and 4 change three elements each; 1 is the fence."""
    checkpoint = scan_checkpoint(tiny_checkpoint(tmp_path_factory.mktemp("run") / "v0"))
    layout = checkpoint_layout(checkpoint)
    state = load_state(checkpoint, layout)
    made = create_run(
        MemoryStore(),
        "r",
        layout=layout,
        files=checkpoint.files,
        fingerprint=fingerprint_state(state),
        clock=SystemClock(),
        probe=False,
    )
    publisher = Publisher.open(made, HostSource(state), clock=SystemClock())
    for step in (1, 2, 3):
        state.arrays[0][:CHANGES] ^= 1
        publication = publisher.publish(step)
        assert publication is not None
        publication.result(60)
    publisher.close()
    return made


class Held:
    """Weights of a scripted engine at version 1, on a fake clock."""

    def __init__(self, run: Run, **engine: Any) -> None:
        self.engine = ScriptedEngine(**engine)
        self.engine.initialise()
        self.clock = FakeClock()
        self.events: list[Any] = []
        self.used: list[StoreUse] = []
        self.safe_point = SafePoint(self.clock, finish_within_s=0.0, stop_within_s=0.0)
        self.weights = VllmWeights(
            self.engine,
            run,
            name="a",
            fingerprint=lambda: ZERO,
            start=None,
            most_rebuilds=2,
            catch_up_s=5.0,
            clock=self.clock,
            sink=self.events.append,
            safe_point=self.safe_point,
            used=self.used.append,
        )
        self.engine.calls.clear()

    def kinds(self) -> list[str]:
        """The events so far, by class."""
        return [type(event).__name__ for event in self.events]


@pytest.fixture
def hold(run: Run) -> Callable[..., Held]:
    """Makes weights on the one run."""
    return lambda **engine: Held(run, **engine)


def test_a_staged_version_is_activated_and_every_rank_asked(hold: Callable[..., Held]) -> None:
    """Update, all ranks' answers, caches; the event counts what the versions in between changed."""
    held = hold(staged=3)
    assert held.weights.activate()
    assert held.weights.active == served(3)
    assert held.engine.calls == ["status", "update(newest)", "status", "reset"]
    (event,) = held.events
    assert isinstance(event, VersionActivated)
    assert (event.base_version, event.version, event.nnz) == (1, 3, 2 * CHANGES)
    assert not held.weights.activate()


def test_what_the_engine_reads_is_the_actors(hold: Callable[..., Held]) -> None:
    """Bytes that ranks and stager have read are passed on once, however often they are told."""
    held, counter = hold(), UseCounter()
    for _ in range(3):
        counter.moved("", received_bytes=100)
        held.engine.store = [counter.row("eu")]
        held.weights.activate()
        held.weights.activate()
    assert {use.region for use in held.used} == {"eu"}
    assert sum(use.received_bytes for use in held.used) == 300


def test_nothing_staged_costs_one_question(hold: Callable[..., Held]) -> None:
    """Without a newer version the engine is not touched."""
    held = hold()
    assert not held.weights.activate()
    assert held.engine.calls == ["status"]


@pytest.mark.parametrize("how", ["before", "after"])
def test_an_update_that_fails_counts_as_what_the_ranks_say(
    hold: Callable[..., Held], how: str
) -> None:
    """Nothing written: the base is served on. Written but unanswered: poisoned till caches go."""
    held = hold(staged=3, faults=[("update", how)])
    assert not held.weights.activate()
    (event,) = held.events
    assert isinstance(event, ActivationFailed)
    if how == "before":
        assert not held.weights.poisoned
        assert held.weights.active == served(1)
        assert held.weights.activate()
    else:
        assert held.weights.active == served(3)
        assert held.weights.trouble == STALE
        assert held.weights.poisoned


@pytest.mark.parametrize("how", ["mixed", "poisoned"])
def test_ranks_that_disagree_serve_nothing_until_rebuilt(
    hold: Callable[..., Held], how: str
) -> None:
    """A half-written engine keeps its old number, is poisoned, and is rebuilt (CASES R2, R20)."""
    held = hold(staged=3, faults=[("update", how)])
    assert not held.weights.activate()
    assert held.weights.poisoned
    assert held.weights.active == served(1)
    held.weights.re_anchor()
    assert not held.weights.poisoned
    assert held.weights.active == served(3)
    assert held.kinds() == ["ActivationFailed", "ActorJoined"]


def test_caches_that_do_not_reset_fail_the_activation(hold: Callable[..., Held]) -> None:
    """New weights over old caches are not served, whatever the ranks say (CASE R7)."""
    held = hold(staged=3, faults=[("reset", "false"), ("reset", "false")])
    assert not held.weights.activate()
    assert held.weights.poisoned
    held.weights.re_anchor()
    assert held.weights.poisoned
    held.weights.re_anchor()
    assert not held.weights.poisoned
    assert held.weights.active == served(3)


def test_rebuilds_without_an_activation_are_counted(hold: Callable[..., Held]) -> None:
    """An actor that stays in doubt gives up instead of reading the bucket for ever."""
    held = hold(staged=3, faults=[("reset", "false")] * 9)
    held.weights.re_anchor()
    held.weights.re_anchor()
    with pytest.raises(ApplyError, match="rebuilt 2 times"):
        held.weights.re_anchor()


def test_an_activation_waits_for_forward_passes(hold: Callable[..., Held]) -> None:
    """While a forward pass runs nothing is written, and the base is served on."""
    held = hold(staged=3)
    with held.safe_point.forward():
        assert not held.weights.activate()
    assert "update(newest)" not in held.engine.calls
    assert not held.weights.poisoned
    assert held.weights.activate()


def test_what_exists_is_activated_before_the_first_lease(hold: Callable[..., Held]) -> None:
    """A joiner that stages in time starts at HEAD and says how it got there."""
    held = hold(staged=4)
    held.weights.catch_up()
    assert held.weights.active == served(4)
    joined = held.events[-1]
    assert isinstance(joined, ActorJoined)
    assert (joined.via, joined.version) == ("checkpoint v1 + 3 deltas", 4)


def test_a_joiner_that_stages_nothing_goes_on_in_bounded_time(hold: Callable[..., Held]) -> None:
    """Without a staged version it joins where it is, after at most its patience."""
    held = hold()
    held.weights.catch_up()
    assert held.weights.active == served(1)
    assert 5 <= sum(held.clock.slept_s) < 6
    assert held.kinds() == ["ActorJoined"]


def test_an_engine_whose_ranks_disagree_does_not_start(hold: Callable[..., Held]) -> None:
    """Weights of two versions, or of none, are refused before anything is served."""
    with pytest.raises(ApplyError, match="different versions"):
        hold(ranks=[Rank(1), Rank(2)])
