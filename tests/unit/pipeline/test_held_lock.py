"""Lock files of the dead go, and no name is ever held twice, whoever comes in between."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest

from deltastore.adapters.vllm.whole_spool import WholeSpool
from deltastore.errors import InvalidInputError, Kind
from deltastore.pipeline import held_lock
from deltastore.pipeline.held_lock import HeldLock, is_locked, remove_if_dead
from deltastore.pipeline.spool import SpoolFolder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOLD = """
import sys
from pathlib import Path
from deltastore.pipeline.held_lock import HeldLock
held = [HeldLock(Path(path), what="it") for path in sys.argv[1:]]
print("held", flush=True)
sys.stdin.read()
"""
CONTEND = """
import os, sys
from pathlib import Path
from deltastore.errors import InvalidInputError
from deltastore.pipeline.held_lock import HeldLock, remove_if_dead
lock, inside, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
held = removed = 0
for _ in range(rounds):
    try:
        mine = HeldLock(lock, what="it")
    except InvalidInputError:
        continue
    os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # FileExistsError: somebody else holds it
    os.unlink(inside)
    held += 1
    mine.close()
    removed += remove_if_dead(lock)
print(held, removed)
"""


@pytest.fixture
def children() -> Iterator[ExitStack]:
    """Ends the processes of a test."""
    with ExitStack() as stack:
        yield stack


def child(children: ExitStack, code: str, *words: object) -> subprocess.Popen[str]:
    """A process of that code, once it has said its first line."""
    made = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    children.enter_context(made)
    children.callback(made.kill)
    assert made.stdout is not None
    assert made.stdout.readline()
    return made


def test_what_killed_processes_held_goes_and_what_living_ones_hold_stays(
    tmp_path: Path, children: ExitStack
) -> None:
    """A rank's lock, note and offer, and an engine's lock and folder, are removed when their
    process has been killed, and not before."""
    spool = SpoolFolder(tmp_path)
    whole = tmp_path / "whole"
    (whole / "host-7" / "updates").mkdir(parents=True)
    (whole / "host-6").mkdir()  # its lock is gone already
    locks = spool.rank_lock("host-7-0"), whole / "host-7.lock"
    holder = child(children, HOLD, *locks)
    said = [spool.ranks / "host-7-0.json", spool.ranks / ".host-7-0.json.part"]
    said += [spool.offers / path.name for path in said]
    for path in said:
        path.write_text("{}")
    theirs = spool.ranks / "paper.lock"
    theirs.write_text("theirs")
    WholeSpool(tmp_path, "other").close()
    spool.living_ranks()
    assert all(path.exists() for path in (*said, *locks, whole / "host-7"))
    assert not (whole / "host-6").exists()
    holder.kill()
    holder.wait()
    assert spool.living_ranks() == {}
    assert [*spool.ranks.iterdir(), *spool.offers.iterdir()] == [theirs]
    with closing(WholeSpool(tmp_path, "third")):
        assert {path.name for path in whole.iterdir()} == {"third.lock"}


def test_processes_that_take_and_remove_never_hold_it_twice(
    tmp_path: Path, children: ExitStack
) -> None:
    """Four processes take the name, let go of it, and remove its file, hundreds of times: at no
    time two of them hold it, and each of them comes to hold it."""
    words = (tmp_path / "it.lock", tmp_path / "inside", 500)
    racers = [child(children, CONTEND, *words) for _ in range(4)]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    ended = [racer.communicate()[0].split() for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * 4
    assert all(int(held) > 0 for held, _ in ended)
    assert sum(int(removed) for _, removed in ended) > 0


def test_a_file_that_is_removed_before_it_is_locked_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has opened a file that is removed before it is locked holds the next one: a second
    process of that name is refused."""
    path = tmp_path / "it.lock"
    opened = os.open
    removals = [2]

    def open_then_lose(*arguments: object) -> int:
        found = opened(*arguments)  # type: ignore[arg-type]
        if removals[0]:
            removals[0] -= 1
            path.unlink()
        return found

    monkeypatch.setattr(held_lock.os, "open", open_then_lose)
    with closing(HeldLock(path, what="it")):
        assert not removals[0]
        assert is_locked(path)
        with pytest.raises(InvalidInputError) as caught:
            HeldLock(path, what="it")
        assert caught.value.kind is Kind.LEASE_HELD
    removals[0] = 10**6
    with pytest.raises(InvalidInputError, match="removed as often") as caught:
        HeldLock(path, what="it")
    assert caught.value.kind is Kind.SETTING


def test_who_comes_while_a_dead_ones_things_are_removed_waits(tmp_path: Path) -> None:
    """A name is not taken while what its last holder left is being removed, and nobody who wants it
    is refused because of that; when the removal fails the file stays for the next one."""
    path = tmp_path / "it.lock"
    path.touch()
    order: list[str] = []
    begun = threading.Event()

    def take() -> None:
        begun.set()
        held = HeldLock(path, what="it")
        order.append("taken")
        assert not remove_if_dead(path, lambda: order.append("never"))
        held.close()

    taker = threading.Thread(target=take)

    def clear() -> None:
        taker.start()
        begun.wait(10)
        taker.join(0.05)  # it would have it by now
        order.append("cleared")

    assert remove_if_dead(path, clear)
    taker.join(10)
    assert order == ["cleared", "taken"]
    assert path.exists()

    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        remove_if_dead(path, fail)
    assert path.exists()
    assert remove_if_dead(path)
    assert not path.exists()
