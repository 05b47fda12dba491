"""Who can write to a bucket can write a policy: signed manifests say who may be believed.

Ed25519 over `CORE_PREFIX` and a core's bytes as stored. The private key stays with the writer, the
trusted public keys are pinned in the reader's configuration and never read from a bucket. A key
has roles: the trainer's signs versions, the maintenance worker's signs shortcuts only. Several keys
may be trusted at once: that is how a key is replaced.

A signature says nothing about freshness: who controls the bucket can withhold new versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from deltastore.errors import IntegrityError, InvalidInputError, Kind
from deltastore.format.fields import CORE_PREFIX, MAX_SIGNATURES, Signature
from deltastore.ids import check_name

if TYPE_CHECKING:
    from collections.abc import Sequence

Signer: TypeAlias = Callable[[bytes], tuple[Signature, ...]]
"""Given a core's bytes, its signatures."""

_KEY_BYTES = 32


def unsigned(core_text: bytes) -> tuple[Signature, ...]:
    """A Signer that does not sign."""
    return ()


class MaySign(StrEnum):
    """What a trusted key may sign."""

    VERSIONS = "versions"
    SHORTCUTS = "shortcuts"


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key. Its bytes are in no repr and in no error.

    Args:
        seed: 32 secret bytes.
    """

    seed: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.seed) != _KEY_BYTES:
            raise InvalidInputError(
                f"a signing key has {_KEY_BYTES} bytes, not {len(self.seed)}",
                kind=Kind.SETTING,
                hint="make one with `deltastore keygen`",
            )

    @classmethod
    def generate(cls) -> SigningKey:
        """A new key from the system's random numbers."""
        return cls(_ed25519().Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def from_pem(cls, text: bytes) -> SigningKey:
        """Read an unencrypted PKCS #8 file, such as `to_pem` or openssl writes."""
        loaded = _load(lambda: _serialization().load_pem_private_key(text, None), "private key")
        if not isinstance(loaded, _ed25519().Ed25519PrivateKey):
            raise _not_a_key("private key")
        return cls(loaded.private_bytes_raw())

    def to_pem(self) -> bytes:
        """The key as an unencrypted PKCS #8 file: keep it readable by its owner only."""
        s = _serialization()
        text: bytes = self._private().private_bytes(
            s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()
        )
        return text

    @property
    def public(self) -> PublicKey:
        """What readers pin."""
        return PublicKey(self._private().public_key().public_bytes_raw())

    def sign(self, core_text: bytes) -> Signature:
        """The signature of a core; the same core has the same signature."""
        signature: bytes = self._private().sign(CORE_PREFIX + core_text)
        return Signature(self.public.key_id, signature.hex())

    def _private(self) -> Any:
        return _ed25519().Ed25519PrivateKey.from_private_bytes(self.seed)


@dataclass(frozen=True, slots=True)
class PublicKey:
    """What a signature is checked with.

    Args:
        raw: 32 bytes.
    """

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != _KEY_BYTES:
            raise _not_a_key("public key")

    @classmethod
    def from_pem(cls, text: bytes) -> PublicKey:
        """Read a SubjectPublicKeyInfo file, such as `to_pem` or openssl writes."""
        loaded = _load(lambda: _serialization().load_pem_public_key(text), "public key")
        if not isinstance(loaded, _ed25519().Ed25519PublicKey):
            raise _not_a_key("public key")
        return cls(loaded.public_bytes_raw())

    def to_pem(self) -> bytes:
        """The key as a SubjectPublicKeyInfo file."""
        s = _serialization()
        text: bytes = self._public().public_bytes(
            s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo
        )
        return text

    @property
    def key_id(self) -> str:
        """The name that signatures carry: from the key itself, so that two keys never share one."""
        return f"ed25519-{hashlib.sha256(self.raw).hexdigest()[:16]}"

    def verifies(self, core_text: bytes, signature: Signature) -> bool:
        """Whether this key made that signature of that core."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._public().verify(bytes.fromhex(signature.signature_hex), CORE_PREFIX + core_text)
        except InvalidSignature:
            return False
        return True

    def _public(self) -> Any:
        return _ed25519().Ed25519PublicKey.from_public_bytes(self.raw)


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key and what it may sign."""

    key: PublicKey
    may_sign: frozenset[MaySign]


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """The keys a reader believes; whatever none of them signed is refused."""

    keys: tuple[TrustedKey, ...]

    def __post_init__(self) -> None:
        if not any(MaySign.VERSIONS in trusted.may_sign for trusted in self.keys):
            raise InvalidInputError(
                "no trusted key may sign versions: every version would be refused",
                kind=Kind.SETTING,
                hint="add the trainer's public key with the role `versions`",
            )

    @classmethod
    def of(cls, versions: Sequence[PublicKey], shortcuts: Sequence[PublicKey] = ()) -> TrustedKeys:
        """Keys by role; a key may be in both lists."""
        roles: dict[PublicKey, set[MaySign]] = {}
        for role, keys in ((MaySign.VERSIONS, versions), (MaySign.SHORTCUTS, shortcuts)):
            for key in keys:
                roles.setdefault(key, set()).add(role)
        return cls(tuple(TrustedKey(key, frozenset(may)) for key, may in roles.items()))

    def require(
        self,
        core_text: bytes,
        signatures: Sequence[Signature],
        role: MaySign,
        *,
        what: str,
        key: str | None = None,
    ) -> None:
        """Raise IntegrityError(signature) unless a key with that role signed the core."""
        by_id = {trusted.key.key_id: trusted for trusted in self.keys}
        notes: list[str] = []
        for signature in signatures:
            trusted = by_id.get(signature.key_id)
            if trusted is None:
                notes.append(f"{signature.key_id} is not trusted")
            elif role not in trusted.may_sign:
                notes.append(f"{signature.key_id} may not sign {role.value}")
            elif not trusted.key.verifies(core_text, signature):
                notes.append(f"the signature of {signature.key_id} is wrong")
            else:
                return
        raise IntegrityError(
            f"{what} is not signed by a trusted key:"
            f" {'; '.join(notes) if notes else 'it has no signature'}",
            kind=Kind.SIGNATURE,
            key=key,
            hint="do not use it; if the writer's key was replaced, trust the new one as well",
        )


def sign_with(*keys: SigningKey) -> Signer:
    """A Signer with one key, or with the old and the new one while readers change over."""
    if not 1 <= len(keys) <= MAX_SIGNATURES:
        raise InvalidInputError(
            f"cannot sign with {len(keys)} keys",
            kind=Kind.SETTING,
            hint=f"use 1 to {MAX_SIGNATURES}",
        )
    for key in keys:
        check_name(key.public.key_id, "key id")
    return lambda core_text: tuple(key.sign(core_text) for key in keys)


def _load(read: Callable[[], Any], what: str) -> Any:
    try:
        return read()
    except (ValueError, TypeError) as err:  # TypeError: the file wants a password
        raise _not_a_key(what) from err


def _not_a_key(what: str) -> InvalidInputError:
    return InvalidInputError(
        f"this is not an unencrypted Ed25519 {what}",
        kind=Kind.SETTING,
        hint="make a pair with `deltastore keygen`, or `openssl genpkey -algorithm ed25519`",
    )


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as err:
        raise _no_library() from err
    return ed25519


def _serialization() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError as err:
        raise _no_library() from err
    return serialization


def _no_library() -> InvalidInputError:
    return InvalidInputError(
        "signatures need the package cryptography",
        kind=Kind.SETTING,
        hint="pip install 'deltastore[signing]'",
    )
