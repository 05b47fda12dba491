"""An error caught in each command is forgotten in one: all of them pass this boundary.

Whatever a command raises becomes one line on stderr and an exit code; with `--json` stdout also
carries one JSON document that says the same. Errors that nobody raised on purpose pass through:
they are bugs, and their traceback is what a report needs.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from deltastore.cli.exits import ExitCode, exit_code, way_out
from deltastore.cli.output import one_line, print_json
from deltastore.errors import DeltastoreError, InvalidInputError, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence


class CommandGroup(TyperGroup):
    """The `deltastore` command with its error boundary."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command and exit; the parameters are those of the framework."""
        words = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in words
        try:
            _refuse_empty(words)
            code = super().main(
                words,
                prog_name or "deltastore",
                complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
        except DeltastoreError as err:
            if "--traceback" in words:
                raise
            code = exit_code(err)
            _report(error_document(err, code), as_json=as_json)
        except typer.TyperException as err:
            code = ExitCode.INVALID_INPUT
            _report(_usage_document(err.format_message(), code), as_json=as_json)
        except typer.Abort:
            code = ExitCode.INTERRUPTED
        except SystemExit as err:  # the framework's answer to a closed pipe, and to --help
            if isinstance(err.__context__, BrokenPipeError):
                code = ExitCode.PIPE_CLOSED
            else:
                raise
        sys.exit(int(code or ExitCode.OK))


def _refuse_empty(words: Sequence[str]) -> None:
    """Refuse empty words: as a path one means the current folder, which nobody asked for.

    No option or argument has a use for one; it is what a variable of the shell that is not set
    leaves behind.
    """
    before = "deltastore"
    for word in words:
        option, separator, value = word.partition("=")
        if not word or (word.startswith("--") and separator and not value):
            raise InvalidInputError(
                f"the word after {before!r} is empty" if not word else f"{option} is empty",
                kind=Kind.SETTING,
                hint="say what is meant ('.' is this folder); is a variable of the shell not set?",
            )
        before = word


def error_document(error: DeltastoreError, code: ExitCode) -> dict[str, Any]:
    """The fields of an error as `--json` prints them; every key is always there."""
    return {
        "kind": error.kind.value,
        "class": type(error).__name__,
        "message": error.message,
        "run": error.run,
        "version": error.version,
        "key": error.key,
        "hint": way_out(error),
        "exit_code": int(code),
    }


def _usage_document(message: str, code: ExitCode) -> dict[str, Any]:
    return {
        "kind": "usage",
        "class": "UsageError",
        "message": message,
        "run": None,
        "version": None,
        "key": None,
        "hint": "see `deltastore COMMAND --help`",
        "exit_code": int(code),
    }


def _report(document: dict[str, Any], *, as_json: bool) -> None:
    where = [
        f"{name}={document[name]}"
        for name in ("run", "version", "key")
        if document[name] is not None
    ]
    text = f"deltastore: {document['kind']}: {document['message']}"
    text += f" [{', '.join(where)}]" if where else ""
    print(one_line(f"{text} ({document['hint']})"), file=sys.stderr)
    if as_json:
        print_json({"error": document})
