"""A signature says who made a manifest, and nothing that was not signed so is believed."""

from __future__ import annotations

import subprocess
from shutil import which

import pytest

from deltastore.errors import IntegrityError, InvalidInputError, Kind
from deltastore.format.fields import CORE_PREFIX, MAX_SIGNATURES, Signature
from deltastore.format.signing import (
    MaySign,
    PublicKey,
    SigningKey,
    TrustedKeys,
    sign_with,
    unsigned,
)

KEY = SigningKey(bytes(range(32)))
OTHER = SigningKey(bytes(32))
CORE = b'{"format":"x"}'


def require(trusted, signatures, role=MaySign.VERSIONS, core=CORE):
    """Check a core's signatures."""
    trusted.require(core, signatures, role, what="version 7", key="r/versions/7")


def refused(trusted, signatures, role=MaySign.VERSIONS, core=CORE):
    """The message with which signatures are refused."""
    with pytest.raises(IntegrityError) as err:
        require(trusted, signatures, role, core)
    assert err.value.kind is Kind.SIGNATURE
    assert err.value.key == "r/versions/7"
    return err.value.message


def test_signed_core_is_believed():
    """What a trusted key signed is believed, again and again with the same signature."""
    trusted = TrustedKeys.of([KEY.public])
    signatures = sign_with(KEY)(CORE)
    require(trusted, signatures)
    assert sign_with(KEY)(CORE) == signatures
    assert len(signatures[0].signature_hex) == 128


def test_signature_is_plain_ed25519_over_prefix_and_core():
    """Any Ed25519 implementation can check it: the message is the prefix and the core's bytes."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    raw = Ed25519PublicKey.from_public_bytes(KEY.public.raw)
    raw.verify(bytes.fromhex(KEY.sign(CORE).signature_hex), CORE_PREFIX + CORE)


def test_known_key_and_signature():
    """Key id and signature of a fixed key are these for ever."""
    assert KEY.public.key_id == "ed25519-56475aa75463474c"
    assert KEY.sign(CORE).signature_hex.startswith("3cc01019f016cd2cdf8bdb4dfcc27c49")


def test_everything_else_is_refused():
    """No signature, a stranger's, one of another core, a changed one: each refused with why."""
    trusted = TrustedKeys.of([KEY.public])
    good = KEY.sign(CORE)
    flipped = Signature(
        good.key_id, ("0" if good.signature_hex[0] != "0" else "1") + good.signature_hex[1:]
    )
    assert "no signature" in refused(trusted, ())
    assert "not trusted" in refused(trusted, sign_with(OTHER)(CORE))
    assert "is wrong" in refused(trusted, (flipped,))
    assert "is wrong" in refused(trusted, (good,), core=CORE + b" ")
    assert "is wrong" in refused(trusted, (Signature(good.key_id, OTHER.sign(CORE).signature_hex),))


def test_roles_are_kept_apart():
    """The maintenance key may sign shortcuts and never a version."""
    trusted = TrustedKeys.of([KEY.public], [OTHER.public])
    require(trusted, sign_with(OTHER)(CORE), MaySign.SHORTCUTS)
    assert "may not sign versions" in refused(trusted, sign_with(OTHER)(CORE))
    assert "may not sign shortcuts" in refused(trusted, sign_with(KEY)(CORE), MaySign.SHORTCUTS)
    both = TrustedKeys.of([KEY.public], [KEY.public])
    require(both, sign_with(KEY)(CORE), MaySign.SHORTCUTS)


def test_keys_rotate_with_two_signatures():
    """While readers change over, a core signed with old and new key satisfies both kinds."""
    signatures = sign_with(KEY, OTHER)(CORE)
    for key in (KEY, OTHER):
        require(TrustedKeys.of([key.public]), signatures)
    require(TrustedKeys.of([KEY.public, OTHER.public]), sign_with(OTHER)(CORE))


def test_keys_as_files():
    """Keys survive their PEM files, and a generated key is a new one."""
    assert SigningKey.from_pem(KEY.to_pem()) == KEY
    assert PublicKey.from_pem(KEY.public.to_pem()) == KEY.public
    assert SigningKey.generate() != SigningKey.generate()


def test_openssl_keys_are_read(tmp_path):
    """A key made by openssl is read, and its public half is what openssl says."""
    openssl = which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    path = tmp_path / "key.pem"
    subprocess.run([openssl, "genpkey", "-algorithm", "ed25519", "-out", path], check=True)
    key = SigningKey.from_pem(path.read_bytes())
    public = subprocess.run(
        [openssl, "pkey", "-in", path, "-pubout"], check=True, capture_output=True
    )
    assert PublicKey.from_pem(public.stdout) == key.public


@pytest.mark.parametrize(
    "text", [b"", b"junk", b"-----BEGIN PRIVATE KEY-----\nAA==\n-----END PRIVATE KEY-----\n"]
)
def test_what_is_no_key_is_refused(text):
    """Garbage instead of a key file is refused with the way to make one."""
    for read in (SigningKey.from_pem, PublicKey.from_pem):
        with pytest.raises(InvalidInputError, match="Ed25519"):
            read(text)


def test_other_kinds_of_key_are_refused():
    """An RSA or EC key, or an encrypted one, is refused and not guessed at."""
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import ec

    other = ec.generate_private_key(ec.SECP256R1())
    private = other.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    public = other.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    locked = KEY._private().private_bytes(
        s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"secret")
    )
    for text in (private, locked):
        with pytest.raises(InvalidInputError):
            SigningKey.from_pem(text)
    with pytest.raises(InvalidInputError):
        PublicKey.from_pem(public)


def test_secret_is_in_no_text():
    """A private key's bytes are in no repr and no error message."""
    assert KEY.seed.hex() not in repr(KEY)
    assert "seed" not in repr(KEY)
    with pytest.raises(InvalidInputError) as err:
        SigningKey(b"secret")
    assert "secret" not in str(err.value)


def test_senseless_configurations_are_refused():
    """Trusting nobody for versions, or signing with too many keys, is refused at once."""
    with pytest.raises(InvalidInputError, match="versions"):
        TrustedKeys.of([], [KEY.public])
    with pytest.raises(InvalidInputError):
        sign_with()
    with pytest.raises(InvalidInputError):
        sign_with(*[KEY] * (MAX_SIGNATURES + 1))
    assert unsigned(CORE) == ()
