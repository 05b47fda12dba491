"""An error that crosses a process loses nothing a handler looks at, and garbage is no error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deltastore import errors
from deltastore.errors import DeltastoreError, IntegrityError, Kind, error_of, error_row

CLASSES = sorted(
    value.__name__
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, DeltastoreError)
)


@pytest.mark.parametrize("name", CLASSES)
def test_every_error_comes_back_as_it_was(name: str) -> None:
    """Class, kind, message, run, version, key and hint, through JSON."""
    sent = getattr(errors, name)(
        "it is torn", kind=Kind.DIGEST, run="r", version=0, key="k", hint="repair it"
    )
    found = error_of(json.loads(json.dumps(error_row(sent))))
    assert type(found) is type(sent)
    assert vars(found) == vars(sent)
    assert str(found) == str(sent)


def test_what_is_not_known_of_an_error_is_left_out() -> None:
    """Nothing but class, kind and message must be there."""
    row = error_row(IntegrityError("torn", kind=Kind.DIGEST))
    assert row == {"class": "IntegrityError", "kind": "digest", "message": "torn"}
    found = error_of(row)
    assert isinstance(found, IntegrityError)
    assert (found.run, found.version, found.key, found.hint) == (None, None, None, None)


@pytest.mark.parametrize(
    "odd",
    [
        {"class": "Kind"},
        {"class": "OSError"},
        {"class": "error_of"},
        {"class": None},
        {"kind": "of_tomorrow"},
        {"message": None},
        {"version": True},
        {"version": "7"},
        {"hint": 7},
    ],
)
def test_a_row_that_is_no_error_is_none(odd: dict[str, Any]) -> None:
    """Unknown classes and kinds, and fields of another type, are not guessed at (CASE R25)."""
    row = error_row(IntegrityError("torn", kind=Kind.DIGEST))
    assert error_of(row | odd) is None
