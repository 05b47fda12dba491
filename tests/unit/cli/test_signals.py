"""A signal that comes at the worst instruction ends a program; it never hangs it."""

from __future__ import annotations

import ast
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deltastore.cli.follow_engine import _ending_on_signals
from deltastore.cli.signals import SignalBell, ring_on_sigterm

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 20.0  # a limit, not a wait


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The handlers from before, afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class HeldEvent(threading.Event):
    """An event that says which thread sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.setters: list[threading.Thread] = []

    def set(self) -> None:
        """Note who it is; only another thread may wait for the lock."""
        self.setters.append(threading.current_thread())
        if threading.current_thread() is not threading.main_thread():
            super().set()


def test_sigterm_inside_a_wait_is_heard() -> None:
    """The main thread holds the event's own lock when SIGTERM comes, and the event is set."""
    stopping = HeldEvent()
    ring_on_sigterm(stopping.set)
    inside: Any = stopping
    with inside._cond:  # where `Event.wait` is while it looks
        signal.raise_signal(signal.SIGTERM)
    assert stopping.wait(LIMIT_S)
    assert threading.main_thread() not in stopping.setters


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_follower_is_ended_inside_a_wait(number: int) -> None:
    """`follow --vllm` sets no event in a handler either; the second Ctrl-C does not wait."""
    stopping = HeldEvent()
    inside: Any = stopping
    with _ending_on_signals(stopping) as ctrl_c:
        with inside._cond:
            signal.raise_signal(number)
        assert stopping.wait(LIMIT_S)
        assert ctrl_c.pressed == (number == signal.SIGINT)
        if ctrl_c.pressed:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
    assert threading.main_thread() not in stopping.setters


def test_a_bell_that_is_closed_has_done_what_it_was_rung_for() -> None:
    """Every ring is answered, in another thread, before `close` returns."""
    answered: list[threading.Thread] = []
    bell = SignalBell(lambda: answered.append(threading.current_thread()))
    for _ in range(3):
        bell.ring()
    bell.close()
    assert len(answered) == 3
    assert threading.main_thread() not in answered


def _handlers(path: Path) -> list[str]:
    """What a module gives `signal.signal`, as source."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [
        ast.unparse(call.args[1]) for call in calls if ast.unparse(call.func) == "signal.signal"
    ]


def test_every_handler_only_rings() -> None:
    """No program sets an event, or stops an actor, inside a signal handler."""
    found = {
        str(path.relative_to(ROOT)): handlers
        for folder in ("deltastore", "workers")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (handlers := _handlers(path))
    }
    rings = "lambda *_signal: bell.ring()"
    assert found == {
        "deltastore/cli/follow_engine.py": [rings, "interrupt", "terminate", "before"],
        "deltastore/cli/signals.py": [rings],
        "workers/demo/__main__.py": ["interrupt"],  # raises KeyboardInterrupt, sets nothing
    }
