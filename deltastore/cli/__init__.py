"""A script that must parse prose breaks at the next release: here exit codes and JSON are an API.

The `deltastore` command. Everything it can do is also a library call; this package only parses
words, calls, and prints. It starts fast: what a command needs is imported when it runs.
"""

from __future__ import annotations


def main() -> None:
    """The entry point: run the command of `sys.argv` and exit with a code of `ExitCode`."""
    from deltastore.cli.app import app

    app(prog_name="deltastore")
