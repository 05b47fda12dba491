"""A signature covers the body's SHA-256: hashed once for its key and once more for its signature.

With a digest that the caller already knows the body is read once, to send it; and as the store
checks what it is told, it refuses a body that is no longer what was hashed. boto3 takes no digest
of ours: the body carries it, and a signer of our own asks the body (the rest is botocore's).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from botocore.auth import AUTH_TYPE_MAPS, S3SigV4Auth

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_THEIRS = frozenset({"v4", "s3v4"})  # one thing: the first is what an endpoint asks for
_OURS = "deltastore-s3v4"


class _CarriedDigestAuth(S3SigV4Auth):
    """Signature version 4 with the digest that a body carries."""

    def payload(self, request: Any) -> str:
        """The digest that is signed."""
        carried: str | None = getattr(request.body, "sha256", None)
        return carried or str(super().payload(request))


AUTH_TYPE_MAPS[_OURS] = _CarriedDigestAuth


def sign_carried_digests(client: S3Client) -> None:
    """Make a client sign the digest that a body carries as `sha256`, where it does."""
    events = client.meta.events
    events.register("choose-signer.s3", _choose)  # type: ignore[arg-type]  # it uses the answer


def _choose(signature_version: object, **_: object) -> str | None:
    """Ours for what ours is made of; express buckets and presigned addresses keep their own."""
    return _OURS if signature_version in _THEIRS else None
