"""Progress mixed into stdout breaks the pipe behind it: stdout carries results and nothing else.

With `--json` a command prints exactly one JSON document with stable keys; without it, a table for
people. Text that came from a bucket is stripped of control characters before a terminal sees it.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from deltastore.errors import Kind, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console, RenderableType

PIPE_COLUMNS = 160  # a table in a pipe is read by grep: no terminal's width may cut it

Document: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Output:
    """Where a command's result goes: one JSON document, or something readable."""

    as_json: bool

    def emit(self, document: Document, render: Callable[[], RenderableType]) -> None:
        """Print the result; `render` makes the readable form and is called only for it."""
        if self.as_json:
            print_json(document)
        else:
            with _stdout_errors():
                console().print(render())


def print_json(document: Document) -> None:
    """Write one JSON document and a newline to stdout."""
    with _stdout_errors():
        sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False) + "\n")
        sys.stdout.flush()


@contextmanager
def _stdout_errors() -> Iterator[None]:
    """A result that could not be written is an error of the place where it should have gone."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as err:
        _discard_stdout()
        raise StorageError(
            f"the result cannot be written to stdout: {err.strerror or err}",
            kind=Kind.DISK_FULL if err.errno == errno.ENOSPC else Kind.UNAVAILABLE,
            hint="the command itself is done; look before you repeat it",
        ) from err


def _discard_stdout() -> None:
    """Let what is buffered go nowhere: at exit Python would fail on it again."""
    sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


def console() -> Console:
    """A console on the present stdout; wide when stdout is not a terminal."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, soft_wrap=False)


def one_line(text: str) -> str:
    """The text on one line, without anything that could steer a terminal."""
    flat = " ".join(text.split())
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in flat)


def size_text(size_bytes: int) -> str:
    """A size for people: decimal units, three digits."""
    value, unit = float(size_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{size_bytes} B" if unit == "B" else f"{value:.3g} {unit}"


def share_text(part: int, whole: int) -> str:
    """A share as a percentage that is never rounded to 0 or 100."""
    if whole == 0:
        return "-"
    percent = 100 * part / whole
    return f"{percent:.4g} %"


def stamp_text(unix_ms: int) -> str:
    """A wall-clock stamp for people: UTC, to the second."""
    moment = datetime.fromtimestamp(unix_ms / 1000, UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%SZ")
