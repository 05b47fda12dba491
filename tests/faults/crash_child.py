"""Publishes a version again and again, each time in a child that SIGKILLs itself one step later.

Run as a program: `crash_child.py STORE_URL FOLDER`. A step is a system call by which files become
durable; the child dies before it. Deaths at the puts of a real server are in region_crash_child.py.
Every child makes the same run in a folder of its own (s1, s2, ...) and dies in the middle of
version 2 (version 1 says that a new trainer took over), until one lives to its end. One line of
JSON for each: the folder, whether it was killed. Forked from a process that has one thread and all
modules, so that a child costs little.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltastore.format.kernels import warm_up
from deltastore.storage.url import open_store
from tests.unit.pipeline.harness import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.storage.store import ObjectStore

MOST_STEPS = 200
CALLS = ("open", "write", "fsync", "link", "replace", "rename", "unlink")


def kill_self() -> None:
    """As the kernel's OOM killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at_call(step: int) -> None:
    """From now on the `step`-th of the calls that make files durable is not carried out."""
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == step:
                kill_self()
            return call(*args, **options)

        return wrapper

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def publish(store: ObjectStore, folder: Path, step: int) -> None:
    """Make the run, arm the fault, publish version 2."""
    world = World(folder, home_store=store)
    publisher = world.publisher()
    kill_at_call(step)
    world.step(publisher, 1)
    publisher.close()


def main(url: str, folder: Path) -> None:
    """Children until one lives."""
    warm_up()
    for step in range(1, MOST_STEPS):
        name = f"s{step}"
        child = os.fork()
        if child == 0:
            try:
                publish(open_store(f"{url}/{name}"), folder / name, step)
                os._exit(0)
            finally:
                os._exit(3)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code not in {0, -signal.SIGKILL}:
            sys.exit(f"the child of step {step} ended with {code}")
        sys.stdout.write(json.dumps({"folder": name, "killed": code != 0}) + "\n")
        sys.stdout.flush()  # else the next child would have this line too
        if code == 0:
            return
    sys.exit(f"version 2 takes more than {MOST_STEPS} steps")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
