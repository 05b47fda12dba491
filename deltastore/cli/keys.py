"""A private key readable by everyone signs for everyone: `keygen` writes it for its owner alone.

Also reads the files that `--trusted-keys` and `--sign-key` name. What is in them is never printed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from deltastore.cli.files import new_file, read_small, refuse_existing, typed_errors
from deltastore.errors import InvalidInputError, Kind
from deltastore.format.key_files import parse_trusted_keys, trusted_line
from deltastore.format.signing import MaySign, SigningKey, TrustedKeys, sign_with, unsigned

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from deltastore.cli.output import Output
    from deltastore.format.signing import Signer


def make_keys(out: Path, roles: Sequence[str], output: Output) -> None:
    """Write a new private key to `out` and its public key to `out`.pub."""
    known = {role.value for role in MaySign}
    odd = [name for name in roles if name not in known]
    if odd:
        raise InvalidInputError(
            f"there is no role {odd[0]!r}",
            kind=Kind.SETTING,
            hint=f"--role {' or --role '.join(sorted(known))}",
        )
    may_sign = [MaySign(name) for name in roles]
    refuse_existing(out)  # first: a folder such as '.' has no name to add to
    public_path = out.with_name(out.name + ".pub")
    refuse_existing(public_path)
    key = SigningKey.generate()
    with typed_errors(out):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(out, flags, 0o600)
    try:
        with typed_errors(out), os.fdopen(descriptor, "wb") as handle:
            handle.write(key.to_pem())
            handle.flush()
            os.fsync(handle.fileno())
        with new_file(public_path) as handle:
            handle.write(key.public.to_pem())
    except BaseException:  # half a pair would be in the way of the next try
        out.unlink(missing_ok=True)
        raise
    line = trusted_line(key.public, may_sign)
    document = {
        "key_id": key.public.key_id,
        "private_key": str(out),
        "public_key": str(public_path),
        "trusted_line": line,
    }
    output.emit(
        document,
        lambda: (
            f"{out}: private key {key.public.key_id}, for its owner only\n"
            f"{public_path}: public key\n"
            f"line for a file of trusted keys: {line}"
        ),
    )


def read_trusted(path: Path | None) -> TrustedKeys | None:
    """The keys of the file that `--trusted-keys` names; None trusts the bucket."""
    if path is None:
        return None
    body = read_small(path)
    return parse_trusted_keys(body.decode("ascii", "replace"), what=str(path))


def read_signer(paths: Sequence[Path]) -> Signer:
    """A signer with every key that `--sign-key` names; without any it does not sign."""
    if not paths:
        return unsigned
    keys = []
    for path in paths:
        body = read_small(path)
        try:
            keys.append(SigningKey.from_pem(body))
        except InvalidInputError as err:
            raise InvalidInputError(f"{path}: {err.message}", kind=err.kind, hint=err.hint) from err
    return sign_with(*keys)
