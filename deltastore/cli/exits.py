"""A bare exit code 1 tells a script nothing: each class of error has a code of its own.

The codes follow the error tree, so they say what the caller should do next. Append only.
"""

from __future__ import annotations

from enum import IntEnum

from deltastore.errors import (
    ApplyError,
    ConflictError,
    CoordinationError,
    DeltastoreError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    LeaseError,
    NotFoundError,
    StorageError,
)


class ExitCode(IntEnum):
    """What the process tells its caller. Append only: numbers never change."""

    OK = 0
    """Done."""
    UNEXPECTED = 1
    """A fault of deltastore itself: a traceback is on stderr."""
    INVALID_INPUT = 2
    """Words, options, settings or a checkpoint that can never work; nothing was changed."""
    NOT_FOUND = 3
    """The run, version, object, bucket or file is not there."""
    CONFLICT = 4
    """Something is there already, or HEAD moved: look again, then decide."""
    STORAGE = 5
    """The store is unavailable, throttles, timed out, or refuses the credentials: retry later."""
    INTEGRITY = 6
    """A digest, a fingerprint or the chain does not hold; also what `verify` found."""
    FORMAT = 7
    """Bytes are not what the format says: retrying cannot help."""
    LEASE = 8
    """Another writer owns the run: stop writing."""
    COORDINATION = 9
    """Redis is unavailable or wrongly configured."""
    APPLY = 10
    """A state could not be brought to the version."""
    INTERRUPTED = 130
    """Ended by Ctrl-C, as shells report it."""
    PIPE_CLOSED = 141
    """Whoever read stdout had enough (`| head`), as shells report it; the work itself was done."""


_CODES: tuple[tuple[type[DeltastoreError], ExitCode], ...] = (
    (InvalidInputError, ExitCode.INVALID_INPUT),
    (NotFoundError, ExitCode.NOT_FOUND),
    (ConflictError, ExitCode.CONFLICT),
    (StorageError, ExitCode.STORAGE),
    (IntegrityError, ExitCode.INTEGRITY),
    (FormatError, ExitCode.FORMAT),
    (LeaseError, ExitCode.LEASE),
    (CoordinationError, ExitCode.COORDINATION),
    (ApplyError, ExitCode.APPLY),
)


_DAMAGED = "`deltastore verify --deep RUN_URL` says what is damaged and what to do"
_WAYS_OUT = {
    ExitCode.UNEXPECTED: "report this with --traceback",
    ExitCode.INVALID_INPUT: "see `deltastore COMMAND --help`",
    ExitCode.NOT_FOUND: "`deltastore verify RUN_URL` says what a run lacks",
    ExitCode.CONFLICT: "look at what is there, then decide",
    ExitCode.STORAGE: "try again later",
    ExitCode.INTEGRITY: _DAMAGED,
    ExitCode.FORMAT: _DAMAGED,
    ExitCode.LEASE: "another writer owns the run: stop this one, or start a run of its own",
    ExitCode.COORDINATION: "check that Redis runs",
    ExitCode.APPLY: "start again from a full version",
}


def way_out(error: DeltastoreError) -> str:
    """What to do about an error: its own hint, else what helps with its class."""
    return error.hint or _WAYS_OUT[exit_code(error)]


def exit_code(error: DeltastoreError) -> ExitCode:
    """The code for an error, by its class."""
    for error_class, code in _CODES:
        if isinstance(error, error_class):
            return code
    return ExitCode.UNEXPECTED
