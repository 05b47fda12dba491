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


def exit_code(error: DeltastoreError) -> ExitCode:
    """The code for an error, by its class."""
    for error_class, code in _CODES:
        if isinstance(error, error_class):
            return code
    return ExitCode.UNEXPECTED
