"""Handlers are written against the error tree: it changes by appending, never otherwise."""

from __future__ import annotations

import inspect
from pathlib import Path

from deltastore import errors
from deltastore.errors import DeltastoreError, Kind

PINNED = Path(__file__).parent / "pinned"


def _lines(name: str) -> list[str]:
    text = (PINNED / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_the_error_classes_and_their_bases_are_pinned() -> None:
    """Every error class, with its bases, is in pinned/errors.txt, and nothing else is there."""
    found = {
        f"{name}({', '.join(base.__name__ for base in value.__bases__)})"
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, DeltastoreError)
    }
    assert found == set(_lines("errors.txt"))


def test_kinds_are_append_only() -> None:
    """Every kind that was ever released still has its name and value."""
    found = {f"{kind.name} = {kind.value}" for kind in Kind}
    assert set(_lines("kinds.txt")) <= found


def test_a_kind_has_one_spelling() -> None:
    """A kind's value is its name in lower case, so that searching for either finds both."""
    assert [kind.value for kind in Kind] == [kind.name.lower() for kind in Kind]


def test_every_error_says_where_and_the_way_out() -> None:
    """On one line an error names the run, version and key it has, and ends with its hint."""
    err = errors.NotFoundError(
        "object is missing",
        kind=Kind.OBJECT_MISSING,
        run="r",
        version=3,
        key="r/versions/0000000003.json",
        hint="wait for it",
    )
    assert str(err) == (
        "object is missing [run=r, version=3, key=r/versions/0000000003.json] (wait for it)"
    )
