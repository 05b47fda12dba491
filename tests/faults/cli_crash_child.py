"""Runs a `deltastore` command again and again, each time killed by SIGKILL one put later.

Run as a program: `cli_crash_child.py COMMAND RUN_URL CHECKPOINT OPTIONS OUTCOMES`. Every command
works on a run of its own, RUN_URL plus a number, that is there already for `publish`. It dies
before or after each of its puts of the run's objects, until one lives to its end; then the same
command is run once more on every run. OUTCOMES gets one line of JSON for each: the run, whether
the first command was killed, and how the second one ended. Forked from a process that has one
thread and all modules, so that a child costs little.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltastore.cli import connection
from deltastore.cli.app import app
from deltastore.format.kernels import warm_up
from deltastore.testing.faults import Callback, FaultyStore, Op, fail_at
from tests.faults.crash_child import MOST_STEPS, kill_self

if TYPE_CHECKING:
    from collections.abc import Callable

    from deltastore.storage.store import ObjectStore


def _fork(action: Callable[[], None]) -> int:
    """How a child that does this ended."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _command(words: list[str], name: str, step: int | None) -> None:
    """The command line as a user gave it, dying at that step; ends the process."""
    real = connection.open_observed

    def opened(*args: Any, **options: Any) -> ObjectStore:
        store = FaultyStore(real(*args, **options))
        if step is not None:
            before, after = divmod(step - 1, 2)
            kill = Callback(kill_self, after=bool(after))
            store.add(fail_at(Op.PUT, before + 1, kill, key_contains=f"{name}/"))
        return store

    connection.open_observed = opened
    sys.stdout = sys.stderr
    try:
        app(words)
    except SystemExit as ended:
        os._exit(ended.code if isinstance(ended.code, int) else 98)


def main(command: str, url: str, checkpoint: str, options: list[str], outcomes: Path) -> None:
    """Children until one lives, then a second child for each."""
    warm_up()
    first: list[tuple[str, int]] = []
    for step in range(1, MOST_STEPS):
        name = f"run-{step:03d}"
        if command == "publish":
            words = ["init", f"{url}/{name}", "--checkpoint", f"{checkpoint}/old", *options]
            if _fork(lambda w=words, n=name: _command(w, n, None)):
                sys.exit(f"{name} was not made")
        words = _words(command, f"{url}/{name}", checkpoint, options)
        code = _fork(lambda w=words, n=name, s=step: _command(w, n, s))
        if code not in {0, -signal.SIGKILL}:
            sys.exit(f"the child of step {step} ended with {code}")
        first.append((name, code))
        if code == 0:
            break
    else:
        sys.exit(f"{command} takes more than {MOST_STEPS} steps")
    with outcomes.open("w") as file:
        for name, code in first:
            words = _words(command, f"{url}/{name}", checkpoint, options)
            again = _fork(lambda w=words, n=name: _command(w, n, None))
            row = {"run": name, "killed": code != 0, "again": again}
            file.write(json.dumps(row) + "\n")


def _words(command: str, url: str, checkpoint: str, options: list[str]) -> list[str]:
    if command == "init":
        return ["init", url, "--checkpoint", f"{checkpoint}/old", *options]
    return ["publish", url, f"{checkpoint}/new", "--step", "1", *options]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4]), Path(sys.argv[5]))
