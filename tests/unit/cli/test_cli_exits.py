"""Exit codes are an API: which error gives which code, and that the page says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deltastore import errors
from deltastore.cli.exits import ExitCode, exit_code, way_out
from deltastore.errors import DeltastoreError, Kind

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"


@pytest.mark.parametrize(
    ("error_class", "code"),
    [
        (errors.InvalidInputError, 2),
        (errors.NotFoundError, 3),
        (errors.ConflictError, 4),
        (errors.StorageError, 5),
        (errors.IntegrityError, 6),
        (errors.FormatError, 7),
        (errors.LeaseError, 8),
        (errors.CoordinationError, 9),
        (errors.ApplyError, 10),
        (errors.DeltastoreError, 1),
    ],
)
def test_code_of_class(error_class: type[DeltastoreError], code: int) -> None:
    """Every class of the error tree has its own exit code, for ever."""
    assert exit_code(error_class("no", kind=Kind.FIELD)) == code


def test_no_class_forgotten() -> None:
    """A class added to the error tree does not fall through to `unexpected`."""
    for error_class in DeltastoreError.__subclasses__():
        assert exit_code(error_class("no", kind=Kind.FIELD)) is not ExitCode.UNEXPECTED


def test_every_error_has_a_way_out() -> None:
    """An error without a hint of its own gets that of its class."""
    for error_class in (DeltastoreError, *DeltastoreError.__subclasses__()):
        assert way_out(error_class("no", kind=Kind.FIELD))
        assert way_out(error_class("no", kind=Kind.FIELD, hint="go")) == "go"


def test_page_lists_every_code() -> None:
    """The table of exit codes in docs/cli.md has exactly the codes there are."""
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {(int(number), name) for number, name in rows} == {
        (int(code), code.name.lower()) for code in ExitCode
    }
