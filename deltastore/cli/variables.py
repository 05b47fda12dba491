"""A secret is named, never given: whoever takes one from the environment does it here."""

from __future__ import annotations

import os

from deltastore.errors import InvalidInputError, Kind


def secret_in(variable: str | None, *, hint: str) -> str | None:
    """What the environment variable of that name holds; None where none is named.

    Raises InvalidInputError(setting) when the variable is not set, or empty.
    """
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise InvalidInputError(
            f"environment variable {variable} is not set", kind=Kind.SETTING, hint=hint
        )
    return value
