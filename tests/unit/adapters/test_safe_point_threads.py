"""Threads that share the work of a safe point do all of it, in order, and end before it fails."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from deltastore.adapters import safe_point_threads
from deltastore.adapters.safe_point_threads import Threads
from deltastore.errors import InvalidInputError


@pytest.fixture(autouse=True)
def _little_work_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_point_threads, "MIN_WEIGHT", 1)


@pytest.mark.parametrize("count", [1, 2, 3, 8, None])
@pytest.mark.parametrize("weights", [[], [0], [5], [1] * 20, [100, 1, 1, 1], [0, 0, 0, 9], [0] * 9])
def test_results_come_in_order(count: int | None, weights: list[int]) -> None:
    """Whatever the weights, every item is worked on once and the results are in their order."""
    items = list(enumerate(weights))
    found = Threads(count).each(items, lambda item: item[0], lambda item: item[1])
    assert found == list(range(len(weights)))


def test_equal_work_is_shared_equally() -> None:
    """Four threads get a quarter each, and all of them run without gradients."""
    seen: dict[int, int] = {}
    barrier = threading.Barrier(4)

    def work(_: int) -> bool:
        me = threading.get_ident()
        if me not in seen:
            barrier.wait(30)
        seen[me] = seen.get(me, 0) + 1
        return torch.is_inference_mode_enabled()

    assert all(Threads(4).each(range(40), work, lambda _: 10))
    assert sorted(seen.values()) == [10, 10, 10, 10]


def test_a_failure_is_raised_after_all_have_ended() -> None:
    """CASE R2: when one share fails, the others are finished before anybody undoes anything."""
    ended: list[int] = []
    begun, failed = threading.Event(), threading.Event()

    def work(item: int) -> None:
        if item == 0:
            begun.wait(30)
            failed.set()
            raise OSError("first share")
        begun.set()
        failed.wait(30)
        ended.append(item)

    with pytest.raises(OSError, match="first share"):
        Threads(2).each(range(10), work, lambda _: 1)
    assert ended == [5, 6, 7, 8, 9]


def test_a_thread_that_cannot_be_started_leaves_nothing_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CASE R2: when there is no thread for the third share, which is in the pool's queue already,
    the second has ended before anything is raised, and the third never begins."""
    ended: list[int] = []
    begun, refused = threading.Event(), threading.Event()
    queued: list[tuple[Any, ...]] = []

    class Pool(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            queued.append(args)
            if len(queued) == 2:
                begun.wait(30)
                refused.set()
                raise RuntimeError("can't start new thread")
            return super().submit(*args, **kwargs)

    def work(item: int) -> None:
        begun.set()
        refused.wait(30)
        ended.append(item)

    monkeypatch.setattr(safe_point_threads, "ThreadPoolExecutor", Pool)
    with pytest.raises(RuntimeError, match="new thread"):
        Threads(3).each(range(9), work, lambda _: 1)
    assert ended == [3, 4, 5]
    work_item, *arguments = queued[1]
    work_item(*arguments)  # as a thread of the pool does that finds it in the queue
    assert ended == [3, 4, 5]


def test_an_interrupt_while_others_still_write_waits_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CASE R2: Ctrl-C between the end of one share and the end of another is raised after both."""
    ended: list[int] = []
    go = threading.Event()
    original = safe_point_threads.wait
    waits: list[int] = []

    def interrupted(futures: object) -> object:
        waits.append(1)
        if len(waits) == 1:
            raise KeyboardInterrupt
        go.set()
        return original(futures)  # type: ignore[arg-type]

    def work(item: int) -> None:
        if item >= 5:
            go.wait(30)
        ended.append(item)

    monkeypatch.setattr(safe_point_threads, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Threads(2).each(range(10), work, lambda _: 1)
    assert sorted(ended) == list(range(10))


def test_no_threads_are_refused() -> None:
    """Zero threads would do nothing."""
    with pytest.raises(InvalidInputError):
        Threads(0)
