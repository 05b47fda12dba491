"""A script that must parse prose breaks at the next release: here exit codes and JSON are an API.

The `deltastore` command. Everything it can do is also a library call; this package only parses
words, calls, and prints. It starts fast: what a command needs is imported when it runs.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """The entry point: run the command of `sys.argv` and exit with a code of `ExitCode`."""
    _open_standard_streams()
    try:
        from deltastore.cli.app import app
    except KeyboardInterrupt:  # while imports run; later it is the command's error boundary
        sys.exit(130)
    app(prog_name="deltastore")


def _open_standard_streams() -> None:
    """A stream that the caller closed goes nowhere, or a file opened later would get its number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
