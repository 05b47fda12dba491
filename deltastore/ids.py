"""Without validated names a stray slash or a wrapped number writes outside the run's prefix."""

from __future__ import annotations

import re
import secrets

from deltastore.errors import InvalidInputError, Kind

MAX_VERSION = 9_999_999_999  # ten digits: lexical order of keys is version order
MAX_NAME_CHARS = 128

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_HEX32 = re.compile(r"[0-9a-f]{32}")
_HEX64 = re.compile(r"[0-9a-f]{64}")


def check_name(name: str, what: str = "name") -> str:
    """Return `name` if it may stand in an object key, else raise InvalidInputError(name)."""
    if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name) or name in {".", ".."}:
        raise InvalidInputError(
            f"{what} {name!r} is not allowed",
            kind=Kind.NAME,
            hint=f"use 1 to {MAX_NAME_CHARS} of A-Z a-z 0-9 . _ -",
        )
    return name


def check_version(version: int) -> int:
    """Return `version` if it is in 0..MAX_VERSION, else raise InvalidInputError(version)."""
    if isinstance(version, bool) or not 0 <= version <= MAX_VERSION:
        raise InvalidInputError(
            f"version {version!r} is not allowed",
            kind=Kind.VERSION,
            hint=f"use a whole number from 0 to {MAX_VERSION}",
        )
    return version


def new_token() -> str:
    """128 random bits as 32 hex digits: lease tokens, job ids, run ids, writer nonces."""
    return secrets.token_hex(16)


def is_token(text: str) -> bool:
    """Whether `text` is 32 lower-case hex digits."""
    return _HEX32.fullmatch(text) is not None


def is_sha256(text: str) -> bool:
    """Whether `text` is 64 lower-case hex digits."""
    return _HEX64.fullmatch(text) is not None
