"""Keys pasted into settings lose a character: they are read from files, each with what it may sign.

A file of trusted keys has one key per line: its roles (`versions`, `shortcuts`, or both with a
comma), the key as in a public PEM file, and anything after that as a comment. `#` begins a comment
line. `deltastore keygen` prints such a line for a new key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deltastore.errors import InvalidInputError, Kind
from deltastore.format.signing import MaySign, PublicKey, TrustedKey, TrustedKeys

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_KEYS = 256
MAX_FILE_BYTES = 1 << 20
_BEGIN, _END = "-----BEGIN PUBLIC KEY-----", "-----END PUBLIC KEY-----"


def parse_trusted_keys(text: str, *, what: str) -> TrustedKeys:
    """Read a file of trusted keys; InvalidInputError(setting) names the line that is wrong.

    Args:
        what: names the file in errors.
    """
    if len(text) > MAX_FILE_BYTES:
        raise _bad(what, f"has {len(text)} characters")
    keys: dict[str, TrustedKey] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{what}, line {number},"
        if len(words) < 2:
            raise _bad(where, "is not ROLES KEY")
        roles = _roles(words[0], where)
        try:
            key = PublicKey.from_pem(f"{_BEGIN}\n{words[1]}\n{_END}\n".encode())
        except InvalidInputError as err:
            if err.hint is not None and "pip install" in err.hint:
                raise
            raise _bad(where, "has no Ed25519 public key as its second word") from err
        if key.key_id in keys:
            raise _bad(where, f"repeats {key.key_id}: give a key its roles on one line")
        keys[key.key_id] = TrustedKey(key, roles)
    if len(keys) > MAX_KEYS:
        raise _bad(what, f"has {len(keys)} keys")
    return TrustedKeys(tuple(keys.values()))


def trusted_line(key: PublicKey, roles: Iterable[MaySign]) -> str:
    """The line by which a file trusts a key; its id is the comment."""
    names = ",".join(role.value for role in MaySign if role in set(roles))
    body = "".join(key.to_pem().decode().replace(_BEGIN, "").replace(_END, "").split())
    return f"{names} {body} {key.key_id}"


def _roles(word: str, where: str) -> frozenset[MaySign]:
    names = word.split(",")
    known = {role.value for role in MaySign}
    if not set(names) <= known:
        raise _bad(where, f"gives the roles {word[:40]!r}; known are {', '.join(sorted(known))}")
    return frozenset(MaySign(name) for name in names)


def _bad(where: str, what: str) -> InvalidInputError:
    return InvalidInputError(
        f"{where} {what}",
        kind=Kind.SETTING,
        hint="a line is: versions,shortcuts KEY; `deltastore keygen` prints it",
    )
