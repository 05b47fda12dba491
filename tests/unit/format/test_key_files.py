"""Keys are trusted as their file says, line by line, and never by halves."""

from __future__ import annotations

import pytest

from deltastore.errors import InvalidInputError, Kind
from deltastore.format.key_files import parse_trusted_keys, trusted_line
from deltastore.format.signing import MaySign, SigningKey, TrustedKey

KEY = SigningKey.generate().public
OTHER = SigningKey.generate().public


def test_a_line_says_what_it_trusts() -> None:
    """The line that keygen prints is read back as the same key with the same roles."""
    lines = [
        "# trainer and worker",
        "",
        trusted_line(KEY, [MaySign.VERSIONS]),
        f"  {trusted_line(OTHER, [MaySign.SHORTCUTS, MaySign.VERSIONS])} and a comment",
    ]
    found = parse_trusted_keys("\n".join(lines), what="the file")
    assert found.keys == (
        TrustedKey(KEY, frozenset({MaySign.VERSIONS})),
        TrustedKey(OTHER, frozenset(MaySign)),
    )


@pytest.mark.parametrize(
    "text",
    [
        "versions",
        "everything KEY",
        "versions,everything KEY",
        "versions AAAA",
        "versions KEY\nshortcuts KEY",
        "shortcuts KEY",
        "",
    ],
)
def test_what_is_refused(text: str) -> None:
    """Unknown roles, half a key, a key given twice and no key for versions are refused."""
    body = trusted_line(KEY, [MaySign.VERSIONS]).split()[1]
    with pytest.raises(InvalidInputError) as err:
        parse_trusted_keys(text.replace("KEY", body), what="the file")
    assert err.value.kind is Kind.SETTING
    assert err.value.hint


def test_the_line_is_named() -> None:
    """The error names the line that is wrong."""
    with pytest.raises(InvalidInputError, match="the file, line 3, "):
        parse_trusted_keys("#\n\nversions x\n", what="the file")
